"""Relative speeds of several functions in one process: medians and quartiles of ratios.

Machines are noisy and drift. Each round runs everything once, in an order that rotates, and the ratio of two
things is taken within a round, so that a slow moment hits both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def take_turns(
    things: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each thing in each round."""

    def clock(thing: Callable[[], object]) -> float:
        began = time.perf_counter()
        thing()
        return time.perf_counter() - began

    return read_in_turns({name: partial(clock, thing) for name, thing in things.items()}, rounds, warmup)


def read_in_turns(
    clocks: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """The reading of each clock in each round; a clock times a part of what it runs."""
    names = list(clocks)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warmup + rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            shown = clocks[name]()
            if i >= warmup:
                seconds[name].append(shown)
    return seconds


def ratio(seconds: Mapping[str, list[float]], over: str, under: str) -> Spread:
    """The time of `over` divided by that of `under`, round by round."""
    return Spread.of([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])
