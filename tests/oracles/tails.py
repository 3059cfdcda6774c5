"""The exponent of a power law by maximum likelihood, threshold after threshold. The slow, obvious version.

    α = 1 + m / Σ ln(x/x_min),   D = the largest gap between the steps of F and P,   x_min: smallest D

Source: "Power-law distributions in empirical data" (A. Clauset, C. R. Shalizi, M. E. J. Newman). The fast
version is in `fields/tails.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def fit_power_law(values: Sequence[float]) -> tuple[float, float, int, float]:
    """α, x_min, m and D."""
    fits = [_fit([x for x in values if x >= low], low) for low in set(values) if low < max(values)]
    return min(fits, key=lambda fit: fit[-1])


def _fit(tail: list[float], low: float) -> tuple[float, float, int, float]:
    m = len(tail)
    alpha = 1 + m / sum(math.log(x / low) for x in tail)
    gaps = []
    for i, x in enumerate(sorted(tail)):
        P = 1 - (x / low) ** (1 - alpha)
        gaps += [abs(P - i / m), abs((i + 1) / m - P)]
    return alpha, low, m, max(gaps)
