"""Heads of drafters over a pruned vocabulary: the rows of the likeliest tokens, packed for decoding.

    z_V = Σ_j w_j W_{j,V} norm(h_j)        V: some tokens; the terms j are those of the exit's prediction

A draft that names no token outside of V is safe: the model verifies it, and a token that V lacks is not
drafted. Of sampled text, q is 0 outside of V. Cost: |V| width a position instead of vocab · width; SmolLM2's
head is a fifth of its weights, 8192 of its 49152 rows a thirtieth.

Source: "FR-Spec" (Zhao et al. 2025). Limits: where a stack cannot lend its head (`nn/capabilities.py`), rows
are gathered for each position, which costs what it saves.
"""

import copy

from torch import Tensor, nn

from topograd.decode.cache import Batch
from topograd.decode.engine import Engine
from topograd.nn.draft_stage import unit
from topograd.nn.heads import Head, HeadedStack
from topograd.nn.stack import Stack
from topograd.runtime.native.runtime import NativeRuntime
from topograd.runtime.protocol import Runtime, TorchRuntime

PRUNED_TOKENS = 8192
PRUNED_SHARE = 4
"""A draft vocabulary has at most so many tokens, and one of so many of the model's."""


def pruned_size(vocab: int) -> int:
    """How many tokens a draft vocabulary has by default."""
    return max(2, min(PRUNED_TOKENS, vocab // PRUNED_SHARE))


def runtime_like(engine: Engine, stack: Stack) -> TorchRuntime | NativeRuntime:
    """A runtime for a small stack beside an engine's: the kernels in the engine's precision, or torch."""
    if isinstance(engine.runtime, NativeRuntime):
        return NativeRuntime(stack, engine.runtime.precision, threads=engine.runtime.threads)
    return TorchRuntime(stack.for_decoding())


def pruned_stack(stack: HeadedStack, number: int, vocabulary: Tensor) -> HeadedStack:
    """A stack without layers whose head is that of a stage, on some tokens; its other parts are shared."""
    small, head = copy.copy(stack), stack.head
    vars(small)["_modules"] = dict(stack._modules)
    bias = None if head.bias is None else head.bias.detach()[vocabulary]
    small.layers = nn.ModuleList()
    small.head = Head(head.matrix(number, vocabulary).detach(), bias, softcap=head.softcap)
    return small


class DraftHead:
    """What the exit after a stage predicts, on some tokens or all."""

    def __init__(self, engine: Engine, stage: int, vocabulary: Tensor | None) -> None:
        self.engine, self.stage, self.vocabulary = engine, stage, vocabulary
        self._readers: list[tuple[int, int, float, Runtime]] = []
        if vocabulary is None or not isinstance(engine.trained, HeadedStack):
            return
        for each, weight in engine.plan.prediction.after(stage):
            number = engine.plan.stages[each].head
            small = pruned_stack(engine.trained, number, vocabulary)
            self._readers.append((each, number, weight, runtime_like(engine, small)))

    def logits(self, batch: Batch, counts: list[int] | None = None) -> Tensor:
        """At the last position of each sequence, or the last `counts`: (N, tokens)."""
        if not self._readers:
            return self.engine.logits(batch, self.stage, counts, self.vocabulary)
        total: Tensor | None = None
        for each, number, weight, reader in self._readers:
            h = batch[0].cache.hidden(batch, each, counts)
            translator = self.engine.translator(number)
            z = reader.readout(h if translator is None else translator(unit(h)), 0)
            z = z if weight == 1 else weight * z
            total = z if total is None else total + z
        assert total is not None, "a prediction has a term"
        return total
