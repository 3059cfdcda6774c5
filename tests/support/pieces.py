"""Rows of tokens, decoded in pieces: what stages give is checked against the whole forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from topograd.decode.cache import Cache
from topograd.decode.strategies import PathEnsemble
from topograd.nn.stack import Stack
from topograd.runtime.protocol import Runtime
from topograd.topology.plan import Plan


class Decoded:
    """Equally long sequences of one cache."""

    def __init__(self, stack: Stack | Runtime, plan: Plan, rows: int, capacity: int) -> None:
        self.cache = Cache(stack, plan, capacity)
        with torch.inference_mode():
            self.batch = [self.cache.new() for _ in range(rows)]

    @torch.inference_mode()
    def outputs(self, inputs: Tensor, stages: Iterable[int]) -> dict[int, Tensor]:
        """The last hidden states (rows, time, ...) of these stages at new tokens (rows, time)."""
        rows, time = inputs.shape
        self.cache.push(self.batch, inputs.tolist())
        found = {}
        for stage in stages:
            self.cache.run(self.batch, stage)
            h = self.cache.hidden(self.batch, stage, [time] * rows)
            found[stage] = h.unflatten(0, (rows, time))
        return found

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Go back in every sequence."""
        self.cache.truncate(self.batch, [length] * len(self.batch))


@torch.inference_mode()
def pooled(strategy: PathEnsemble, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities (vocab,) behind a text, by the paths of an ensemble."""
    batch = strategy.engine.start([tokens])
    for end in strategy.ends:
        strategy.engine.run(batch, end)
    return strategy.predictions(batch)[0].log_softmax(-1)
