"""Calibrated policies: which drafts to verify, and when a token may leave early.

Drafts. A draft has a chance c that all of it so far is accepted. One more guess of acceptance a adds c a
tokens and costs time. Time is worth s tokens for each that full depth writes in it, s being the speedup that
is reached: so, with V(m) the seconds of m positions at once in each of R sequences, a guess at place m costs

    looked up   p_m = s (V(R (m + 2)) - V(R (m + 1))) / V(R)                tokens
    computed    p_m + s keep / V(R) where it is kept, and s draft / V(R) to be made, kept or not; the first
                of a round s start / V(R) more

This is Dinkelbach's rule for the largest ratio of expected tokens to expected seconds: with the s that it
reaches, no other choice of guesses reaches more. `tune_speedup` finds s by its fixed point.

    looked up   as many guesses as pay, of the drafter whose guesses are worth most together
    computed    the optimal stopping rule: with r_b the acceptance in bucket b of scores and w_b its share,
                the most that computed guesses are worth from place m on, behind a chance c, is
                W_m(c) = max(0, Σ_b w_b max(0, c r_b - price + W_{m+1}(c r_b)) - s draft / V(R)),
                so a guess is made where W_m(c) > 0 and kept where its own term is above 0

Acceptances are of a guess behind accepted ones, by its score (`Acceptance`): measured by `tune.py`, or the
`PRIORS` here, which are SmolLM2's, rounded. A score is what a drafter knows before the token is drawn (length
of a match, probability, margin of the two best logits), so sampled text stays exact. What is accepted while
it runs corrects the rates (`observe`). Limits: guesses are taken as independent given their scores, the
sequences of a batch as equally long.

A prefix of the model's own stages is one of the computed drafters. The margin rule that it had before (draft
while the margin is above a threshold, at most N tokens) reached 1.352 in replays on halves of text that had
not tuned it (reference model, 3 exits, own and people's text, 12 splits), this policy 1.364.

Exits. A token leaves after stage k where margin_k > threshold_k, at the first k for which this holds.

    sum-of-bounds   s Σ_{j >= k} p99(shift_j)      "Product of Experts" §5.3 (s is its safety factor)
    rival-gain      s p99(gain_k)                  measured from stage k to the last, not summed
    flip-rate       τ_k(ε)                         `measure.flip_thresholds`; ours

What each proves. A bound b on every |Δ_j| lets the leader fall by b and a rival rise by b, so it moves a
margin by up to 2b: sum-of-bounds proves what it says only with s = 2 and true bounds. A bound on the rival
gain is what the margin must exceed, and proves it with s = 1. But p99 and max of a calibration text are no
bounds on other text, so all three rules are approximate there; verified speculation is the exact mode.
The summed bounds are also loose: calibrated on small models, that rule hardly ever leaves at stage 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from topograd.decode.calibration.measure import EPS, Calibration, PositionCosts, Readings
from topograd.decode.drafters import DraftPolicy, Guesses
from topograd.errors import ConfigError, DataError

MAX_STEPS = 16
"""Computed guesses in one draft."""
BUCKETS, GRID = 12, 64
MEMORY, PRIOR_GUESSES = 0.99, 8.0
"""How fast judged guesses are forgotten, and how many must be judged before they count as much as scores."""

Rule = Literal["sum-of-bounds", "rival-gain", "flip-rate"]


@dataclass(frozen=True)
class Acceptance:
    """How often a guess is accepted: rates[b] from the score bounds[b] on, the first for all below."""

    bounds: tuple[float, ...]
    rates: tuple[float, ...]
    shares: tuple[float, ...] | None = None
    """How many of the scores are in each bucket; None if there are equally many."""

    def __post_init__(self) -> None:
        lengths = {len(self.bounds), len(self.rates), len(self.weights)}
        if not self.rates or len(lengths) > 1 or list(self.bounds) != sorted(self.bounds):
            allowed = "ascending, with a rate and a share for each"
            raise ConfigError(setting="bounds", given=self.bounds, allowed=allowed)
        for name, values in (("rates", self.rates), ("shares", self.weights)):
            if not all(0 <= value <= 1 for value in values):
                raise ConfigError(setting=name, given=values, allowed="numbers of 0..1")

    @property
    def weights(self) -> tuple[float, ...]:
        """The shares as numbers."""
        return (1 / len(self.rates),) * len(self.rates) if self.shares is None else self.shares

    def at(self, score: float) -> float:
        """The rate at a score."""
        return self.rates[max(0, bisect_right(self.bounds, score) - 1)]

    @classmethod
    def of(cls, scores: Sequence[float], accepted: Sequence[bool]) -> Acceptance:
        """From guesses that were judged: buckets of about equal size, each with one hit and one miss more."""
        if not scores:
            return cls((0.0,), (0.0,))
        values, right = np.asarray(scores, dtype=np.float64), np.asarray(accepted, dtype=np.float64)
        bounds = np.unique(np.quantile(values, np.linspace(0, 1, BUCKETS + 1)[:-1]))
        place = np.clip(np.searchsorted(bounds, values, side="right") - 1, 0, None)
        count = np.bincount(place, minlength=len(bounds))
        rates = (np.bincount(place, weights=right, minlength=len(bounds)) + 1) / (count + 2)
        return cls(tuple(bounds.tolist()), tuple(rates.tolist()), tuple((count / len(values)).tolist()))


PRIORS: Mapping[str, Acceptance] = {
    "lookup": Acceptance((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (0.2, 0.46, 0.57, 0.64, 0.72, 0.76, 0.82)),
    "table": Acceptance((0.0, 0.35, 0.55, 0.65, 0.75, 0.85, 0.95), (0.07, 0.22, 0.27, 0.4, 0.5, 0.65, 0.9)),
}
COMPUTED = Acceptance((0.0, 0.1, 0.3, 0.5, 0.7, 0.9), (0.1, 0.2, 0.35, 0.5, 0.7, 0.85))
"""Of a guess that is computed, by its own probability."""
USUAL_COSTS = PositionCosts({1: 1.0, 2: 1.15, 4: 1.3, 8: 1.67, 16: 2.36}, draft=0.07)
"""Seconds by those of one token at full depth, where nothing was measured: SmolLM2 in ONNX Runtime."""
USUAL_SPEEDUP = 1.3


@dataclass(frozen=True)
class ExpectedGainPolicy(DraftPolicy):
    """The policy for drafts; `costs.start`, `draft` and `keep` are those of its computed drafter."""

    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)
    costs: PositionCosts = USUAL_COSTS
    speedup: float = USUAL_SPEEDUP
    steps: int = MAX_STEPS
    """Computed guesses in one draft, at most."""
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Prices by place and sequences; tables of values by drafter, trust and sequences."""
    _observed: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    """By drafter, what its scores promised of its last guesses, and how many were accepted."""

    def pays(self, chances: Sequence[Sequence[float]]) -> bool:
        sequences, drafted = len(chances), sum(map(len, chances))
        if sequences == 1 or not drafted:
            return bool(drafted)
        seconds = self.costs.seconds
        more = seconds(sequences + drafted) - seconds(sequences) + self.costs.uneven
        return sum(map(sum, chances)) > self.speedup * sequences * more / seconds(sequences)

    def observe(self, name: str, promised: float, accepted: bool) -> None:
        before, right = self._observed.get(name, (0.0, 0.0))
        raw = promised / self.trust(name)
        self._observed[name] = MEMORY * before + raw, MEMORY * right + accepted

    def forget(self) -> None:
        self._observed.clear()

    def trust(self, name: str) -> float:
        """What a drafter's rates are multiplied by: accepted over promised guesses, at most 1."""
        promised, accepted = self._observed.get(name, (0.0, 0.0))
        return min(1.0, (accepted + PRIOR_GUESSES) / (promised + PRIOR_GUESSES))

    def _rates(self, name: str) -> Acceptance:
        return self.acceptance.get(name) or PRIORS.get(name, COMPUTED)

    def price(self, place: int, sequences: int, computed: bool) -> float:
        """What one more guess that is verified must promise, in tokens."""
        key = place, sequences, computed
        if key not in self._cache:
            seconds = self.costs.seconds
            more = seconds(sequences * (place + 2)) - seconds(sequences * (place + 1))
            keep = self.costs.keep if computed else 0.0
            self._cache[key] = self.speedup * (max(more, 0.0) + keep) / seconds(sequences)
        price: float = self._cache[key]
        return price

    def value(self, name: str, place: int, chance: float, sequences: int) -> float:
        """W: the most that computed guesses from this place on are worth, behind a draft of this chance."""
        trust = math.ceil(10 * self.trust(name)) / 10  # a table for each tenth
        key = name, trust, sequences
        if key not in self._cache:
            rates, grid = self._rates(name), np.linspace(0, 1, GRID + 1)
            likely = np.multiply.outer(grid, trust * np.asarray(rates.rates))
            table = [[0.0] * (GRID + 2)]
            for m in reversed(range(self.steps)):
                made = self.costs.draft + (0.0 if m else self.costs.start)
                made *= self.speedup / self.costs.seconds(sequences)
                worth = likely - self.price(m, sequences, computed=True)
                worth += np.interp(likely, grid, table[0][:-1])
                here = np.maximum(np.maximum(worth, 0) @ np.asarray(rates.weights) - made, 0)
                table.insert(0, [*here.tolist(), 0.0])
            self._cache[key] = table
        row, at = self._cache[key][min(place, self.steps)], chance * GRID
        low = int(at)
        value: float = row[low] + (at - low) * (row[low + 1] - row[low])
        return value

    def choose(
        self, place: int, chance: float, guesses: Guesses, computed: str | None, sequences: int
    ) -> tuple[str | None, int]:
        drafter: str | None = None
        count, most = 0, 0.0
        for name, some in guesses.items():
            rates, trust, likely, worth = self._rates(name), self.trust(name), chance, 0.0
            for i, (_, score) in enumerate(some):
                likely *= trust * rates.at(score)
                worth += likely - self.price(place + i, sequences, computed=False)
                if worth > most:
                    drafter, count, most = name, i + 1, worth
        if computed is not None and self.value(computed, place, chance, sequences) > most:
            drafter, count = computed, 1
        return drafter, count

    def accept(
        self, name: str, score: float, place: int, chance: float, sequences: int, computed: bool
    ) -> float | None:
        likely = chance * self.trust(name) * self._rates(name).at(score)
        if not computed:  # `choose` has counted how many pay together
            return likely
        after = self.value(name, place + 1, likely, sequences)
        return likely if likely - self.price(place, sequences, computed=True) + after > 0 else None


# Exits


def thresholds(
    calibration: Calibration,
    rule: Rule,
    *,
    safety: float = 1.0,
    eps: float = 0.001,
) -> tuple[float, ...]:
    """For each exit stage 0..K-2 the margin above which a token leaves; infinity means never.

    `safety` is of the two rules by bounds, `eps` of the flip rate.
    """
    checks: list[tuple[str, object, tuple[object, ...]]] = [("rule", rule, get_args(Rule))]
    for name, value, allowed in checks + [("eps", eps, EPS)] * (rule == "flip-rate"):
        if value not in allowed:
            raise ConfigError(setting=name, given=value, allowed=f"one of {', '.join(map(str, allowed))}")
    if not 0 < safety < math.inf:
        raise ConfigError(setting="safety", given=safety, allowed="a finite number above 0")
    if rule == "flip-rate":
        return calibration.flip_thresholds[EPS.index(eps)]
    if rule == "rival-gain":
        return tuple(safety * gain for gain in calibration.gain.p99)
    return tuple(safety * sum(calibration.shift.p99[k:]) for k in range(calibration.stages - 1))


def exits(readings: Readings, thresholds: Sequence[float]) -> Tensor:
    """(n,) long: the stage at which each token leaves; K-1 where it goes all the way."""
    if len(thresholds) != readings.stages - 1:
        allowed = f"{readings.stages - 1} numbers, one for each stage but the last"
        raise ConfigError(setting="thresholds", given=list(thresholds), allowed=allowed)
    limits = torch.tensor([*thresholds, -math.inf], dtype=torch.float64)
    return (readings.margin > limits[:, None]).int().argmax(0)  # the first of the largest


def judged(readings: Readings, thresholds: Sequence[float]) -> dict[str, Any]:
    """What leaving by some thresholds does: agreement, the share that leaves after each stage, their mean."""
    left = exits(readings, thresholds)
    shares = left.bincount(minlength=readings.stages).double() / len(left)
    mean = left.double().mean().item() + 1
    return {"agreement": agreement(readings, left), "exits": shares.tolist(), "mean_stage": mean}


def agreement(readings: Readings, exits: Tensor) -> float:
    """The share of tokens that leave with the last stage's top token (teacher-forced)."""
    if not len(readings):
        raise DataError("there are no tokens to compare", setting="tokens", given=0, remedy="give more text")
    chosen = readings.top.gather(0, exits[None]).squeeze(0)
    return (chosen == readings.top[-1]).double().mean().item()
