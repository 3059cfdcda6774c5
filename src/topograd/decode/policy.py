"""Which guess pays, at each place of a draft: acceptances by drafter and score against what rows cost.

A draft has a chance c that all of it so far is kept. One more guess of acceptance a adds c a tokens, and
costs the verification of one more row, and its own making where it is computed. Time is worth s tokens for
each that full depth writes in it, s being the speedup that is reached: so, with C(m) the seconds of m rows at
once in each of R texts, a guess at place m pays where

    c a  >  s (C(R (m + 1)) - C(R m) + step) / C(R)

This is Dinkelbach's rule for the largest ratio of expected tokens to expected seconds: with the s that it
reaches, no other choice of guesses reaches more. `tune_speedup` finds s by its fixed point.

    looked up   as many guesses as pay, and the drafter whose guesses are worth most together
    computed    another step where the mean acceptance pays for it; its guess is kept where its own does

Acceptances are of a guess behind guesses that were kept, by its score (`Acceptance`): measured on the model's
own text by `calibrate`, or the `PRIORS` here, which are SmolLM2's, rounded. Whether a guess is made depends
on what is known before it is drawn, so sampled text stays exact.

What is accepted while it runs corrects the rates (`observe`): a drafter whose guesses are accepted less than
its scores promise is asked for fewer, or for none, until that changes.

Limits. Guesses are taken as independent given their scores; rows of a batch as equally long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from topograd.decode.autotune import RowCosts
from topograd.decode.drafters import Guess
from topograd.errors import ConfigError

MAX_STEPS = 8
"""Computed guesses in one draft."""
BUCKETS = 6
MEMORY, PRIOR_GUESSES = 0.99, 8.0
"""How fast judged guesses are forgotten, and how many must be judged before they count as much as scores."""


@dataclass(frozen=True)
class Acceptance:
    """How often a guess is kept: rates[i] where its score is at least bounds[i], the first for all below."""

    bounds: tuple[float, ...]
    rates: tuple[float, ...]
    mean: float

    def __post_init__(self) -> None:
        if not self.rates or len(self.rates) != len(self.bounds) or list(self.bounds) != sorted(self.bounds):
            raise ConfigError(
                f"an acceptance has bounds {self.bounds} and rates {self.rates}",
                remedy="give a rate for each of ascending bounds",
            )
        if not all(0 <= rate <= 1 for rate in (*self.rates, self.mean)):
            raise ConfigError(f"acceptance rates are {self.rates}, {self.mean}", remedy="each lies in 0..1")

    def at(self, score: float) -> float:
        """The rate at a score."""
        return self.rates[max(0, bisect_right(self.bounds, score) - 1)]

    @classmethod
    def of(cls, scores: Sequence[float], kept: Sequence[bool]) -> Acceptance:
        """From guesses that were judged: buckets of about equal size, each with one hit and one miss more."""
        if not scores:
            return cls((0.0,), (0.0,), 0.0)
        values, right = np.asarray(scores, dtype=np.float64), np.asarray(kept, dtype=np.float64)
        bounds = np.unique(np.quantile(values, np.linspace(0, 1, BUCKETS + 1)[:-1]))
        place = np.clip(np.searchsorted(bounds, values, side="right") - 1, 0, None)
        count = np.bincount(place, minlength=len(bounds))
        hits = np.bincount(place, weights=right, minlength=len(bounds))
        rates = (hits + 1) / (count + 2)
        return cls(tuple(bounds.tolist()), tuple(rates.tolist()), float((right.sum() + 1) / (len(right) + 2)))


PRIORS: Mapping[str, Acceptance] = {
    "lookup": Acceptance((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (0.2, 0.46, 0.57, 0.64, 0.72, 0.76, 0.82), 0.5),
    "table": Acceptance(
        (0.0, 0.35, 0.55, 0.65, 0.75, 0.85, 0.95), (0.07, 0.22, 0.27, 0.4, 0.5, 0.65, 0.9), 0.3
    ),
}
COMPUTED = Acceptance((0.0, 0.1, 0.3, 0.5, 0.7, 0.9), (0.1, 0.2, 0.35, 0.5, 0.7, 0.85), 0.45)
"""Of a guess that is computed, by its own probability."""
USUAL_COSTS = RowCosts(draft=0.07, deep={1: 1.0, 2: 1.15, 4: 1.3, 8: 1.67, 16: 2.36}, full=1.0)
"""Seconds by those of one row at full depth, where nothing was measured: SmolLM2 in ONNX Runtime."""
USUAL_SPEEDUP = 1.3


@dataclass(frozen=True)
class ExpectedGainPolicy:
    """The policy; `costs.draft` is a computed guess, `costs.deep` full depth on some rows."""

    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)
    costs: RowCosts = USUAL_COSTS
    speedup: float = USUAL_SPEEDUP
    _prices: dict[tuple[int, int, bool], float] = field(default_factory=dict, repr=False, compare=False)
    _observed: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    """By drafter, what its scores promised of its last guesses, and how many were accepted."""

    def pays(self, chances: Sequence[Sequence[float]]) -> bool:
        """Whether the drafts of a batch pay together, by the chance that each of their tokens is accepted."""
        rows, drafted = len(chances), sum(map(len, chances))
        if rows == 1 or not drafted:
            return bool(drafted)
        seconds = self.costs.deep_seconds
        more = seconds(rows + drafted) - seconds(rows) + self.costs.uneven
        return sum(map(sum, chances)) > self.speedup * rows * more / seconds(rows)

    def observe(self, name: str, promised: float, accepted: bool) -> None:
        """A guess with this promised chance was judged, behind accepted ones."""
        before, kept = self._observed.get(name, (0.0, 0.0))
        raw = promised / self.trust(name)
        self._observed[name] = MEMORY * before + raw, MEMORY * kept + accepted

    def trust(self, name: str) -> float:
        """What a drafter's rates are multiplied by: accepted over promised guesses, at most 1."""
        promised, accepted = self._observed.get(name, (0.0, 0.0))
        return min(1.0, (accepted + PRIOR_GUESSES) / (promised + PRIOR_GUESSES))

    def _rates(self, name: str) -> Acceptance:
        return self.acceptance.get(name) or PRIORS.get(name, COMPUTED)

    def price(self, place: int, rows: int, computed: bool) -> float:
        """What one more guess must promise, in tokens."""
        key = place, rows, computed
        if key not in self._prices:
            self._prices[key] = self._price(*key)
        return self._prices[key]

    def _price(self, place: int, rows: int, computed: bool) -> float:
        seconds = self.costs.deep_seconds
        more = (seconds(rows * (place + 2)) - seconds(rows * (place + 1))) / seconds(rows)
        made = self.costs.draft / seconds(rows) if computed else 0.0
        return self.speedup * (max(more, 0.0) + made)

    def choose(
        self, place: int, chance: float, found: Mapping[str, Sequence[Guess]], computed: str | None, rows: int
    ) -> tuple[str | None, int]:
        who: str | None = None
        count, most = 0, 0.0
        for name, guesses in found.items():
            rates, trust, likely, worth = self._rates(name), self.trust(name), chance, 0.0
            for i, (_, score) in enumerate(guesses):
                likely *= trust * rates.at(score)
                worth += likely - self.price(place + i, rows, computed=False)
                if worth > most:
                    who, count, most = name, i + 1, worth
        if computed is not None and place < MAX_STEPS:
            rate = self.trust(computed) * self._rates(computed).mean
            first = chance * rate - self.price(place, rows, computed=True)
            if first + self._going_on(chance * rate, rate, place + 1, rows) > most:
                who, count = computed, 1
        return who, count

    def _going_on(self, likely: float, rate: float, place: int, rows: int) -> float:
        """The most that computed guesses from this place on can be worth, behind what is `likely` kept."""
        most = worth = 0.0
        for i in range(place, MAX_STEPS):
            likely *= rate
            worth += likely - self.price(i, rows, computed=True)
            most = max(most, worth)
        return most

    def accept(
        self, name: str, score: float, place: int, chance: float, rows: int, computed: bool
    ) -> float | None:
        rates, trust = self._rates(name), self.trust(name)
        likely = chance * trust * rates.at(score)
        if not computed:  # `choose` has counted how many pay together
            return likely
        worth = likely - self.price(place, rows, computed=False)
        return likely if worth + self._going_on(likely, trust * rates.mean, place + 1, rows) > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        rates = {name: vars(a) for name, a in self.acceptance.items()}
        return {"acceptance": rates, "costs": self.costs.as_dict(), "speedup": self.speedup}

    @classmethod
    def from_dict(cls, values: Any) -> ExpectedGainPolicy:
        """What `as_dict` gave."""
        rates = {
            str(name): Acceptance(
                tuple(map(float, a["bounds"])), tuple(map(float, a["rates"])), float(a["mean"])
            )
            for name, a in values["acceptance"].items()
        }
        return cls(rates, RowCosts.from_dict(values["costs"]), float(values["speedup"]))
