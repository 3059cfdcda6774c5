"""Rates: the exponent s of y(t) ≈ c tˢ as t → 0, or a reason why there is none to report.

Statement. Along an approach w(t) → w₀ to a singularity, entries of the Fisher matrix and of K-FAC factors,
and divergences, vanish as powers of t. The exponent is the least-squares slope of log y on log t over an
asymptotic window. For a directional Fisher vᵀF v ~ t^{2k-2} it carries the KL order

    k = slope / 2 + 1.

Asymptotic means that the lower and the upper half of the window have slopes within DRIFT of one another. The
window begins at the smallest t and is the longest such; it must hold POINTS points. One that begins higher
up is not taken, however straight: the limit is at the other end. Points that scatter, so that the standard
error of the slope is above SCATTER, give no rate either.

Symbols and shapes. t, y: n numbers each, t > 0. Cost: O(n²).
Source: "Dead Directions: Geometric Singular Learning", Theorem 2 and §12 (the conditions under which a rate
may be read). The thresholds are ours.
Limits. A straight line does not prove an exponent: without label noise every slope of a chain is larger by
2L, and just as straight (Remark 23). So a Rate carries estimator, noise regime, window and alignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topograd.errors import GeometryError

Noise = Literal["noisy", "noise-free", "none"]
"""Label noise in the factors: in expectation, absent, or of no concern (A, K and Fisher have no labels)."""
ALIGNMENT = 0.99
"""Below this, the layers' dead directions differ, and a slope is that of a mixture of powers."""
DRIFT = 0.1
"""How far the slopes of a window's two halves may differ."""
SCATTER = 0.1
POINTS = 5

Series = Tensor | Sequence[float]


@dataclass(frozen=True)
class Rate:
    """What a fit may say. Where it was refused, `slope` is None and `refused` says why."""

    slope: float | None
    coefficient: float | None
    error: float | None
    """The standard error of the slope."""
    r_squared: float | None
    window: tuple[float, float]
    points: int
    estimator: str
    noise: Noise
    alignment: float
    refused: str | None = None

    @property
    def order(self) -> float:
        """k = slope / 2 + 1, if these were values of a directional Fisher."""
        if self.slope is None:
            raise GeometryError(f"there is no rate to read an order from: {self.refused}")
        return self.slope / 2 + 1

    def __str__(self) -> str:
        low, high = self.window
        labels = f"{self.estimator}, labels {self.noise}, alignment {self.alignment:.3f}"
        where = f"{labels}, t from {low:.1e} to {high:.1e}"
        if self.slope is None:
            return f"no rate: {self.refused} ({where})"
        return f"t^{self.slope:.3f} (R² {self.r_squared:.5f}, {where})"


def log_grid(low: float, high: float, points: int = 7) -> Tensor:
    """`points` values of t from low to high, evenly spaced in log t, float64."""
    if not 0 < low < high < math.inf or points < 2:
        raise GeometryError(f"{points} points from {low} to {high}: give 0 < low < high and 2 points or more")
    return torch.logspace(math.log10(low), math.log10(high), points, dtype=torch.float64)


def fit_rate(
    t: Series,
    values: Series,
    *,
    window: tuple[float, float] | None = None,
    floor: float = 0.0,
    estimator: str = "given values",
    noise: Noise = "none",
    alignment: float = 1.0,
) -> Rate:
    """The slope of log values on log t, over the asymptotic window or the one that is given.

    Values at or below `floor` are rounding and are left out: the caller knows what its estimator resolves.

    >>> grid = log_grid(1e-3, 1e-1)
    >>> round(fit_rate(grid, 3 * grid**4).order, 9)
    3.0
    >>> fit_rate(grid, grid**4, alignment=0.8).refused
    'alignment 0.800 is below 0.99: the layers do not share a dead direction'
    """
    t, values = _series(t, values, alignment)
    usable = values > floor
    if window is not None:
        low, high = window
        usable &= (t >= low * (1 - 1e-9)) & (t <= high * (1 + 1e-9))
    logs = torch.stack((t[usable].log(), values[usable].log()))
    held = logs[:, : _asymptotic(logs)] if window is None else logs
    ends = (float(held[0, 0].exp()), float(held[0, -1].exp())) if held.numel() else (math.nan, math.nan)
    labels = (ends, held.shape[1], estimator, noise, alignment)
    refused = _refusal(held, logs, alignment)
    if refused is not None:
        return Rate(None, None, None, None, *labels, refused)
    slope, intercept, error, r_squared = _line(held)
    return Rate(slope, math.exp(intercept), error, r_squared, *labels)


def _series(t: Series, values: Series, alignment: float) -> tuple[Tensor, Tensor]:
    """Both series in float64, in the order of t."""
    t, values = (torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (t, values))
    if t.dim() != 1 or t.shape != values.shape or len(t) == 0:
        raise GeometryError(f"{tuple(t.shape)} points and {tuple(values.shape)} values: give as many of each")
    if not (torch.isfinite(t) & (t > 0)).all() or len(t.unique()) < len(t):
        raise GeometryError(f"the points t are {t.tolist()}: give different positive numbers")
    if not torch.isfinite(values).all() or (values < 0).any():
        bad = values[~torch.isfinite(values) | (values < 0)][0].item()
        raise GeometryError(f"{bad} is among the values: a rate is read from finite numbers of at least 0")
    if not 0 <= alignment <= 1 + 1e-9:
        raise GeometryError(f"an alignment of {alignment}: it lies between 0 and 1")
    order = t.argsort()
    return t[order], values[order]


def _asymptotic(logs: Tensor) -> int:
    """The length of the longest window from the smallest t on whose two halves agree; 0 if there is none."""
    lengths = range(logs.shape[1], POINTS - 1, -1)
    return next((n for n in lengths if _drift(logs[:, :n]) <= DRIFT), 0)


def _drift(logs: Tensor) -> float:
    """How much the slope differs between the lower and the upper half of the points."""
    half = (logs.shape[1] + 1) // 2
    return abs(_line(logs[:, :half])[0] - _line(logs[:, -half:])[0])


def _refusal(held: Tensor, logs: Tensor, alignment: float) -> str | None:
    """Why no rate may be reported from the points held of all that there are, or None."""
    if alignment < ALIGNMENT:
        return f"alignment {alignment:.3f} is below {ALIGNMENT}: the layers do not share a dead direction"
    if logs.shape[1] < POINTS:
        return f"{logs.shape[1]} values are above the floor; a rate needs {POINTS}"
    if held.shape[1] == 0 or _drift(held) > DRIFT:
        low, high = _line(logs[:, :POINTS])[0], _line(logs[:, -POINTS:])[0]
        return f"the window is not asymptotic: the slope goes from {low:.2f} to {high:.2f}"
    slope, _, error, _ = _line(held)
    return None if error <= SCATTER else f"the points scatter: slope {slope:.2f} ± {error:.2f}"


def _line(logs: Tensor) -> tuple[float, float, float, float]:
    """Slope, intercept, the slope's standard error and R². Values that do not move at all are on the line."""
    x, y = logs
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx @ dy) / (dx @ dx)
    residual, total = (dy - slope * dx).square().sum(), dy.square().sum()
    error = (residual / (max(len(x) - 2, 1) * (dx @ dx))).sqrt()
    r_squared = 1.0 if total == 0 else float(1 - residual / total)
    return float(slope), float(y.mean() - slope * x.mean()), float(error), r_squared
