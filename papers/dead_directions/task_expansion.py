"""Task expansion: a head that grew new outputs shows in the anisotropy of its gradient factor.

Statement. For the gradient factor G of a head,

    a(G) = λ_max(G) / λ_min(G)        over the directions that are no gauge.

Old, nearly converged classes and fresh random rows make G ≈ blockdiag(small, large), so a(G) jumps at once,
while the input factor A does not change on unchanged inputs. The alarm: log a exceeds the median of the
readings before it by at least `DEVIATIONS` standard deviations, estimated as 1.4826 times their median
absolute deviation (MAD) and taken to be at least `SLACK`.

On stationary Gaussian readings the alarm is false for 0.5 % of them after `READINGS` readings and for 0.02 %
with a memory of 20 (simulated; few readings estimate a deviation badly, hence so many deviations).

A softmax loss has Σ_c δ_c = 0, so G1 = 0 for every weight: that direction is a gauge and is projected out
first. Kept, it makes a(G) as large as rounding allows, before and after, and nothing is seen.

Symbols and shapes. G (c, c), symmetric, from the loss's own gradients (the empirical Fisher detects;
exponents want the expected one). Cost: O(c³) for each reading.
Source: "Dead Directions: Geometric Singular Learning" §5.1, under its assumptions: A1 new rows are random,
A2 old rows are kept, A3 the encoder is. Its algorithm's thresholds are lost; those here are ours.
Limits. Eigenvalues below `moments.RESOLUTION` of the largest are rounding, so a is at most its inverse. A
change of the data or the learning rate raises alarms too. That hidden layers follow the head is not a
theorem.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from topograd.errors import GeometryError
from topograd.geometry.monitors.head_factor import anisotropy
from topograd.geometry.monitors.outliers import DEVIATIONS, NORMAL, SLACK

READINGS = 8
"""Before the first alarm."""


@dataclass(frozen=True)
class ExpansionReading:
    """One reading: log a, the median before it, and whether it is an outlier."""

    log_anisotropy: float
    median: float
    deviation: float
    """The standard deviation that was used; nan, like the median, while there are too few readings."""
    alarm: bool


class ExpansionDetector:
    """Takes the head's factor every so often and raises an alarm where it is an outlier."""

    def __init__(self, *, softmax: bool, memory: int = 20) -> None:
        if memory < READINGS:
            raise GeometryError(setting="memory", given=memory, allowed=f"at least {READINGS} readings")
        self._softmax = softmax
        self._past: deque[float] = deque(maxlen=memory)

    def update(self, factor: Tensor) -> ExpansionReading:
        """Read G, compare it with the readings before it, and store it."""
        here = math.log(anisotropy(factor, softmax=self._softmax))
        median = deviation = math.nan
        alarm = False
        if len(self._past) >= READINGS:
            median = statistics.median(self._past)
            spread = statistics.median(abs(value - median) for value in self._past)
            deviation = max(NORMAL * spread, SLACK)
            alarm = here >= median + DEVIATIONS * deviation
        self._past.append(here)
        return ExpansionReading(here, median, deviation, alarm)
