"""Which draft rule pays on this host: a cost model, a replay of calibration tokens, and a choice.

A round of self-speculation ("Product of Experts" §5.4; here drafts are not run again, only the stages behind
the drafting ones are) starts at position s, whose input is known. The drafting stages predict its successor;
while their margin is above a threshold and fewer than `longest` tokens are drafted, that prediction is the
next input. After m drafts there are m + 1 pending rows, s..s+m:

    cost of the round       (m + 1) draft + deep(m + 1)          seconds, measured on the host
    tokens of the round     a + 1,  a = leading drafts that agree with full depth, a <= m

The draft of position t is made, trusted (margin_t) and judged (agree_t) at the position that predicts it,
not at the one that it then occupies. The + 1 is the full model's own token at position s + a, which corrects
the first wrong draft or follows the last right one. Drafts behind a wrong one are wasted but paid for.

For fixed m = n and independent agreement a, the tokens of a round are (1 - a^{n+1}) / (1 - a) on average.

Limits. The replay is teacher-forced: behind a wrong draft it reads margins of the text, where a decoder
would read those of its own wrong continuation, so the number of *wasted* drafts is approximate. Text is
also harder than a model's own greedy output. The best of a grid, on the tokens that chose it, is optimistic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topograd.errors import ConfigError, DataError

LONGEST = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
QUANTILES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)
WORTHWHILE = 1.02
"""A rule must beat full depth by more than this, or drafting is turned off."""


@dataclass(frozen=True)
class RowCosts:
    """Seconds measured on one host."""

    draft: float
    """One token through the drafting stages with their readout."""
    deep: Mapping[int, float]
    """The stages behind them with their readout, for M rows at once; some sizes M, at least two."""
    full: float
    """One token at full depth, as plain decoding runs it."""
    uneven: float = 0.0
    """What a pass over several sequences costs more where some of them have drafts."""

    def __post_init__(self) -> None:
        if len(self.deep) < 2 or min(self.deep) < 1:
            raise ConfigError(
                f"deep costs are given for {sorted(self.deep)} rows", remedy="give two sizes from 1 up"
            )
        for seconds in (self.draft, self.full, *self.deep.values()):
            if not 0 < seconds < math.inf:
                raise ConfigError(
                    f"a cost of {seconds} seconds was given", remedy="a cost must be finite and above 0"
                )

    def as_dict(self) -> dict[str, Any]:
        """The seconds as JSON holds them."""
        deep = {str(rows): seconds for rows, seconds in self.deep.items()}
        return {"draft": self.draft, "full": self.full, "deep": deep}

    @classmethod
    def from_dict(cls, values: Any) -> RowCosts:
        """What `as_dict` gave."""
        deep = {int(rows): float(seconds) for rows, seconds in values["deep"].items()}
        return cls(float(values["draft"]), deep, float(values["full"]))

    def deep_seconds(self, m: int) -> float:
        """The deep stages on m rows: linear between the sizes measured, and beyond them."""
        sizes = sorted(self.deep)
        right = min(max(bisect_left(sizes, m), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        return self.deep[low] + (self.deep[high] - self.deep[low]) * (m - low) / (high - low)

    def round_seconds(self, drafted: int) -> float:
        """One round with this many drafts."""
        return (drafted + 1) * self.draft + self.deep_seconds(drafted + 1)


@dataclass(frozen=True)
class DraftRule:
    """Draft the next token while the draft margin is above `threshold`, at most `longest`."""

    threshold: float
    longest: int

    def __post_init__(self) -> None:
        if not self.threshold >= 0 or self.longest < 1:
            raise ConfigError(
                f"threshold is {self.threshold} and longest is {self.longest}",
                setting="threshold",
                given=self.threshold,
                remedy=("a draft rule needs a threshold of at least 0 and a longest draft of at least 1"),
            )


@dataclass(frozen=True)
class Outcome:
    """What a replay found."""

    tokens_per_second: float
    speedup: float
    """Over full depth."""
    acceptance: float
    """Drafts kept over drafts made, wasted ones included; 0 where none was made."""
    mean_draft: float
    """Drafts in a round."""


def simulate(
    margins: Sequence[float],
    agrees: Sequence[int],
    lengths: Sequence[int],
    rule: DraftRule,
    costs: RowCosts,
) -> Outcome:
    """Replay teacher-forced sequences under a rule; `lengths` cuts `margins` and `agrees` into them.

    A round starts only where `longest` more positions of its sequence follow. So no round is cut short by
    the end of the text, and which rounds count does not depend on how they come out. O(tokens).
    """
    _check(margins, agrees, lengths)
    longest = rule.longest
    if longest >= max(lengths, default=0):
        raise DataError(
            f"no sequence is longer than {longest} tokens, the longest draft", remedy="give longer text"
        )
    stop = _next(np.asarray(margins, dtype=np.float64) <= rule.threshold)
    wrong = _next(np.asarray(agrees) == 0)
    rounds = [0] * (longest + 1)  # by the number of drafts
    kept = begin = 0
    for length in lengths:
        s, last = begin, begin + length - 1 - longest
        while s <= last:
            drafted = min(stop[s] - s, longest)
            accepted = min(wrong[s] - s, drafted)
            rounds[drafted] += 1
            kept += accepted
            s += accepted + 1
        begin += length
    seconds = sum(count * costs.round_seconds(drafted) for drafted, count in enumerate(rounds))
    made = sum(count * drafted for drafted, count in enumerate(rounds))
    speed = (kept + sum(rounds)) / seconds
    return Outcome(speed, speed * costs.full, kept / made if made else 0.0, made / sum(rounds))


def choose(
    margins: Sequence[float], agrees: Sequence[int], lengths: Sequence[int], costs: RowCosts
) -> DraftRule | None:
    """The fastest rule of the grid in replay, or None where none is worthwhile.

    The grid is 0 and quantiles of the margins, times the lengths of `LONGEST` that the sequences allow.
    """
    _check(margins, agrees, lengths)
    usable = [longest for longest in LONGEST if longest < max(lengths, default=0)]
    if not usable:
        return None
    best, fastest = None, WORTHWHILE
    for threshold in sorted({0.0, *np.quantile(margins, QUANTILES).tolist()}):
        for longest in usable:
            rule = DraftRule(threshold, longest)
            speedup = simulate(margins, agrees, lengths, rule, costs).speedup
            if speedup > fastest:
                best, fastest = rule, speedup
    return best


def low(seconds: Sequence[float]) -> float:
    """The lower quartile: on a busy machine the slow moments are not the model's."""
    return sorted(seconds)[len(seconds) // 4]


def _next(hits: NDArray[np.bool_]) -> list[int]:
    """For each position the first hit at or behind it; their number where there is none."""
    positions = np.where(hits, np.arange(len(hits)), len(hits))
    found: list[int] = np.minimum.accumulate(positions[::-1])[::-1].tolist()
    return found


def _check(margins: Sequence[float], agrees: Sequence[int], lengths: Sequence[int]) -> None:
    if not len(margins) == len(agrees) == sum(lengths):
        raise ConfigError(
            f"{len(margins)} margins, {len(agrees)} agreements and sequences of {sum(lengths)} "
            "tokens were given",
            remedy="the three must be equal",
        )
