"""Two layers in closed form: a dead hidden unit, the gradient factor of layer 1, the Schur constant of ReLU.

Statement. y = W₂ σ(W₁ x) + ε, ε ~ N(0, s² I), x ~ N(0, I).

Dead unit: its weights in and out are both t, so it adds t σ(t z), z ~ N(0, 1), to one output. With s = 1,

    K = ½ t² E σ(tz)²        F = E (σ(tz) + t z σ'(tz))²        per ẇ = (1, 1), |ẇ|² = 2

so k = 2, F t² / K → 8, and F per unit of length tends to 2g t², with the gain g = lim E σ'(tz)²:

    g = σ'(0)² = 1, 1, ¼, 1/16   for linear, tanh, GELU, centred sigmoid;   ½ = P(z > 0) for ReLU.

Gradient factor of layer 1 at the optimum, where only noise is left of the residual:

    λ_min(G₁) = s² t² E σ'(tz)²     W₁ = W₂ = diag(1, …, 1, t); → s² g t²

Schur constant. In A = E[h hᵀ], with dead row (b, A_dd) and live block C, the dead eigenvalue is
A_dd - bᵀ C⁻¹ b. Where units are independent, with mean and variance (m, v) of a live one and mean and second
moment (m_d, s_d) of the dead one, at width d,

    bᵀ C⁻¹ b / A_dd = (d-1) m² m_d² / (s_d (v + (d-1) m²));        ReLU: (d-1) / (π (d + π - 2)) → 1/π

so ReLU loses at most 1/π of its dead entry, and keeps its exponent; it is 0 where m or m_d is.

Symbols and shapes. t: (n,). Cost: O(n m) for m quadrature nodes.
Source: "Dead Directions: Geometric Singular Learning", §4.3, Theorem 21 at two layers, Lemma 18 and Remark
19.
Limits. Isotropic Gaussian input. The gain is the limit t → 0; `DeadUnit` is exact at every t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from papers.dead_directions.quadrature import REACH, normal_density, normal_rule, points
from topograd.errors import GeometryError


@dataclass(frozen=True)
class Activation:
    """σ and σ', with g = lim E σ'(tz)² as t → 0."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    gain: float


ACTIVATIONS = {
    "linear": Activation(lambda z: z, torch.ones_like, 1.0),
    "relu": Activation(torch.relu, lambda z: (z > 0).to(z.dtype), 0.5),
    "gelu": Activation(F.gelu, lambda z: torch.special.ndtr(z) + z * normal_density(z), 0.25),
    "tanh": Activation(torch.tanh, lambda z: 1 - torch.tanh(z).square(), 1.0),
    "sigmoid": Activation(  # less its value at 0
        lambda z: torch.tanh(z / 2) / 2, lambda z: (1 - torch.tanh(z / 2).square()) / 4, 1 / 16
    ),
}


def activation(name: str) -> Activation:
    """The activation of this name."""
    if name not in ACTIVATIONS:
        raise GeometryError(
            f"an activation called {name!r}: give one of {', '.join(ACTIVATIONS)}", setting="name", given=name
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class DeadUnit:
    """A hidden unit whose weights in and out are both t, the teacher's 0; output noise of variance 1.

    >>> t = torch.tensor([1e-4], dtype=torch.float64)
    >>> unit = DeadUnit("relu")
    >>> round((unit.fisher(t) / unit.speed**2 / t**2).item(), 6)
    1.0
    """

    activation: str = "linear"

    order = 2
    speed = math.sqrt(2)
    """|ẇ|, ẇ = (1, 1)."""

    def __post_init__(self) -> None:
        activation(self.activation)

    @property
    def name(self) -> str:
        return f"two-layer dead unit, {self.activation}"

    @property
    def direction(self) -> str:
        return "the unit's weights in and out together"

    def fisher(self, t: Tensor) -> Tensor:
        t, z, weights = self._nodes(t)
        kind = activation(self.activation)
        return (kind.function(t * z) + t * z * kind.derivative(t * z)).square() @ weights

    def kl(self, t: Tensor) -> Tensor:
        t, z, weights = self._nodes(t)
        return (t * activation(self.activation).function(t * z)).square() @ weights / 2

    def gradient_entry(self, t: Tensor, noise: float = 1.0) -> Tensor:
        """(n,): the dead entry of G₁, s² t² E σ'(tz)², with s = `noise`."""
        t, z, weights = self._nodes(t)
        return (noise * t * activation(self.activation).derivative(t * z)).square() @ weights

    def _nodes(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, weights = normal_rule(-REACH, REACH, t.device)
        return points(t)[:, None], z, weights


def schur_fraction(width: int, mean: float, variance: float, dead_mean: float, dead_moment: float) -> float:
    """bᵀ C⁻¹ b / A_dd of independent units: what the live ones take away from the dead entry of A.

    >>> schur_fraction(8, mean=0.0, variance=1.0, dead_mean=0.3, dead_moment=1.0)
    0.0
    """
    if width < 2 or variance <= 0 or dead_moment <= 0:
        raise GeometryError(
            f"width {width}, variance {variance}, dead second moment {dead_moment}: "
            "give a width of at least 2 and positive moments",
            setting="width",
            given=width,
        )
    lives = (width - 1) * mean**2
    return lives * dead_mean**2 / (dead_moment * (variance + lives))


def relu_schur_fraction(width: int) -> float:
    """(d-1) / (π (d + π - 2)): the fraction for ReLU units of isotropic Gaussian input.

    >>> round(relu_schur_fraction(8), 4)
    0.2437
    """
    mean = 1 / math.sqrt(2 * math.pi)
    return schur_fraction(width, mean, 0.5 - mean**2, mean, 0.5)
