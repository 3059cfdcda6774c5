"""What a study found: its numbers, the claims that they test, and a verdict by a stated rule.

Statement. x_1..x_n are the values of an effect for n seeds, each the difference of arms that share the seed's
first weights and data; m is their mean and s their standard deviation:

    I = m ± t s / √n,        t the 95 % point of Student's distribution with n - 1 degrees of freedom

    above c      held if all of I lies above c, failed if all of it lies below, else undecided
    within c     held if I lies inside (-c, c), failed if it lies outside, else undecided
    outside c    the same with held and failed exchanged
    each         one effect for each of several steps: held if all are above 0, failed if one is below
    every        a yes or no for each seed: held if all say yes, failed if none does, else undecided

One seed decides nothing, and neither do models that know less than how often each byte occurs: where with
some seed no arm has a BPB below the order-0 entropy of the text, all claims are undecided. A study failed if
a claim of it failed, held if all its claims held, and is undecided otherwise.

Cost: none. Source: Student, "The Probable Error of a Mean". The rules and the level are ours.
Limits. I is a 90 % interval, and some studies have ten claims or more: one in ten without any effect looks
decided. Seeds vary weights and data order and not the text, the width or the learning rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

from papers.outcome import Row

Verdict = Literal["held", "failed", "undecided at this size"]
HELD: Verdict = "held"
FAILED: Verdict = "failed"
UNDECIDED: Verdict = "undecided at this size"
LEVEL = 0.95
"""The point of Student's distribution at each end of an interval."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and where it may lie."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The 90 % interval of the mean; without bounds for a single value, or if one is nan (not known)."""
        if any(map(math.isnan, values)):
            return cls(math.nan, -math.inf, math.inf)
        mean, count = statistics.fmean(values), len(values)
        if count < 2:
            return cls(mean, -math.inf, math.inf)
        half = float(stats.t.ppf(LEVEL, count - 1)) * statistics.stdev(values) / math.sqrt(count)
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "not known with every seed"
        if math.isinf(self.low):
            return f"{self.mean:+.4f}, one seed"
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def percent(shares: Sequence[float]) -> str:
    """Shares by seed in words, with the interval of their mean.

    >>> percent([0.2, 0.3]), percent([0.2])
    ('25 % [-7, 57]', '20 % (one seed)')
    """
    result = Interval.of([100 * share for share in shares])
    if math.isinf(result.low):
        return f"{result.mean:.0f} % (one seed)"
    return f"{result.mean:.0f} % [{result.low:.0f}, {result.high:.0f}]"


@dataclass(frozen=True)
class Claim:
    """One thing that the paper or the study predicts, what was measured of it, and whether it held."""

    name: str
    prediction: str
    rule: str
    measured: str
    verdict: Verdict
    values: tuple[float, ...]
    """The effect for each seed where it is known; for `each`, its mean for each step."""


def above(name: str, prediction: str, effect: str, values: Sequence[float], least: float = 0.0) -> Claim:
    """The claim that `effect` is more than `least`."""
    rule = f"held if the 90 % interval of {effect} lies above {least:g}, failed if below"
    result = Interval.of(values)
    return Claim(name, prediction, rule, str(result), _above(result, least), _known(values))


def within(name: str, prediction: str, effect: str, values: Sequence[float], margin: float) -> Claim:
    """The claim that `effect` is less than `margin` in size."""
    rule = f"held if the 90 % interval of {effect} lies within ±{margin:.4f}, failed if outside"
    result = Interval.of(values)
    return Claim(name, prediction, rule, str(result), _within(result, margin), _known(values))


def outside(name: str, prediction: str, effect: str, values: Sequence[float], margin: float) -> Claim:
    """The claim that `effect` is more than `margin` in size."""
    rule = f"held if the 90 % interval of {effect} lies outside ±{margin:.4f}, failed if within"
    result = Interval.of(values)
    flipped = {HELD: FAILED, FAILED: HELD, UNDECIDED: UNDECIDED}
    return Claim(name, prediction, rule, str(result), flipped[_within(result, margin)], _known(values))


def each(name: str, prediction: str, effect: str, steps: Sequence[Sequence[float]]) -> Claim:
    """The claim that `effect` is above 0 at every one of several steps, each with its values by seed."""
    rule = f"held if the 90 % interval of {effect} lies above 0 at each step, failed if it lies below at one"
    results = [Interval.of(values) for values in steps]
    verdict = worst([_above(interval, 0.0) for interval in results])
    means = tuple(interval.mean for interval in results)
    return Claim(name, prediction, rule, "; ".join(map(str, results)), verdict, means)


def every(name: str, prediction: str, effect: str, hits: Sequence[bool]) -> Claim:
    """The claim that `effect` is so with every seed."""
    rule = f"held if with every seed {effect}, failed if with none"
    verdict = UNDECIDED if len(hits) < 2 or 0 < sum(hits) < len(hits) else HELD if all(hits) else FAILED
    measured = f"{sum(hits)} of {len(hits)} seeds"
    return Claim(name, prediction, rule, measured, verdict, tuple(float(hit) for hit in hits))


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Failed if one is, held if all are, else undecided.

    >>> worst(["held", "undecided at this size"]), worst(["held", "failed"]), worst(["held"])
    ('undecided at this size', 'failed', 'held')
    """
    if FAILED in verdicts:
        return FAILED
    return HELD if verdicts and all(verdict == HELD for verdict in verdicts) else UNDECIDED


def settled(claims: Sequence[Claim], rows: Sequence[Row]) -> list[Claim]:
    """The claims, all undecided where with some seed no arm beats the frequencies of bytes."""
    best: dict[int, float] = {}
    for row in rows:
        gain = row["order0"] - row["bpb"]
        best[row["seed"]] = max(gain, best.get(row["seed"], -math.inf))
    if all(gain > 0 for gain in best.values()):
        return list(claims)
    return [replace(claim, verdict=UNDECIDED) for claim in claims]


@dataclass(frozen=True)
class Series:
    """Points of a figure with their intervals over seeds."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, name: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> Series:
        """One point for each place in `x`, from its values by seed; a single seed has no bar."""
        results = [Interval.of(seeds) for seeds in values]
        return cls(
            name,
            tuple(x),
            tuple(i.mean for i in results),
            tuple(i.low if math.isfinite(i.low) else i.mean for i in results),
            tuple(i.high if math.isfinite(i.high) else i.mean for i in results),
        )


@dataclass(frozen=True)
class Drawing:
    """A figure as data: what lies across and up, and the series."""

    title: str
    across: str
    up: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Found:
    """What an experiment with arms and seeds found."""

    rows: list[Row]
    caption: str
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    """The table, as text; the first cell of a row names it."""
    drawing: Drawing
    claims: tuple[Claim, ...]


def _known(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(value for value in values if not math.isnan(value))


def _above(result: Interval, least: float) -> Verdict:
    return HELD if result.low > least else FAILED if result.high < least else UNDECIDED


def _within(result: Interval, margin: float) -> Verdict:
    if -margin < result.low and result.high < margin:
        return HELD
    return FAILED if result.low > margin or result.high < -margin else UNDECIDED
