"""Singular invariants of dead directions: λ and m of crossings, and the fluctuation ν of one direction.

Statement. Where components of orders k_i cross normally, K = c Π_i x_i^{2k_i} under a prior Π_i |x_i|^{h_i},

    λ = min_i (h_i + 1)/(2k_i),    m = the number of i that reach it;    Vol{K < ε} ~ ε^λ (log 1/ε)^{m-1}.

With n samples, the posterior along a dead direction of order k, prior |w|^h, inverse temperature
β, is in the scaled coordinate s ∈ ℝ (the whole line)

    π_ξ(s) ∝ |s|^h exp(-½ s^{2k} + √β ξ s^k),    ξ ~ N(0, 1) the fluctuation of the data,
    ν(k, β, h) = ½ E_ξ Var_{π_ξ}(s^k).

The model's leading coefficient has cancelled. The functional variance of the sample tends to E V = 2ν/β.
ν(k), k = 1..6: .5000, .1730, .2784, .1379, .2061, .1167; odd and even orders interleave.

Method. x = s^k has the weight |x|^{(h+1)/k - 1}: Gauss-Jacobi on [0, 1] takes the endpoint exactly,
Gauss-Legendre panels do the rest, and the trapezoid rule in ξ converges geometrically. Cost: some 10⁵
exponentials.

Symbols. k ≥ 1 an integer, β in (0, 100], h > -1. Additive directions: ν = Σ ν(k_i).
Source: "Dead Directions: Geometric Singular Learning", Theorems 89 and 96, Remarks 97 and 99, §13.4;
definitions of Watanabe, "Mathematical Theory of Bayesian Statistics".
Limits. §13.4 has ν the same at every β. That holds at k = 1 only: our quadrature gives
.157, .173, .193 at β = ½, 1, 2 for k = 2. Products of directions (crossings) have no formula here.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.special import roots_jacobi, roots_legendre

from topograd.errors import GeometryError

COLDEST = 100.0
"""The largest β: beyond it the tilt √β ξ needs finer rules than those used here."""

Array = NDArray[np.float64]


def rlct(orders: Sequence[int], priors: Sequence[float] | None = None) -> tuple[float, int]:
    """(λ, m) of K = Π x_i^{2k_i} under the prior Π |x_i|^{h_i}; uniform where none is given.

    >>> rlct((1, 2)), rlct((2, 2)), rlct((1, 2), (0, 1))
    ((0.25, 1), (0.25, 2), (0.5, 2))
    """
    priors = (0,) * len(orders) if priors is None else tuple(priors)
    if not orders or len(priors) != len(orders):
        raise GeometryError(
            f"there are {len(orders)} orders and {len(priors)} priors",
            setting="priors" if orders else "orders",
            given=len(priors),
            remedy="give one of each per component",
        )
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in orders):
        raise GeometryError(setting="orders", given=tuple(orders), allowed="integers of at least 1")
    if any(not -1 < h < math.inf for h in priors):
        raise GeometryError(setting="priors", given=priors, allowed="above -1: |x|^h must have an integral")
    poles = [(Fraction(h) + 1) / (2 * k) for k, h in zip(orders, priors, strict=True)]
    return float(min(poles)), poles.count(min(poles))


def singular_fluctuation(k: int, beta: float = 1.0, prior: float = 0) -> float:
    """ν(k, β, h) with h = `prior`, to about ten digits.

    >>> round(singular_fluctuation(2), 4), round(singular_fluctuation(3), 4)
    (0.173, 0.2784)
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise GeometryError(setting="k", given=k, allowed="an integer of at least 1")
    if not -1 < prior < math.inf:
        raise GeometryError(setting="prior", given=prior, allowed="above -1: |s|^h must have an integral")
    if not 0 < beta <= COLDEST:
        raise GeometryError(setting="beta", given=beta, allowed=f"in (0, {COLDEST:g}]")
    step = 0.1 / max(1.0, math.sqrt(beta))
    xi = np.arange(-9.0, 9.0 + step / 2, step)
    weight = np.exp(-0.5 * xi**2)
    return float(0.5 * (weight @ _variances(k, prior, math.sqrt(beta) * xi)) / weight.sum())


def _variances(k: int, prior: float, tilts: Array) -> Array:
    """Var(s^k) under |s|^h exp(-½ s^{2k} + τ s^k) at each τ of `tilts`."""
    power = (prior + 1) / k - 1  # the weight of x = s^k is |x|^power
    reach = float(np.abs(tilts).max()) + 12 + 2 * math.sqrt(max(power, 0.0))
    x, weight = _half_line(power, reach)
    if k % 2:
        x, weight = np.concatenate((x, -x)), np.concatenate((weight, weight))
    exponent = -0.5 * x**2 + tilts[:, None] * x
    mass = weight * np.exp(exponent - exponent.max(1, keepdims=True))
    mass /= mass.sum(1, keepdims=True)
    mean = mass @ x
    variances: Array = (mass * (x - mean[:, None]) ** 2).sum(1)
    return variances


def _half_line(power: float, reach: float) -> tuple[Array, Array]:
    """Nodes and weights of ∫_0^reach x^power f(x) dx for an entire f that varies over lengths of about 1."""
    z, w = roots_jacobi(60, 0, power)  # weight (1+z)^power on [-1, 1]
    inner, inner_weight = (1 + z) / 2, w / 2 ** (power + 1)
    z, w = roots_legendre(20)
    left = np.arange(1.0, reach)[:, None]
    outer = (left + (1 + z) / 2).ravel()
    outer_weight = np.tile(w / 2, len(left)) * outer**power
    return np.concatenate((inner, outer)), np.concatenate((inner_weight, outer_weight))
