"""Mixtures of unit Gaussians: two components that merge, and one whose weight vanishes.

Statement. p(x) = Σ_i π_i φ(x - μ_i). Components 1 and 2 merge at 0, others may stand elsewhere; with
s = π₁ + π₂,

    μ₁ = -t π₂/s,  μ₂ = t π₁/s        (separation t, the mean of the pair kept)

is the dead direction ẇ, for every weight. The raw difference μ₂ - μ₁ alone is not: for π₁ ≠ π₂ its score
does not vanish. Along it K ~ t⁴, k = 2; with two components and per unit of length, K → m² t⁴ / 4, where
m = π₁π₂ / (π₁² + π₂²). Eigenvalues of the whole Fisher, as powers of t:

    means of two components            2, 0
    means of three, one pair merging   2, 0, 0
    two means and the weight           6, 2, 0

The weight's own entry goes as t² where both means are kept, as t⁴ where the mean of all is (t⁶ for π₁ = ½),
and its eigenvalue as t⁶ always: the inequality of Cauchy and Schwarz is saturated at leading order.

A vanishing weight, (1-π) φ(x) + π φ(x-μ) with π → 0, is another matter. There μ is tangent to the singular
set, K ≡ 0 along it, and the rate theorem does not apply: order is None. The true limits are

    F_μμ / π² → e^{μ²} (1 + μ²)        F_ππ → e^{μ²} - 1

reached only where π e^{μ²} ≪ 1. In a usual window, π in [1e-4, 1e-2] with μ = 3, the slopes read 1.15 for
F_μμ, 1.40 for λ_min, -0.63 for λ_max. Their quotient's is -2.03 by accident: it is no evidence of k = 2.

Numerics. Integrals by the trapezoidal rule. Fisher and K are sums of positive terms, each from
`excess_exp`, `excess_log` or expm1 with the vanishing orders taken out beforehand, so both hold to a few
1e-16 at any t. Eigenvalues are squares of the singular values of the weighted scores: those see down to
1e-30 of the largest.

Symbols and shapes. t: (n,); m nodes, P parameters; spectra (n, P), ascending. Cost: O(n m) for fisher and
kl, O(n m P²) for spectra.
Source: "Dead Directions: Geometric Singular Learning", §4, §6 ("Selection-rule recovery on Gaussian-mixture
boundaries") and Table 8; its exponents for the vanishing weight are those of a window, the limits are
derived here.
Limits. One dimension, variance 1, one pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from papers.dead_directions.quadrature import (
    REACH,
    STEP,
    excess_log,
    normal_density,
    normal_rule,
    points,
)
from topograd.errors import GeometryError
from topograd.geometry.paths import excess_exp


@dataclass(frozen=True)
class Merge:
    """Components 1 and 2 of a mixture merge; further ones stand at `others`, one mean for each.

    >>> t = torch.tensor([1e-6], dtype=torch.float64)
    >>> family = Merge((0.7, 0.3))
    >>> round((family.fisher(t) * t**2 / family.kl(t)).item(), 6)
    8.0
    """

    weights: tuple[float, ...] = (0.5, 0.5)
    others: tuple[float, ...] = ()

    order = 2

    def __post_init__(self) -> None:
        if len(self.weights) != 2 + len(self.others) or min(self.weights) <= 0:
            raise GeometryError(
                f"weights {self.weights} with further means {self.others}: give two positive weights for the "
                "pair and one for each further mean",
                setting="weights",
                given=self.weights,
            )
        if not math.isclose(math.fsum(self.weights), 1, abs_tol=1e-12):
            raise GeometryError(
                f"the weights {self.weights} sum to {math.fsum(self.weights)}: they must to 1",
                setting="weights",
                given=self.weights,
            )
        if any(mean == 0 for mean in self.others):
            raise GeometryError(
                "a further component stands at 0, where the pair merges: give it another mean",
                setting="others",
                given=self.others,
            )

    @property
    def name(self) -> str:
        weights = ", ".join(f"{weight:g}" for weight in self.weights)
        return f"Gaussian mixture ({weights}), two merge"

    @property
    def direction(self) -> str:
        return "the means of the pair apart, their mean kept"

    @property
    def velocity(self) -> tuple[float, float]:
        """ẇ of the pair's means: (-π₂, π₁) / (π₁ + π₂)."""
        first, second = self.weights[:2]
        return -second / (first + second), first / (first + second)

    def fisher(self, t: Tensor) -> Tensor:
        t = points(t)[:, None]
        x = self._nodes(t)
        slope = torch.zeros_like(t * x)  # dp_t/dt over φ(x); the order t⁰ sums to 0 and is left out
        for weight, rate in zip(self.weights[:2], self.velocity, strict=True):
            mean = rate * t
            slope = slope + weight * rate * ((x - mean) * torch.expm1(mean * x - mean.square() / 2) - mean)
        return STEP * (normal_density(x) * slope).square().div(self._density(t, x)).sum(-1)

    def kl(self, t: Tensor) -> Tensor:
        t = points(t)[:, None]
        x = self._nodes(t)
        ratio = torch.zeros_like(t * x)  # (p_t - p_0) / φ(x); the orders t⁰ and t¹ sum to 0 and are left out
        for weight, rate in zip(self.weights[:2], self.velocity, strict=True):
            square = (rate * t).square() / 2
            ratio = ratio + weight * (excess_exp(rate * t * x - square) - square)
        density = self._density(torch.zeros_like(t), x)
        return STEP * (density * excess_log(ratio * normal_density(x) / density)).sum(-1)

    def spectrum(self, t: Tensor, weight: bool = False) -> Tensor:
        """(n, P): eigenvalues of the Fisher in all means, with `weight` in that of the pair too."""
        t = points(t)[:, None]
        x = self._nodes(t)
        means = self._means(t)
        columns = [
            share * (x - mean) * normal_density(x - mean)
            for share, mean in zip(self.weights, means, strict=True)
        ]
        if weight:
            grown = [torch.expm1(mean * x - mean.square() / 2) for mean in means[:2]]
            columns.append(normal_density(x) * (grown[1] - grown[0]))
        return _spectrum(columns, self._density(t, x))

    def _means(self, t: Tensor) -> list[Tensor]:
        pair = [rate * t for rate in self.velocity]
        return pair + [torch.full_like(t, mean) for mean in self.others]

    def _density(self, t: Tensor, x: Tensor) -> Tensor:
        parts = zip(self.weights, self._means(t), strict=True)
        return sum((share * normal_density(x - mean) for share, mean in parts), torch.zeros_like(t * x))

    def _nodes(self, t: Tensor) -> Tensor:
        widest = float(t.max())
        low, high = min(0.0, -widest, *self.others), max(0.0, widest, *self.others)
        return normal_rule(math.floor(low) - REACH, math.ceil(high) + REACH, t.device)[0]


@dataclass(frozen=True)
class WeightBoundary:
    """(1-π) N(0, 1) + π N(μ, 1) with weight π = t and μ = `mean`: the negative case, without an order.

    `fisher` is the entry F_μμ at weight t, and `kl` the divergence along μ on the boundary itself.
    """

    mean: float = 2.0

    order = None

    def __post_init__(self) -> None:
        if not 0 < abs(self.mean) <= 5:
            raise GeometryError(
                f"a second mean of {self.mean}: give one in [-5, 5] that is not 0",
                setting="mean",
                given=self.mean,
            )

    @property
    def name(self) -> str:
        return f"Gaussian mixture, weight to 0, mean {self.mean:g}"

    @property
    def direction(self) -> str:
        return "the mean of the vanishing component: tangent to the singular set"

    def fisher(self, t: Tensor) -> Tensor:
        (_, column, _), density = self._scores(points(t)[:, None])
        return STEP * (column.square() / density).sum(-1)

    def kl(self, t: Tensor) -> Tensor:
        """0: at weight 0 the density does not depend on μ."""
        return torch.zeros_like(points(t))

    def spectrum(self, t: Tensor) -> Tensor:
        """(n, 3): eigenvalues of the Fisher in both means and π, at π = t."""
        columns, density = self._scores(points(t)[:, None])
        return _spectrum(columns, density)

    @property
    def limits(self) -> tuple[float, float]:
        """F_μμ / π² and F_ππ as π → 0."""
        square = self.mean**2
        return math.exp(square) * (1 + square), math.expm1(square)

    def _scores(self, t: Tensor) -> tuple[list[Tensor], Tensor]:
        """p's derivatives in the first mean, in μ and in π, and p. The mass of φ(x-μ)²/φ(x) lies at 2μ."""
        if float(t.max()) >= 1:
            raise GeometryError(
                f"a weight of {float(t.max())}: it lies between 0 and 1", setting="t", given=float(t.max())
            )
        low, high = min(0.0, 2 * self.mean), max(0.0, 2 * self.mean)
        x, _ = normal_rule(math.floor(low) - REACH, math.ceil(high) + REACH, t.device)
        here, there = normal_density(x), normal_density(x - self.mean)
        density = (1 - t) * here + t * there
        weight = (there - here).expand_as(density)
        return [(1 - t) * x * here, t * (x - self.mean) * there, weight], density


def _spectrum(columns: list[Tensor], density: Tensor) -> Tensor:
    """Eigenvalues, ascending, of ∫ ∂_a p ∂_b p / p from the derivatives ∂_a p (n, m), by singular values."""
    scores = torch.stack(columns, dim=-1) * (STEP / density).sqrt()[..., None]
    return torch.linalg.svdvals(scores).square().flip(-1)
