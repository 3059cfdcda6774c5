"""Leaving early, token by token: the approximate mode.

After each exit stage whose threshold is finite, a token whose margin exceeds it is written at once; its
later stages stay pending, and the next token that goes deeper runs the whole queue (`cache.py`). So what is
approximate is only the choice of the token that left, never the memory of those that come after it.

With a bound on how much a rival may still gain, the last head is read only for the candidates that can win
(`wand.survivors`), where they are few. Source: "Product of Experts" §5.3 and Theorem 2.4.3.

Limits. One row at a time: in a batch, a stage is saved only if every row leaves before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.decode.engine import AnyCache, Chooser, Emitted, Engine, check_finite, read_together
from topograd.decode.exit_rules import check_exits, survivors
from topograd.decode.sampling import Sampling
from topograd.errors import ConfigError

FEW = 8
"""Pruning reads the last head for the survivors only where they are at most 1/FEW of the vocabulary."""


class Wand:
    """Leave at stage k where margin_k > thresholds[k]."""

    def __init__(
        self,
        engine: Engine,
        thresholds: Sequence[float],
        sampling: Sampling | None = None,
        bounds: Sequence[float] | None = None,
    ) -> None:
        check_exits(engine.plan)
        if len(thresholds) != engine.last:
            raise ConfigError(
                f"{len(thresholds)} thresholds for {engine.last + 1} stages; calibrate this run again"
            )
        if bounds is not None and len(bounds) != engine.last:
            raise ConfigError(f"{len(bounds)} bounds for {engine.last} exits; calibrate this run again")
        self.engine = engine
        self.exits = [(k, tau) for k, tau in enumerate(thresholds) if tau < math.inf]
        self.sampling = sampling or Sampling()
        self.bounds = bounds if self.sampling.greedy else None
        """For each exit stage a bound on the rival gain, to prune candidates with; None reads all of them."""

    def begin(self, rows: int) -> None:
        if rows != 1:
            raise ConfigError(f"wand writes one row at a time and {rows} are given; use full or speculate")
        self.chooser = Chooser(self.sampling, 1)

    @torch.inference_mode()
    def advance(self, cache: AnyCache, active: Sequence[bool]) -> list[list[Emitted]]:
        token, stage = self._next(cache)
        self.engine.append(cache, [[token]])
        return [[Emitted(token, stage)]]

    def _next(self, cache: AnyCache) -> tuple[int, int]:
        engine, stages = self.engine, self.engine.exits
        logits, checked = None, 0
        for checked, tau in self.exits:
            engine.run(cache, stages[checked])
            logits = engine.logits(cache, stages[checked])[0, -1]
            (first, second), (token, _) = read_together(*logits.topk(2))
            check_finite([first])
            if first - second > tau:
                return (token if self.sampling.greedy else self._draw(logits)), checked
        last = stages[-1]
        engine.run(cache, last)
        if self.bounds is not None and logits is not None:
            candidates = survivors(logits, self.bounds[checked])
            if len(candidates) * FEW <= len(logits):
                best, place = engine.logits(cache, last, tokens=candidates)[0, -1].max(-1)
                (value,), (token,) = read_together(best[None], candidates.take(place)[None])
                check_finite([value])
                return token, engine.last
        return self._draw(engine.logits(cache, last)[0, -1]), engine.last

    def _draw(self, logits: Tensor) -> int:
        return self.chooser.choose(logits[None], [True])[0]
