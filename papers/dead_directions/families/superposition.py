"""The toy model of superposition, x̂ = Wᵀ W x, as one hidden row vanishes.

Statement. W (hidden, features) has orthonormal rows, of which the last is replaced by t u, |u| = 1; the
target is that of t = 0, y = W₀ᵀ W₀ x + ε, ε ~ N(0, s² I), x ~ N(0, I). Then x̂ - W₀ᵀ W₀ x = t² u (u·x) and

    K = ½ t⁴        F = 4 t²        per ẇ = the last row along u; k = 2
    G_out = s² I + t⁴ u uᵀ          dead entry along u:          s² + t⁴
    G_hidden = W G_out Wᵀ           dead entry of the last row:  t² (s² + t⁴)

Slopes: F has 2, always. The factors have 0 and 2 with label noise, 4 and 6 without (G_out, G_hidden).

Where the paper disagrees: its §7.2 puts the raised ladder down to the tying of the two weights. The factors
do not depend on tying: the same numbers come from two free matrices that hold Wᵀ and W. The raise by 4 = 2L
is that of a residual without noise (Remark 23), and a target with noise restores (0, 2). Our measurement:
4.000, 6.000 without noise, 0.000, 2.000 with it.

Symbols and shapes. t: (n,). G_out (n, features, features), G_hidden (n, hidden, hidden). `overlap` is the
part of u that lies in the rows that stay: it scales the smallest eigenvalue of G_hidden by 1 - overlap²,
and no exponent.
Cost: O(n features² hidden).
Source: "Dead Directions: Geometric Singular Learning", §7.2, on the model of "Toy Models of Superposition".
Limits. The linear model: no ReLU at the output, all features of variance 1 and equal importance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from papers.dead_directions.quadrature import points
from topograd.errors import GeometryError


@dataclass(frozen=True)
class Superposition:
    """x̂ = Wᵀ W x, the last row of W being t u; output noise of variance 1 in `fisher` and `kl`."""

    features: int = 5
    hidden: int = 2
    overlap: float = 0.0

    order = 2

    def __post_init__(self) -> None:
        if not 2 <= self.hidden <= self.features:
            raise GeometryError(
                setting="hidden", given=self.hidden, allowed=f"from 2 to the {self.features} features"
            )
        if not 0 <= self.overlap < 1:
            raise GeometryError(
                f"an overlap of {self.overlap}: give one in [0, 1)", setting="overlap", given=self.overlap
            )

    @property
    def name(self) -> str:
        return f"superposition {self.features}-{self.hidden}"

    @property
    def direction(self) -> str:
        return "the row of one hidden unit, in both of its places"

    def direction_vector(self, device: torch.device | None = None) -> Tensor:
        """u (features,)."""
        u = torch.zeros(self.features, dtype=torch.float64, device=device)
        u[0], u[self.hidden - 1] = self.overlap, math.sqrt(1 - self.overlap**2)
        return u

    def weights(self, t: Tensor) -> Tensor:
        """W (n, hidden, features): the first unit vectors, and t u as the last row."""
        t = points(t)
        rows = torch.eye(self.hidden, self.features, dtype=t.dtype, device=t.device)
        W = rows.expand(len(t), -1, -1).clone()
        W[:, -1] = t[:, None] * self.direction_vector(t.device)
        return W

    def fisher(self, t: Tensor) -> Tensor:
        return 4 * points(t) ** 2

    def kl(self, t: Tensor) -> Tensor:
        return points(t) ** 4 / 2

    def gradient_factors(self, t: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """G_out and G_hidden of the loss ½ |x̂ - y|², with label noise s = `noise`; 0 is noise-free."""
        W, u = self.weights(t), self.direction_vector(t.device)
        identity = torch.eye(self.features, dtype=W.dtype, device=W.device)
        output = noise**2 * identity + points(t)[:, None, None] ** 4 * torch.outer(u, u)
        return output, W @ output @ W.mT

    def dead_entries(self, t: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """(n,) each: uᵀ G_out u, and the last diagonal entry of G_hidden."""
        t = points(t)
        output = noise**2 + t**4
        return output, t**2 * output
