"""N(t^k, 1): the smallest family with a dead direction of any order.

Statement. Data from N(0, 1), model N(t^k, 1). Exactly, for every t,

    K(t) = t^{2k} / 2        F(t) = k² t^{2k-2}        F t² / K = 2k²

so the KL order is k and the local RLCT is 1/(2k).

Symbols and shapes. t: (n,). Cost: O(n).
Source: "Dead Directions: Geometric Singular Learning", §4.2.
Limits. For k = 1 the model is regular, and no direction is dead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from papers.dead_directions.quadrature import points
from topograd.errors import GeometryError


@dataclass(frozen=True)
class Gaussian:
    """N(t^k, 1) with k = `order`.

    >>> import torch
    >>> t = torch.tensor([0.5], dtype=torch.float64)
    >>> family = Gaussian(order=3)
    >>> (family.fisher(t) * t**2 / family.kl(t)).item()
    18.0
    """

    order: int

    def __post_init__(self) -> None:
        if self.order < 1:
            raise GeometryError(
                f"N(t^k, 1) with k = {self.order}: give k of at least 1", setting="order", given=self.order
            )

    @property
    def name(self) -> str:
        return f"N(t^{self.order}, 1)"

    @property
    def direction(self) -> str:
        return "the only parameter, t"

    def fisher(self, t: Tensor) -> Tensor:
        return self.order**2 * points(t) ** (2 * self.order - 2)

    def kl(self, t: Tensor) -> Tensor:
        return points(t) ** (2 * self.order) / 2
