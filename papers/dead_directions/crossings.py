"""Normal crossings of components of the singular set, and their RLCT.

Statement. In coordinates x_i that vanish on component i, i = 1..r, near the crossing

    K = c x_1^{2k_1} ⋯ x_r^{2k_r},
    generic line     x = t v, every v_i ≠ 0:       vᵀF v ~ t^{2Σk_i - 2}
    anchored line i  x_i = t, the others at ε:     e_iᵀF e_i ~ ε^{2Σ_{j≠i} k_j} t^{2k_i - 2}

so k_i = slope_i/2 + 1, and the generic line, which was not used, must give Σ k_i. With a prior (or the
Jacobian of a resolution) |x_i|^{h_i}, the real log canonical threshold and its multiplicity are

    λ = min_i (h_i + 1)/(2k_i),    m = the number of i that reach it;    Vol{K < ε} ~ ε^λ (log 1/ε)^{m-1}.

Symbols and shapes. w₀ (d,) the crossing; normals (r, d), independent, one for each component:
x_i = n_i·(w - w₀). e_i is the vector with n_i·e_i = 1 and n_j·e_i = 0, normed. fisher(w, v) = vᵀF(w)v.
Cost: r + 1 lines, each of as many evaluations of the directional Fisher as the grid has points.
Source: "Dead Directions: Geometric Singular Learning", Theorem 89, Remarks 90 to 95. Volume law: Watanabe,
"Algebraic Geometry and Statistical Learning Theory".
Limits. The normals must be known, and the grid must lie well below ε. An order of 1 is a slope of 0 on its
anchored line, as for a normal along which nothing is singular: only the generic line tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import GeometryError
from topograd.geometry.rates import Rate, fit_rate, log_grid
from topograd.geometry.singular.invariants import rlct

INTEGER = 0.05
"""How far a measured order may be from an integer."""

DirectionalFisher = Callable[[Tensor, Tensor], Tensor | float]


@dataclass(frozen=True)
class Crossing:
    """The orders k_i and priors h_i of the components, and the lines that they were read from."""

    orders: tuple[int, ...]
    priors: tuple[float, ...]
    anchored: tuple[Rate, ...]
    generic: Rate
    evaluations: int

    @property
    def consistent(self) -> bool:
        """The generic line has the order Σ k_i."""
        return abs(self.generic.order - sum(self.orders)) <= INTEGER * len(self.orders)

    @property
    def rlct(self) -> float:
        """λ; GeometryError where the lines contradict one another."""
        return self._pair()[0]

    @property
    def multiplicity(self) -> int:
        """m; GeometryError where the lines contradict one another."""
        return self._pair()[1]

    def _pair(self) -> tuple[float, int]:
        if not self.consistent:
            raise GeometryError(
                f"the generic line has order {self.generic.order:.2f}, the components "
                f"{self.orders} add up to {sum(self.orders)}: this is not their normal crossing",
                setting="normals",
                given=self.orders,
                remedy="check the normals and the grid",
            )
        return rlct(self.orders, self.priors)


def recover_crossing(
    fisher: DirectionalFisher,
    point: Tensor,
    normals: Tensor,
    *,
    priors: Sequence[float] | None = None,
    grid: Tensor | None = None,
    anchor: float = 0.3,
) -> Crossing:
    """Read the orders of the components that meet at `point` from r anchored lines and a generic one.

    >>> def fisher(w, v):  # of N(x² y, 1)
    ...     return (torch.stack((2 * w[0] * w[1], w[0] ** 2)) @ v) ** 2
    >>> crossing = recover_crossing(fisher, torch.zeros(2).double(), torch.eye(2).double())
    >>> crossing.orders, crossing.rlct, crossing.multiplicity
    ((2, 1), 0.25, 1)
    """
    directions = _dual(point, normals)
    t = log_grid(1e-4, 1e-2) if grid is None else grid
    if not 0 < 3 * float(t.max()) <= anchor:
        largest = float(t.max())
        raise GeometryError(
            f"the grid goes up to {largest:.3g}",
            setting="grid",
            given=largest,
            allowed=f"below a third of the anchor {anchor:.3g}",
        )
    anchored = []
    for i, direction in enumerate(directions):
        foot = point + anchor * (directions.sum(0) - direction)
        anchored.append(_line(fisher, foot, direction, t, f"directional Fisher, anchored line {i + 1}"))
    generic = _line(fisher, point, directions.sum(0), t, "directional Fisher, generic line")
    evaluations = (len(directions) + 1) * len(t)
    return crossing_from_rates(anchored, generic, priors=priors, evaluations=evaluations)


def crossing_from_rates(
    anchored: Sequence[Rate], generic: Rate, *, priors: Sequence[float] | None = None, evaluations: int = 0
) -> Crossing:
    """The crossing of components whose lines have been fitted already: one anchored Rate for each."""
    for rate in (*anchored, generic):
        if rate.slope is None:
            raise GeometryError(
                f"no component's order can be read: {rate.estimator}: {rate}",
                setting="rates",
                given=rate.estimator,
            )
    if generic.order < 1 + INTEGER:
        raise GeometryError(
            f"the Fisher does not vanish along the generic line (slope {generic.slope:.3f}): this "
            "path does not approach a singularity",
            setting="point",
            given=generic.slope,
            remedy="start from a singular point",
        )
    for rate in anchored:
        if round(rate.order) < 1 or abs(rate.order - round(rate.order)) > INTEGER:
            raise GeometryError(
                f"{rate.estimator}: order {rate.order:.3f} is no positive integer, {rate}",
                setting="rates",
                given=rate.order,
            )
    orders = tuple(round(rate.order) for rate in anchored)
    exponents = (0,) * len(orders) if priors is None else tuple(priors)
    rlct(orders, exponents)  # raises where these are no orders and priors
    return Crossing(orders, exponents, tuple(anchored), generic, evaluations)


def _dual(point: Tensor, normals: Tensor) -> Tensor:
    """(r, d): unit e_i with n_j·e_i = 0 for j ≠ i."""
    if normals.dim() != 2 or point.shape != normals.shape[1:] or len(normals) == 0:
        raise GeometryError(
            f"normals have the shape {tuple(normals.shape)} and the point {tuple(point.shape)}",
            setting="normals",
            given=tuple(normals.shape),
            remedy="give one row of as many numbers for each component",
        )
    sizes = torch.linalg.vector_norm(normals, dim=1, keepdim=True)
    gram = (normals / sizes) @ (normals / sizes).T
    if not torch.linalg.cond(gram) < 1e8:
        raise GeometryError(
            "the normals are not independent", setting="normals", remedy="give one for each component"
        )
    directions = torch.linalg.solve(gram, normals / sizes)
    return directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)


def _line(fisher: DirectionalFisher, foot: Tensor, direction: Tensor, t: Tensor, name: str) -> Rate:
    """The rate of the Fisher in `direction` (made unit) at foot + t · direction."""
    unit = direction / torch.linalg.vector_norm(direction)
    values = [torch.as_tensor(fisher(foot + float(ti) * unit, unit)) for ti in t]
    return fit_rate(t, torch.stack(values), estimator=name)
