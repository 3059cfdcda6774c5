"""The decoding engine: a model laid out for decoding, with its exits and caches.

A strategy (`strategies.py`, `wand.py`, `speculation.py`) decides how deep each token goes: its `step`
writes at least one token in every sequence of a batch. All strategies share one cache, so their keys and
values are those of the full model (`cache.py`).

The model sees at most `context` tokens of a sequence. When that is full, its older half is forgotten and the
rest is read again; this depends only on the number of tokens, so strategies that write the same tokens agree
on it.
"""

from __future__ import annotations

import copy
import functools
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from topograd.decode.cache import Batch, Cache
from topograd.decode.sampling import Sampling, draw, not_finite
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError
from topograd.exec.stage_cache import is_causal
from topograd.runtime.protocol import ArrayRuntime, Runtime, TorchRuntime, inference
from topograd.topology.branches import Path, branches, path_name
from topograd.topology.plan import AnyPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.nn.stack import Stack
    from topograd.nn.translator import Readable, Translator

Tokens = abc.Sequence[abc.Sequence[int]]


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that was written, and the exit whose prediction it is, counted from 0."""

    token: int
    exit: int
    drafter: str = field(default="", compare=False)
    """Which drafter proposed it; empty where the model itself predicted it."""


class Engine:
    """A model whose layers are laid out for decoding. A stack without states is run anew for each token.

    Exits are the stages that predict, in order; strategies count them from 0.
    """

    def __init__(
        self,
        stack: Stack | None,
        topology: AnyPlan,
        context: int | None = None,
        runtime: Runtime | None = None,
        translators: Callable[[], Mapping[int, Translator]] = dict,
    ) -> None:
        """`translators` gives what exits before the last are read through, by head, when one is read.

        `stack` is None where the runtime has packed weights that were kept, of a plan that fits them.
        """
        if stack is None:
            assert isinstance(topology, Plan)
            assert context is not None
            assert runtime is not None
            self.plan, self.keeps_states = topology, True
        else:
            from topograd.nn.preparation import check_prepared

            context = stack.context if context is None else context
            self.plan = Plan.of(topology, len(stack.layers))
            check_prepared(stack, self.plan)
            self.keeps_states = all(hasattr(layer, "new_state") for layer in stack.layers)
            """Whether a token costs one position, and not the whole prefix."""
        if context < 1:
            raise ConfigError(setting="context", given=context, allowed="at least 1")
        if runtime is None:
            assert stack is not None
            runtime = TorchRuntime(stack.for_decoding() if self.keeps_states else stack)
        self.runtime, self._given = runtime, stack
        self._readout = runtime if isinstance(runtime, ArrayRuntime) else None
        self.context = context
        self.exits = self.plan.predicting()
        """The stages that predict."""
        self.translators = functools.cache(translators)
        self._last_head = self.plan.stages[self.plan.last].head

    @property
    def stack(self) -> Stack:
        """The model as the runtime has it."""
        return self.runtime.stack

    @property
    def trained(self) -> Stack:
        """The stack as it was given, which is not laid out for decoding."""
        return self.runtime.stack if self._given is None else self._given

    @property
    def last(self) -> int:
        """The last exit, which predicts as the model does."""
        return len(self.exits) - 1

    @property
    def vocab(self) -> int:
        """How many tokens there are."""
        return self.stack.vocab

    def branched(self, paths: abc.Sequence[Path]) -> tuple[Engine, tuple[int, ...]]:
        """An engine over paths through the stages, sharing this one's weights, and where each path ends."""
        names = {port.relay for planned in self.plan.stages for port in planned.outputs} - {"identity"}
        if any(is_causal(self.stack, name) for name in names):
            problem = "regions that are joined by interfaces cannot be skipped"
            raise ConfigError(problem, setting="paths", given=list(paths), remedy="use depth full")
        trie = branches(self.plan, paths)
        engine = copy.copy(self)
        engine.plan, engine.exits = trie.plan, trie.plan.predicting()
        return engine, trie.ends

    def stage_of(self, exit_: int) -> int:
        """The stage of an exit, if the model has it."""
        if not 0 <= exit_ < len(self.exits):
            remedy = f"the model has {len(self.exits)} stages that predict: give 1 to {len(self.exits)}"
            problem = f"exit {exit_ + 1} does not exist"
            raise ConfigError(problem, setting="exit", given=exit_ + 1, remedy=remedy)
        return self.exits[exit_]

    def new_cache(self) -> Cache:
        """A cache without sequences."""
        return Cache(self.runtime, self.plan, self.context)

    @inference
    def start(self, prompts: Tokens, sampling: Sampling | None = None) -> list[Sequence]:
        """Sequences of one new cache that hold the end of each prompt, not run yet.

        Sequence r draws with the stream of a single one with seed + r.
        """
        if not prompts or not all(prompts):
            remedy = "start with the document separator"
            raise ConfigError("a prompt has no token", setting="prompts", remedy=remedy)
        cache, sampling = self.new_cache(), sampling or Sampling()
        batch = [cache.new(sampling.shifted(i), i) for i in range(len(prompts))]
        cache.push(batch, [list(prompt[-self.context :]) for prompt in prompts])
        return batch

    def append(self, batch: Batch, tokens: Tokens) -> None:
        """Give each sequence one token or none; one that is full forgets its older half first.

        Like the cache's own methods, for use inside `torch.inference_mode()`.
        """
        cache, new = batch[0].cache, [list(row) for row in tokens]
        for i, sequence in enumerate(batch):
            sequence.take(new[i])
            if new[i] and len(sequence) == self.context:
                new[i] = sequence.tokens[len(sequence) - self.context // 2 :] + new[i]
                cache.truncate([sequence], [0])
        cache.push(batch, new)

    def run(self, batch: Batch, stage: int) -> None:
        """Run what the exit after `stage` predicts by."""
        for each, _ in self.plan.prediction.after(stage):
            batch[0].cache.run(batch, each)

    def logits(
        self, batch: Batch, stage: int, counts: abc.Sequence[int] | None = None, tokens: Tensor | None = None
    ) -> Tensor:
        """What the exit after `stage`, which has run, predicts: (N, vocab).

        At the last `counts` positions of each sequence (by default one), sequence behind sequence; for some
        `tokens` of the vocabulary, or all.
        """
        from topograd.exec.forward import predict

        terms = self.plan.prediction.after(stage)
        hidden = {each: batch[0].cache.hidden(batch, each, counts) for each, _ in terms}
        return predict(self._reader, self.plan, hidden, terms, tokens)

    def next_tokens(self, batch: Batch, stage: int) -> list[int]:
        """What each sequence writes next by the exit after `stage`, which has run."""
        readout, head = self._readout, self.plan.stages[stage].head
        alone = self.plan.prediction.after(stage) == ((stage, 1),)
        plain = alone and all(sequence.plain for sequence in batch)
        if readout is None or not plain or self.translator(head) is not None:
            return choose(self.logits(batch, stage), batch)
        best, tokens = _largest(readout.readout_array(batch[0].cache.hidden_array(batch, stage), head))
        check_finite(best)
        return tokens

    @functools.cached_property
    def _reader(self) -> Readable:
        return self.reader(self.runtime)

    def translator(self, head: int) -> Translator | None:
        """What an exit with this head is read through; None for the last, and where it is read as it is."""
        return None if head == self._last_head else self.translators().get(head)

    def reader(self, reader: Readable) -> Readable:
        """The stack or a runtime, with the exits before the last read through their translators."""
        from topograd.nn.translator import TranslatedReader

        return TranslatedReader(reader, lambda: self.translators(), self._last_head)


def check_exits(plan: Plan) -> None:
    """Early exits and drafts need two stages that predict, at least, and a model that predicts by them."""
    if plan.prediction.path is not None:
        path = path_name(plan.prediction.path)
        problem = f"the model predicts by the path {path}, of which its exits are no part"
        raise ConfigError(problem, setting="depth", remedy="use depth full")
    if len(plan.predicting()) < 2:
        problem = f"the model has {len(plan.predicting())} predicting stages of {len(plan.stages)}"
        way = "train or import it with --partition, as 2,2"
        if plan.topology.interface is not None:
            way = "of regions the last alone has a loss; use depth full or speculate:lookup"
        remedy = f"early exits and drafts need at least 2: {way}"
        raise ConfigError(problem, setting="partition", remedy=remedy)


def choose(logits: Tensor, batch: Batch) -> list[int]:
    """A token for each sequence of logits (rows, vocab): the likeliest, or drawn by its own sampling."""
    return pick(processed(logits, batch), batch)


def processed(logits: Tensor, batch: Batch) -> Tensor:
    """Logits (rows, vocab) as each sequence's sampling wants them; as they are where none changes any."""
    import torch

    if not any(sequence.sampling.looks_back for sequence in batch):
        return logits
    rows = logits.cpu().double().split(1)  # one copy for all
    return torch.cat([sequence.processed(z) for z, sequence in zip(rows, batch, strict=True)])


def pick(logits: Tensor, batch: Batch) -> list[int]:
    """`choose` of logits that are processed."""
    if all(sequence.sampling.greedy for sequence in batch):
        best, tokens = likeliest(logits)
        check_finite(best)
        return tokens
    chosen = []
    for z, sequence in zip(logits.cpu(), batch, strict=True):  # one copy for all
        chosen.append(draw(sequence.probabilities(z), sequence.generator))
    return chosen


def likeliest(logits: Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row (rows, vocab), and which it is; the first of several.

    On a CPU by numpy, in one thread: torch's threads would wait for more work, and so take the processor from
    those of another runtime.
    """
    if logits.device.type != "cpu":
        return read_together(*logits.max(-1))
    return _largest(logits.numpy())


def _largest(values: NDArray[Any]) -> tuple[list[float], list[int]]:
    best = values.argmax(-1)
    return values[range(len(values)), best].tolist(), best.tolist()


def read_together(scores: Tensor, tokens: Tensor) -> tuple[list[Any], list[Any]]:
    """Scores and token numbers of one shape as lists, in one copy from a device: exact below 2²⁴ tokens."""
    import torch

    if scores.device.type == "cpu":
        return scores.tolist(), tokens.tolist()
    dtype = torch.promote_types(scores.dtype, torch.float32)
    first, second = torch.stack((scores.to(dtype), tokens.to(dtype))).cpu()
    return first.tolist(), second.long().tolist()


def check_finite(best: abc.Sequence[float]) -> None:
    """Whether the largest logit of each row is a number; a NaN among the others would be the largest."""
    if not all(-float("inf") < value < float("inf") for value in best):
        raise not_finite()
