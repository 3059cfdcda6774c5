"""Gaussian integrals to rounding, and integrands that do not cancel near a singular point.

Statement. With nodes x_i = (i + ½) h and φ the standard normal density,

    E f(X) ≈ Σ_i h φ(x_i) f(x_i),        X ~ N(0, 1),

is the trapezoidal rule, moved by half a step. For f analytic in the strip |Im x| < d its error is about
e^{-2πd/h}: with h = 1/16 and d = ½, 1e-22. No node is 0 and the nodes are symmetric, so it is as good for a
function that is even and analytic on each half-line, such as the square of a ReLU.

Close to a singular point, 1 + r = p_t / p_0 has r ~ t^k, and a divergence of order r² would be lost under
the rounding of log(1 + r). Two functions keep it to relative rounding:

    excess_exp(a) = e^a - 1 - a                         for |a| < 1 by its series (`topograd.geometry.paths`)
    excess_log(r) = r - log(1 + r) = r s - 2 (s³/3 + s⁵/5 + …),   s = r / (2 + r)        for |s| < ¼

Symbols and shapes. x, weights: (m,), m = 16 (high - low). Cost: O(m) per integral.
Source: "The exponentially convergent trapezoidal rule" (L. N. Trefethen, J. A. C. Weideman).
Limits. The range must hold the mass of φ f: a factor e^{μx} moves it to μ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topograd.errors import GeometryError

STEP = 1 / 16
"""h."""
REACH = 13
"""φ(13) is 1e-37: what lies beyond is no part of a float64 sum."""
LOG_TERMS = 13


def points(t: Tensor) -> Tensor:
    """t (n,) in float64, where it may be the parameter of an approach.

    >>> points(torch.tensor([0.5, 0.25])).dtype
    torch.float64
    """
    if t.dim() != 1 or len(t) == 0 or not (torch.isfinite(t) & (t > 0)).all():
        raise GeometryError(setting="t", given=tuple(t.shape), allowed="a line of finite numbers above 0")
    return t.to(torch.float64)


def normal_rule(low: int, high: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes x and weights h φ(x), both (m,), from low to high.

    >>> x, weights = normal_rule(-REACH, REACH, torch.device("cpu"))
    >>> round(float(weights @ x**4), 12)
    3.0
    """
    count = round((high - low) / STEP)
    x = low + STEP * (torch.arange(count, dtype=torch.float64, device=device) + 0.5)
    return x, STEP * normal_density(x)


def normal_density(x: Tensor) -> Tensor:
    """φ(x) = e^{-x²/2} / √(2π)."""
    return (-x.square() / 2).exp() / math.sqrt(2 * math.pi)


def excess_log(r: Tensor) -> Tensor:
    """r - log(1 + r) for r > -1, to relative rounding: r²/2 where r is small."""
    s = r / (2 + r)
    near = s.clamp(-0.25, 0.25)
    series = torch.zeros_like(r)
    for j in range(LOG_TERMS, 0, -1):
        series = (1 / (2 * j + 1) + series) * near.square()
    return torch.where(s.abs() < 0.25, s * (r - 2 * series), r - torch.log1p(r))
