"""Beyond the exponent: the ratio of Fisher to divergence, and their next order.

Statement. Let p_t / p_0 = 1 + Σ_j r_j t^j along an approach of KL order k, expectations under p_0. Then

    K = ½ E[r_k²] t^{2k} + …        F = k² E[r_k²] t^{2k-2} + …        F t² / K → 2k²

and not 2k(2k-1), which it would be if F were the Hessian of K; the two agree for k = 1 only. At k = 2, where
E[r₂r₃] = 0, with A_22 = E r₂², A_33 = E r₃², A_24 = E r₂r₄, A_222 = E r₂³,

    F = 4 A_22 t² + (9 A_33 + 16 A_24 - 4 A_222) t⁴ + …
    K = ½ A_22 t⁴ + (½ A_33 + A_24 - ⅓ A_222) t⁶ + …

Two unit Gaussians that merge, weights (1-π, π), separation t, mean kept; m₂ = π(1-π):

    A_22 = m₂²/2    A_33 = m₂²(1-4m₂)/6    A_24 = 0    A_222 = m₂³
    ratio of the next coefficients  (18 - 120 m₂) / (1 - 8 m₂):   18 as π → 0, 12 at π = ½

Symbols and shapes. t, F, K: (n,). Cost: O(n).
Source: "Dead Directions: Geometric Singular Learning", §4 (leading ratio and next order).
Where it disagrees: the text has the mixture's ratio vary smoothly from 18 to 12. It has a pole at m₂ = 1/8,
π = 0.1464, where the next coefficient of K vanishes; our measurement: 25.7 at π = 0.1, 4.29 at 0.2, 10.59
at 0.3.
Limits. KL(p_0 ‖ p_t): the other order has other next coefficients. The next coefficients need F and K to
about t² times rounding: from values that cancel they cannot be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import GeometryError

POLE = 1e-6
"""How close to 0 the next coefficient of K may come, as |1 - 8 m₂|, before its ratio means nothing."""


@dataclass(frozen=True)
class LeadingRatio:
    """F t² / K over a window: its value at the smallest t, and the largest less the smallest."""

    value: float
    spread: float
    window: tuple[float, float]

    @property
    def order(self) -> float:
        """k from 2k² = value."""
        return math.sqrt(self.value / 2)


def leading_ratio(
    t: Tensor, fisher: Tensor, kl: Tensor, window: tuple[float, float] | None = None
) -> LeadingRatio:
    """The ratio F t² / K where t lies in the window; all t unless one is given.

    F must be per the same ẇ as t: for w(t) = w₀ + t ẇ, ẇᵀ F ẇ, not that of a unit vector.

    >>> t = torch.tensor([0.1, 0.2], dtype=torch.float64)
    >>> round(leading_ratio(t, 9 * t**4, t**6 / 2).value, 9)
    18.0
    """
    if t.dim() != 1 or not t.shape == fisher.shape == kl.shape:
        raise GeometryError(
            f"t {tuple(t.shape)}, Fisher {tuple(fisher.shape)}, K {tuple(kl.shape)}: give as many of each",
            setting="t",
            given=tuple(t.shape),
        )
    low, high = window if window is not None else (0.0, math.inf)
    inside = (t >= low * (1 - 1e-9)) & (t <= high * (1 + 1e-9))
    t, fisher, kl = t[inside], fisher[inside], kl[inside]
    if len(t) == 0:
        raise GeometryError(
            f"no t lies in [{low}, {high}]: give a window that holds some",
            setting="window",
            given=(low, high),
        )
    if not (torch.isfinite(kl) & (kl > 0) & torch.isfinite(fisher) & (t > 0)).all():
        raise GeometryError(
            "Fisher or K is not finite, or K or t not above 0: the ratio has no limit there", setting="kl"
        )
    ratio = fisher * t.square() / kl
    spread = float(ratio.max() - ratio.min())
    return LeadingRatio(float(ratio[t.argmin()]), spread, (float(t.min()), float(t.max())))


def ratio_of_order(order: int) -> int:
    """2k²."""
    if order < 1:
        raise GeometryError(f"a KL order of {order}: give 1 or more", setting="order", given=order)
    return 2 * order**2


@dataclass(frozen=True)
class Moments:
    """A_22, A_33, A_24, A_222 of a family with k = 2 and E[r₂r₃] = 0."""

    A_22: float
    A_33: float
    A_24: float
    A_222: float

    @property
    def fisher(self) -> tuple[float, float]:
        """Coefficients of t² and t⁴ in F."""
        return 4 * self.A_22, 9 * self.A_33 + 16 * self.A_24 - 4 * self.A_222

    @property
    def kl(self) -> tuple[float, float]:
        """Coefficients of t⁴ and t⁶ in K."""
        return self.A_22 / 2, self.A_33 / 2 + self.A_24 - self.A_222 / 3


def mixture_moments(weight: float) -> Moments:
    """The moments of two unit Gaussians that merge, the second with this weight π."""
    m2 = _spread_of_weights(weight)
    return Moments(m2**2 / 2, m2**2 * (1 - 4 * m2) / 6, 0.0, m2**3)


def mixture_next_ratio(weight: float) -> float:
    """(18 - 120 m₂) / (1 - 8 m₂); refused at its pole.

    >>> round(mixture_next_ratio(0.5), 9), round(mixture_next_ratio(0.1), 2)
    (12.0, 25.71)
    """
    m2 = _spread_of_weights(weight)
    if abs(1 - 8 * m2) < POLE:
        raise GeometryError(
            f"a weight of {weight}: the next coefficient of K vanishes at π = 0.1464, so there is no ratio",
            setting="weight",
            given=weight,
            remedy="read the two coefficients of `mixture_moments`",
        )
    return (18 - 120 * m2) / (1 - 8 * m2)


def next_coefficient(t: Tensor, values: Tensor, power: int, leading: float) -> float:
    """c' of values = leading t^power + c' t^{power+2} + c'' t^{power+4} + …, by least squares for c' and c''.

    >>> t = torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64)
    >>> round(next_coefficient(t, 4 * t**2 - 3 * t**4, power=2, leading=4.0), 6)
    -3.0
    """
    if t.dim() != 1 or t.shape != values.shape or len(t) < 3:
        raise GeometryError(
            f"{tuple(values.shape)} values at {tuple(t.shape)} points t: give as many of each, 3 or more",
            setting="values",
            given=tuple(values.shape),
        )
    rest = (values / t**power - leading) / t.square()
    columns = torch.stack((torch.ones_like(t), t.square()), dim=1)
    return float(torch.linalg.lstsq(columns, rest[:, None]).solution[0, 0])


def _spread_of_weights(weight: float) -> float:
    if not 0 < weight < 1:
        raise GeometryError(f"a weight of {weight}: give one between 0 and 1", setting="weight", given=weight)
    return weight * (1 - weight)
