"""WAND early exit: tokens leave at the first exit that is sure enough. Approximate.

After each exit stage whose threshold is finite, a token whose margin exceeds it is written at once; its
later stages stay pending, and the next token that goes deeper runs the whole queue (`cache.py`). So what is
approximate is only the choice of the token that left, never the memory of those that come after it.

With a bound on how much a rival may still gain, the last head is read only for the candidates that can win
(`survivors`), where they are few: eq. 8 of Theorem 2.4.3, with θ the leader's logit after stage k, drops a
token j where z_{k,j} + bound < θ. The paper calls this block-max WAND. It is not: there are no blocks with a
bound each, and one bound serves the whole vocabulary. Source: "Product of Experts" §5.3.

Margins are of the logits that a token is taken from: behind bias, penalties and grammar (`processor.py`), so
a token that is the only one allowed leaves at the first exit. What a bias or a penalty adds is the same at
every exit, so it changes no gain; a repetition penalty scales gains by it.

In a batch, the sequences that have not left share each later stage.
"""

import math
from collections import abc

import torch
from torch import Tensor

from topograd.decode.cache import Batch
from topograd.decode.engine import (
    Emitted,
    Engine,
    check_exits,
    check_finite,
    choose,
    pick,
    processed,
    read_together,
)
from topograd.decode.sequence import Sequence
from topograd.decode.strategies import DecodeStrategy
from topograd.errors import ConfigError

FEW = 8
"""Pruning reads the last head for the survivors only where they are at most 1/FEW of the vocabulary."""


class Wand(DecodeStrategy):
    """Leave at exit k where margin_k > thresholds[k]."""

    exits_early = True

    def __init__(
        self, engine: Engine, thresholds: abc.Sequence[float], bounds: abc.Sequence[float] | None = None
    ) -> None:
        check_exits(engine.plan)
        if len(thresholds) != engine.last:
            problem = f"{len(thresholds)} thresholds for {engine.last + 1} stages"
            remedy = "calibrate this run again"
            raise ConfigError(problem, setting="thresholds", given=list(thresholds), remedy=remedy)
        if bounds is not None and len(bounds) != engine.last:
            problem = f"{len(bounds)} bounds for {engine.last} exits"
            remedy = "calibrate this run again"
            raise ConfigError(problem, setting="bounds", given=list(bounds), remedy=remedy)
        self.engine, self.exit = engine, engine.last
        self.thresholds = tuple(thresholds)
        self.exits = [(k, tau) for k, tau in enumerate(thresholds) if tau < math.inf]
        self.bounds = bounds
        """For each exit a bound on the rival gain, to prune candidates with; None reads all of them."""

    def last_stages(self) -> list[int]:
        return [self.engine.exits[-1]]

    def first_stages(self) -> list[int]:
        return [self.engine.exits[self.exits[0][0]]] if self.exits else self.last_stages()

    @torch.inference_mode()
    def step(self, batch: Batch) -> list[list[Emitted]]:
        engine = self.engine
        chosen: dict[int, tuple[int, int]] = {}  # by place in the batch: token and exit
        deeper = list(range(len(batch)))
        logits: dict[int, Tensor] = {}
        for exit_, tau in self.exits:
            some = [batch[i] for i in deeper]
            engine.run(some, engine.exits[exit_])
            here = processed(engine.logits(some, engine.exits[exit_]), some)
            best, tokens = read_together(*here.topk(2))
            check_finite([first for first, _ in best])
            leaving = [row for row, (first, second) in enumerate(best) if first - second > tau]
            for row, token in zip(leaving, self._tokens(here, tokens, some, leaving), strict=True):
                chosen[deeper[row]] = token, exit_
            logits = {i: z for i, z in zip(deeper, here, strict=True) if i not in chosen}
            deeper = list(logits)
            if not deeper:
                break
        if deeper:
            engine.run([batch[i] for i in deeper], engine.exits[-1])
            for i, token in self._last(batch, deeper, logits).items():
                chosen[i] = token, engine.last
        written = [chosen[i] for i in range(len(batch))]
        engine.append(batch, [[token] for token, _ in written])
        return [[Emitted(token, exit_)] for token, exit_ in written]

    @staticmethod
    def _tokens(logits: Tensor, best: list[list[int]], batch: list[Sequence], rows: list[int]) -> list[int]:
        """What the rows that leave write: the likeliest token, or one that is drawn."""
        if all(batch[row].sampling.greedy for row in rows):
            return [best[row][0] for row in rows]
        return pick(logits.cpu()[rows], [batch[row] for row in rows])  # one copy, and no index is sent

    def _last(self, batch: Batch, rows: list[int], before: dict[int, Tensor]) -> dict[int, int]:
        """The tokens of full depth, for rows that have run all stages."""
        engine, stage = self.engine, self.engine.exits[-1]
        chosen: dict[int, int] = {}
        if self.bounds is not None and before:
            bound = self.bounds[self.exits[-1][0]]
            for row in rows:
                if not batch[row].plain:  # the last head's logits of all tokens are drawn from, or changed
                    continue
                candidates = survivors(before[row], bound)
                if len(candidates) * FEW <= len(before[row]):
                    best, place = engine.logits([batch[row]], stage, tokens=candidates)[0].max(-1)
                    (value,), (token,) = read_together(best[None], candidates.take(place)[None])
                    check_finite([value])
                    chosen[row] = token
        rest = [row for row in rows if row not in chosen]
        if rest:
            some = [batch[row] for row in rest]
            chosen |= dict(zip(rest, choose(engine.logits(some, stage), some), strict=True))
        return chosen


def survivors(logits: Tensor, bound: float) -> Tensor:
    """Indices of the tokens of logits (vocab,) that can still win if no rival gains more than `bound`.

    The leader is always among them. With a bound that holds for a token's true gain, so is the final argmax,
    up to the rounding of the logits.
    """
    if not bound >= 0:
        raise ConfigError(setting="bound", given=bound, allowed="at least 0")
    if logits.ndim != 1:
        raise ConfigError(setting="logits", given=tuple(logits.shape), allowed="of shape (vocab,)")
    return torch.nonzero(logits.max() - logits <= bound).squeeze(-1)
