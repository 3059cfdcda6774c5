"""What a direction adds to λ at a finite scale: its share, from the divergence K(t) along it.

Statement. Along a direction t of the weights, with the divergence K(t) from the checkpoint and nβ the data
that count,

    share(nβ) = nβ ∫ K e^{-nβK} dt / ∫ e^{-nβK} dt,       t from -`REACH` to `REACH`

is the mean of nβK under the posterior along that line. It is 1/(2k) where K = c t^{2k} and the line is long
enough: ½ along a live direction, less along a dead one. A trained network is in between: data of this size
see it bend from t² to t⁴, or do not reach the end of the line, where it nears 0.

Method. K is scanned outward on both sides, from where nβK is about 0.01 until it passes `STOP` or the line
ends; between the points log K is a monotone cubic of log t, so that powers are exact. Below the first point K
goes on as a power. Gauss-Legendre on every piece.

The interval is the middle 90 % over `DRAWS` bootstrap draws of the probe's samples, each with its own K(t):
it says how much the share depends on which samples were read. Samples count as independent, which tokens of
one row are not. It does not cover the interpolation, whose error is below 0.002 for K = t² + c t⁴.

Symbols and shapes. t > 0 in units of the layer's root mean square singular value, K (points, samples). Cost:
some fifteen forward passes of the probe.
Source: the share is the local learning coefficient of a line (Lau, Furman, Wang, Murfet and Wei, "The Local
Learning Coefficient") by quadrature instead of sampling; its limit is that of "Dead Directions: Geometric
Singular Learning", Theorem 3.
Limits. Shares of directions add up to λ only where K is a sum over them. The prior is uniform on the line.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import roots_legendre
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Outputs
from topograd.geometry.line_scan import Probe
from topograd.geometry.paths import Likelihood

Array = NDArray[np.float64]
Curve = Callable[[Tensor], Tensor]
"""From values of t (points) to K of every sample (points, samples)."""
REACH = 1.0
STOP = 40.0
"""nβK where the rest of the line has no weight."""
BEGIN = 0.2
"""Of the t at which nβK is about 1."""
RATIO = 2.0
MOST = 60
"""Points of a side."""
NODES = 40
DRAWS = 200
POWERS = (0.5, 16.0)
"""Of K below the first point."""


@dataclass(frozen=True)
class Share:
    """What a direction adds to λ at one scale."""

    n_beta: float
    value: float
    interval: tuple[float, float] | None
    """The middle 90 % over bootstrap draws of the probe's samples; None for a single one."""


def read_share(
    model: nn.Module,
    direction: Mapping[str, Tensor],
    inputs: Any,
    n_beta: float,
    likelihood: Likelihood = "squared-error",
    *,
    outputs: Outputs | None = None,
) -> Share:
    """The share of a direction of one's own, a part for some of the parameters; t is in units of its length.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = read_share(model, {"weight": torch.ones(1, 1)}, torch.ones(4, 1), 1000.0)
    >>> round(found.value, 9)  # K = t²/2
    0.5
    """
    probe = Probe(model, inputs, likelihood, outputs, None)
    if unknown := [name for name in direction if name not in probe.parameters]:
        known = ", ".join(list(probe.parameters)[:4])
        raise GeometryError(setting="direction", given=unknown[0], allowed=f"parameters, as {known}, ...")
    parts = {name: part.to(probe.parameters[name]) for name, part in direction.items()}
    return share_along(lambda grid: probe.curve(parts, grid), n_beta, probe.floor)


def share_along(curve: Curve, n_beta: float, floor: float = 0.0, near: float = 1e-2) -> Share:
    """The share from the curve K(t), t of either sign; `near` is where K is first looked at."""
    if not 0 < n_beta < math.inf:
        raise GeometryError(setting="n_beta", given=n_beta, allowed="a positive number")
    unit = _unit(curve, n_beta, floor, near)
    sides = [_march(curve, sign, unit, n_beta, floor) for sign in (1.0, -1.0)]
    samples = sides[0][1].shape[1]
    weights = np.full((1, samples), 1 / samples)
    value = float(_shares(sides, weights, n_beta)[0])
    if samples < 2:
        return Share(n_beta, value, None)
    generator = np.random.default_rng(0)
    draws = generator.multinomial(samples, np.full(samples, 1 / samples), DRAWS) / samples
    low, high = np.quantile(_shares(sides, draws, n_beta), (0.05, 0.95))
    return Share(n_beta, value, (min(float(low), value), max(float(high), value)))


def _unit(curve: Curve, n_beta: float, floor: float, near: float) -> float:
    """About the t at which nβK is 1, at most `REACH`: from K at `near` on, by its local power."""
    t = near
    for _ in range(MOST):
        first, second = curve(torch.tensor([t, 2 * t], dtype=torch.float64)).mean(1).tolist()
        if first > floor and second > floor:
            power = min(max(math.log2(second / first), POWERS[0]), POWERS[1])
            guess = t * math.exp(-math.log(n_beta * first) / power)
            if guess >= t / 8:  # else K was read where its leading power may not hold
                return min(guess, REACH)
            t = max(guess, t / 64)
        elif 4 * t > REACH:
            break
        else:
            t *= 4
    return min(t, REACH)


def _march(curve: Curve, sign: float, unit: float, n_beta: float, floor: float) -> tuple[Array, Array]:
    """t (points) and K (points, samples) outward on one side, the last at `STOP` or at the line's end."""
    grid: list[float] = []
    rows: list[Array] = []
    t = BEGIN * unit
    for _ in range(MOST):
        t = min(t, REACH)
        K = curve(torch.tensor([sign * t], dtype=torch.float64))[0]
        grid.append(t)
        rows.append(np.maximum(K.cpu().double().numpy(), 0.0))
        if t >= REACH or n_beta * float(K.mean()) > STOP:
            break
        t *= RATIO
    every = np.stack(rows)
    every[every.mean(1) <= floor] = 0.0
    return np.array(grid), every


def _shares(sides: list[tuple[Array, Array]], weights: Array, n_beta: float) -> Array:
    """The share for each row of `weights` (draws, samples)."""
    top = np.zeros(len(weights))
    bottom = np.zeros(len(weights))
    for grid, every in sides:
        nodes, lengths = _nodes(grid)
        action = n_beta * _between(grid, every @ weights.T, nodes)  # (nodes, draws)
        mass = lengths[:, None] * np.exp(-action)
        top += (mass * action).sum(0)
        bottom += mass.sum(0)
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


def _nodes(grid: Array) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on [0, t_1], [t_1, t_2], ..."""
    z, w = roots_legendre(NODES)
    left, right = np.concatenate(([0.0], grid[:-1]))[:, None], grid[:, None]
    half = (right - left) / 2
    return (left + half * (1 + z)).ravel(), (half * w).ravel()


def _between(grid: Array, values: Array, nodes: Array) -> Array:
    """K at the nodes (nodes, draws) from K at the grid (points, draws); 0 up to its last zero."""
    found = np.zeros((len(nodes), values.shape[1]))
    zeros = np.flatnonzero((values <= 0).any(1))
    start = int(zeros[-1]) + 1 if len(zeros) else 0
    if len(grid) - start < 2:
        return found
    x, y = np.log(grid[start:]), np.log(values[start:])
    spline = PchipInterpolator(x, y, axis=0)
    inside = nodes >= grid[start]
    found[inside] = np.exp(spline(np.log(nodes[inside])))
    power = np.clip(spline.derivative()(x[0]), *POWERS)
    found[~inside] = np.exp(y[0] + power * (np.log(nodes[~inside])[:, None] - x[0]))
    return found
