"""Statistical models whose singularity is known: each with its exact Fisher and divergence along an approach.

Every family is a frozen dataclass of this shape, so that one loop makes a table of them all:

    for family in families:
        rate = fit_rate(t, family.fisher(t))        # 2k - 2
        ratio = family.fisher(t) * t**2 / family.kl(t)   # -> 2k²
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Family(Protocol):
    """A model along its approach w(t) = w₀ + t ẇ to a singular point w₀, with p_0 the density at w₀."""

    @property
    def name(self) -> str:
        """The model and its settings, in one line of a table."""

    @property
    def order(self) -> int | None:
        """k of K(w(t)) = c t^{2k} + …, c > 0; None where the theorem does not apply."""

    @property
    def direction(self) -> str:
        """The approach ẇ, in words."""

    def fisher(self, t: Tensor) -> Tensor:
        """(n,): ẇᵀ F(w(t)) ẇ at n values t > 0, per ẇ as it is: divide by |ẇ|² for the unit direction."""

    def kl(self, t: Tensor) -> Tensor:
        """(n,): K(w(t)) = KL(p_0 ‖ p_t), in this order, at n values t > 0."""
