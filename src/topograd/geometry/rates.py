"""Rates: the exponent s of y(t) ≈ c tˢ as t → 0, or a reason why there is none to report.

Statement. Along an approach w(t) → w₀ to a singularity, entries of the Fisher matrix and of K-FAC factors,
and divergences, vanish as powers of t. The exponent is the least-squares slope of log y on log t over an
asymptotic window. For a directional Fisher vᵀF v ~ t^{2k-2} it carries the KL order

    k = slope / 2 + 1.

Asymptotic means that the lower and the upper half of the window have slopes within DRIFT of one another. The
window begins at the smallest t and is the longest such below UPPER; it must hold POINTS points and span a
factor SPAN of t. One that begins higher up is not taken, however straight: the limit is at the other end.
Points that scatter, so that the standard error of the slope is above SCATTER, give no rate either. The
interval is the middle 90 % of the slopes of DRAWS bootstrap draws of the points.

A dead row of a layer that is not exactly dead has a part a t beside its diagonal t, a the alignment error. A
live gradient reaches the dead unit through it with amplitude a t, the dead path of L layers with t^{L-1}. So
a rate of the dead path needs

    a ≪ t^{L-2}      at the smallest t of the window: a ≤ LEAK t^{L-2}.

Symbols and shapes. t, y: n numbers each, t > 0, in units in which live directions are of size 1; a ≥ 0 the
tangent of the angle between the directions of neighbouring layers. Cost: O(n²).
Source: "Dead Directions: Geometric Singular Learning", Theorem 2 and §12 (the conditions under which a rate
may be read). The condition on a is derived here; the thresholds are ours.
Limits. A straight line does not prove an exponent: without label noise every slope of a chain is larger by
2L, and just as straight (Remark 23). So a Rate carries estimator, noise regime, window and alignment error.
The bootstrap takes points for independent: those of one trajectory are not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topograd.errors import GeometryError

Noise = Literal["noisy", "noise-free", "none"]
"""Label noise in the factors: in expectation, absent, or of no concern (A, K and Fisher have no labels)."""
LEAK = 0.1
"""The alignment error over t^{L-2} above which a slope is that of a mixture of powers."""
DRIFT = 0.1
"""How far the slopes of a window's two halves may differ."""
SCATTER = 0.1
POINTS = 5
UPPER = 0.1
"""No t above this is near the limit."""
SPAN = 10.0
"""A decade: over less, any smooth curve is straight."""
DRAWS = 200

Series = Tensor | Sequence[float]


@dataclass(frozen=True)
class Rate:
    """A fitted rate. Where there is none, `slope` is None and `refused` has the reason."""

    slope: float | None
    coefficient: float | None
    error: float | None
    """The standard error of the slope."""
    interval: tuple[float, float] | None
    """The middle 90 % of the slope over bootstrap draws of the points."""
    r_squared: float | None
    window: tuple[float, float]
    points: int
    estimator: str
    noise: Noise
    alignment_error: float
    refused: str | None = None

    @property
    def order(self) -> float:
        """k = slope / 2 + 1, if these were values of a directional Fisher."""
        if self.slope is None:
            raise GeometryError(
                f"there is no rate to read an order from: {self.refused}", setting="slope", given=None
            )
        return self.slope / 2 + 1

    def __str__(self) -> str:
        low, high = self.window
        labels = f"{self.estimator}, labels {self.noise}, alignment error {self.alignment_error:.2g}"
        where = f"{labels}, t from {low:.1e} to {high:.1e}"
        if self.slope is None:
            return f"no rate: {self.refused} ({where})"
        return f"t^{self.slope:.3f} (R² {self.r_squared:.5f}, {where})"


def log_grid(low: float, high: float, points: int = 7) -> Tensor:
    """`points` values of t from low to high, evenly spaced in log t, float64."""
    if not 0 < low < high < math.inf or points < 2:
        raise GeometryError(
            f"{points} points from {low} to {high}",
            setting="points" if points < 2 else "low",
            given=points if points < 2 else low,
            remedy="give 0 < low < high and 2 points or more",
        )
    return torch.logspace(math.log10(low), math.log10(high), points, dtype=torch.float64)


def fit_rate(
    t: Series,
    values: Series,
    *,
    window: tuple[float, float] | None = None,
    floor: float = 0.0,
    estimator: str = "given values",
    noise: Noise = "none",
    alignment_error: float = 0.0,
    depth: int = 2,
) -> Rate:
    """The slope of log values on log t, over the asymptotic window or the one that is given.

    Values at or below `floor`, the resolution of the estimator, are rounding and are left out.
    `depth` is L, the layers of the dead path; `alignment_error` is a.

    >>> grid = log_grid(1e-3, 1e-1)
    >>> round(fit_rate(grid, 3 * grid**4).order, 9)
    3.0
    >>> fit_rate(grid, grid**4, alignment_error=0.02, depth=3).refused
    'alignment error 0.02 is above 0.1 t^1 at t = 0.001: a live path is mixed in'
    >>> narrow = log_grid(0.026, 0.03)
    >>> fit_rate(narrow, narrow**4.4).refused
    't spans a factor of 1.15; a rate needs 10 below t = 0.1'
    """
    t, values = _series(t, values, alignment_error)
    usable = (values > floor) & (t <= UPPER * (1 + 1e-9))
    if window is not None:
        low, high = window
        usable &= (t >= low * (1 - 1e-9)) & (t <= high * (1 + 1e-9))
    logs = torch.stack((t[usable].log(), values[usable].log()))
    fitted = logs
    if window is None:  # the longest from the smallest t on whose two halves agree
        lengths = range(logs.shape[1], POINTS - 1, -1)
        fitted = logs[:, : next((n for n in lengths if _drift(logs[:, :n]) <= DRIFT), 0)]
    ends = (float(fitted[0, 0].exp()), float(fitted[0, -1].exp())) if fitted.numel() else (math.nan, math.nan)
    labels = (ends, fitted.shape[1], estimator, noise, alignment_error)
    refused = _refusal(fitted, logs, alignment_error, depth)
    if refused is not None:
        return Rate(None, None, None, None, None, *labels, refused)
    slope, intercept, error, r_squared = fit_line(fitted)
    return Rate(slope, math.exp(intercept), error, _interval(fitted), r_squared, *labels)


def local_slope(t: Series, values: Series) -> float:
    """The slope of log values on log t over just these points: a description of them, not a rate.

    >>> round(local_slope([0.5, 0.6, 0.7], [0.25, 0.36, 0.49]), 9)
    2.0
    """
    x, y = _series(t, values, 0.0)
    return fit_line(torch.stack((x.log(), y.log())))[0]


def misalignment(error: float, smallest: float, depth: int) -> str | None:
    """Why an alignment error forbids a rate of `depth` layers down to the smallest t, or None.

    >>> misalignment(0.001, smallest=0.1, depth=3) is None
    True
    """
    if error <= LEAK * smallest ** (depth - 2):
        return None
    power = f" t^{depth - 2} at t = {smallest:.2g}" if depth > 2 else ""
    return f"alignment error {error:.2g} is above {LEAK}{power}: a live path is mixed in"


def _series(t: Series, values: Series, alignment_error: float) -> tuple[Tensor, Tensor]:
    """Both series in float64, in the order of t."""
    t, values = (torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (t, values))
    if t.dim() != 1 or t.shape != values.shape or len(t) == 0:
        shape = tuple(values.shape)
        raise GeometryError(
            f"there are {tuple(t.shape)} points and {shape} values",
            setting="values",
            given=shape,
            remedy="give as many of each",
        )
    if not (torch.isfinite(t) & (t > 0)).all() or len(t.unique()) < len(t):
        raise GeometryError(setting="t", given=t.tolist(), allowed="different positive numbers")
    if not torch.isfinite(values).all() or (values < 0).any():
        bad = values[~torch.isfinite(values) | (values < 0)][0].item()
        raise GeometryError(
            f"{bad} is among the values", setting="values", given=bad, allowed="finite and at least 0"
        )
    if not alignment_error >= 0:
        raise GeometryError(setting="alignment_error", given=alignment_error, allowed="at least 0")
    order = t.argsort()
    return t[order], values[order]


def _drift(logs: Tensor) -> float:
    """How much the slope differs between the lower and the upper half of the points."""
    half = (logs.shape[1] + 1) // 2
    return abs(fit_line(logs[:, :half])[0] - fit_line(logs[:, -half:])[0])


def _refusal(fitted: Tensor, logs: Tensor, alignment_error: float, depth: int) -> str | None:
    """Why no rate may be reported from the fitted points, some of all `logs`, or None."""
    smallest = float(logs[0, 0].exp()) if logs.numel() else UPPER
    if (leaks := misalignment(alignment_error, smallest, depth)) is not None:
        return leaks
    if logs.shape[1] < POINTS:
        return f"{logs.shape[1]} values are above the floor and below t = {UPPER}; a rate needs {POINTS}"
    if fitted.shape[1] == 0 or _drift(fitted) > DRIFT:
        low, high = fit_line(logs[:, :POINTS])[0], fit_line(logs[:, -POINTS:])[0]
        return f"the window is not asymptotic: the slope goes from {low:.2f} to {high:.2f}"
    if (span := float((fitted[0, -1] - fitted[0, 0]).exp())) < SPAN * (1 - 1e-9):
        return f"t spans a factor of {span:.3g}; a rate needs {SPAN:g} below t = {UPPER}"
    slope, _, error, _ = fit_line(fitted)
    return None if error <= SCATTER else f"the points scatter: slope {slope:.2f} ± {error:.2f}"


def fit_line(points: Tensor) -> tuple[float, float, float, float]:
    """Slope, intercept, the slope's standard error and R². Values that do not move at all are on the line."""
    x, y = points
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx @ dy) / (dx @ dx)
    residual, total = (dy - slope * dx).square().sum(), dy.square().sum()
    error = (residual / (max(len(x) - 2, 1) * (dx @ dx))).sqrt()
    r_squared = 1.0 if total == 0 else float(1 - residual / total)
    return float(slope), float(y.mean() - slope * x.mean()), float(error), r_squared


def _interval(logs: Tensor) -> tuple[float, float]:
    """The middle 90 % of slopes over draws of the points, at least three of them different."""
    generator = torch.Generator().manual_seed(0)
    count = logs.shape[1]
    places = torch.randint(count, (DRAWS, count), generator=generator)
    ordered = places.sort(1).values
    places = places[(ordered[:, 1:] != ordered[:, :-1]).sum(1) >= 2]
    dx, dy = logs[:, places] - logs[:, places].mean(-1, keepdim=True)
    slopes = (dx * dy).sum(-1) / dx.square().sum(-1)
    low, high = slopes.double().quantile(torch.tensor([0.05, 0.95], dtype=torch.float64))
    return float(low), float(high)
