"""Outliers of a signal: how far a reading is from the median of those before it.

Readings are compared by their logarithms. Of many numbers, as of singular values or layers, that one counts
which is furthest from its own median.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Side = Literal["up", "down", "both"]
DEVIATIONS = 6.0
NORMAL = 1.4826
"""The standard deviation of a normal law over its MAD."""
SLACK = 0.05
MEMORY = 30
MIN_READINGS = 10
"""Before the first alarm of a signal."""


def deviation(past: Sequence[float], here: float, side: Side, readings: int = MIN_READINGS) -> float:
    """Robust standard deviations between a reading and the median of those before it, on its bad side.

    0 before so many readings. A deviation is taken to be at least SLACK.
    """
    if len(past) < readings:
        return 0.0
    median = statistics.median(past)
    spread = statistics.median(abs(one - median) for one in past)
    away = {"up": here - median, "down": median - here, "both": abs(here - median)}[side]
    return away / max(NORMAL * spread, SLACK)


class Furthest:
    """Of many numbers that one which is furthest from its own median, up (1) or down (-1)."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._past: deque[Tensor] = deque(maxlen=MEMORY)

    def read(self, values: Tensor) -> Tensor | None:
        """The largest ratio to a number's own median, or its inverse; None before MIN_READINGS.

        On the device of the values: nothing is copied to the host.
        """
        logs = values.detach().double().clamp_min(1e-30).log()
        if self._past and len(self._past[-1]) != len(logs):
            self._past.clear()
        found = None
        if len(self._past) >= MIN_READINGS:
            past = torch.stack(tuple(self._past)).to(logs.device)
            found = (self._sign * (logs - past.median(0).values)).max().clamp_max(100.0).exp()
        self._past.append(logs)
        return found

    def state(self) -> list[list[float]]:
        """The readings so far."""
        return [one.tolist() for one in self._past]

    def load_state(self, state: list[list[float]]) -> None:
        """Go on from them."""
        self._past = deque((torch.tensor(one, dtype=torch.float64) for one in state), maxlen=MEMORY)
