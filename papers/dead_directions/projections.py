"""Small numbers of A and G, read without losing them: projections per sample, Schur complements.

Statement. Near a singularity one direction v of G = E[δ δᵀ] is many orders smaller than the others. Three
readings:

    per sample           E[(δ·v)²]                      resolves amplitudes of ε |δ|, so squares of ε² ‖G‖
    from the matrix      vᵀ G v,  λ_min(G)              resolve only ε ‖G‖
    Schur complement     G_dd - bᵀ C⁻¹ b                C the other rows and columns, b the coupling to them

with ε = 1.1e-16 in float64. In a rotated linear chain of six layers, t in [0.003, 0.1], the first reads
slope 10.000; the second bends between 1.8 and 3.6, as the sums happen to round (our measurements). The Schur
complement is what is left of the dead entry when the other directions have explained what they can; for a
ReLU chain they explain 1/π of it.

The smallest direction of a layer's Kronecker block G ⊗ A is the rank-one increment v uᵀ, with v the bottom
eigenvector of G and u that of A. One layer's increment alone is a gauge direction: the order of the
singularity is in the joint motion of all layers.

Symbols and shapes. δ (M, d_out), v (d_out) or r of them (d_out, r); h (M, d_in), u (d_in) or (d_in, r).
Cost. That of a forward pass and the part of a backward pass that leads to the layers, and M d r
multiply-adds; no factor is formed, so the width of a layer has no limit.
Source: "Dead Directions: Geometric Singular Learning", Lemma 17 (Schur reduction), Corollary 28 (Kronecker
lift).
Limits. A direction must be known. Amplitudes below ε of the activations are rounding even so. For a
direction that is not a coordinate the Schur complement turns the matrix first, which costs it everything
below ε ‖G‖.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, LayerFactors, Outputs, reduce_batches
from topograd.geometry.layers import Call
from topograd.geometry.losses import Fisher, Loss, OwnLoss, loss_named


@dataclass(frozen=True)
class Direction:
    """Where to look in one layer: v among its outputs, u among its inputs; one each, or r columns."""

    v: Tensor
    u: Tensor

    @property
    def increment(self) -> Tensor:
        """v uᵀ (d_out, d_in), the direction in the weights; of one v and one u."""
        return torch.outer(self.v, self.u)


@dataclass(frozen=True)
class Projected:
    """vᵀ G v and uᵀ A u of one layer, never formed as such; float64, a number or r of them."""

    G: Tensor
    A: Tensor


def projected_second_moment(rows: Tensor | Iterable[Tensor], v: Tensor) -> Tensor:
    """E[(δ·v)²] over rows (M, d), or over a stream of such; one number, or one for each column of v.

    >>> rows = torch.tensor([[3.0, 1e-12], [4.0, -1e-12]], dtype=torch.float64)
    >>> projected_second_moment(rows, torch.tensor([0.0, 1.0])).item()
    1e-24
    """
    total, count = torch.zeros(v.shape[1:], dtype=torch.float64, device=v.device), 0
    for part in [rows] if isinstance(rows, Tensor) else rows:
        total = total + _sum_of_squares(part, v)
        count += len(part)
    if not count:
        raise GeometryError("there are no rows to project: give at least one", setting="rows", given=0)
    return total / count


def project_gradients(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    directions: Mapping[str, Direction],
    loss: str | Loss | OwnLoss = "cross-entropy",
    fisher: Fisher = "empirical",
    *,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Projected]:
    """E[(δ·v)²] and E[(h·u)²] of each layer with a direction, scaled as G and A of `kfac_factors` are."""
    sums = _Projections(directions)
    watch, samples = reduce_batches(
        model, batches, sums, loss_named(loss), fisher, outputs=outputs, generator=generator
    )
    missing = [name for name in directions if name not in watch.layers()]
    if missing:
        raise GeometryError(
            f"no gradient was seen at layer {missing[0]}",
            setting="directions",
            given=missing[0],
            remedy="kfac_factors lists the layers that a model has",
        )
    return {name: sums.projected(name, samples) for name in directions}


def schur_complement(matrix: Tensor, direction: int | Tensor) -> Tensor:
    """G_dd - bᵀ C⁻¹ b of a coordinate, or of a unit vector, in a symmetric positive matrix.

    >>> schur_complement(torch.tensor([[2.0, 1.0], [1.0, 4.0]]), 0).item()
    1.75
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise GeometryError(
            f"a Schur complement in a matrix {tuple(matrix.shape)}: give a square one",
            setting="matrix",
            given=tuple(matrix.shape),
        )
    if isinstance(direction, Tensor):
        matrix, direction = _turned_to_front(matrix, direction), 0
    size = len(matrix)
    if not -size <= direction < size:
        raise GeometryError(
            f"coordinate {direction} of a matrix of {size} rows: count from 0",
            setting="direction",
            given=direction,
        )
    others = torch.arange(size, device=matrix.device) != direction % size
    C, b = matrix[others][:, others], matrix[others, direction]
    L, failed = torch.linalg.cholesky_ex(C)
    if failed:
        raise GeometryError(
            "the other rows and columns are not positive definite, so more than one direction is dead",
            setting="matrix",
            remedy="project each by itself",
        )
    explained = torch.linalg.solve_triangular(L, b[:, None], upper=False).square().sum()
    return matrix[direction, direction] - explained


def bottom_direction(factors: LayerFactors) -> Direction:
    """The bottom eigenvectors v of G and u of A: v uᵀ is the flattest increment of the layer's weights."""
    v, u = (torch.linalg.eigh(factor).eigenvectors[:, 0] for factor in (factors.G, factors.A))
    return Direction(v, u)


class _Projections:
    """Sums of (h·u)² and (δ·v)²."""

    def __init__(self, directions: Mapping[str, Direction]) -> None:
        self._directions = directions
        self._A: dict[str, Tensor] = {}
        self._G: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        if layer not in self._directions:
            return "no direction was given"
        direction = self._directions[layer]
        given = (direction.u.shape[0], direction.v.shape[0])
        if given != sides:
            raise GeometryError(
                f"layer {layer} has {sides[0]} inputs and {sides[1]} outputs, "
                f"its direction u has {given[0]} numbers and v {given[1]}",
                setting="directions",
                given=layer,
            )
        return None

    def see_inputs(self, layer: str, call: Call) -> None:
        rows = call.inputs(call.source.detach())
        self._rows[layer] = self._rows.get(layer, 0) + len(rows)
        self._A[layer] = self._A.get(layer, 0) + _sum_of_squares(rows, self._directions[layer].u)

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self._G[layer] = self._G.get(layer, 0) + _sum_of_squares(rows, self._directions[layer].v)

    def projected(self, layer: str, samples: int) -> Projected:
        return Projected(self._G[layer] / samples, self._A[layer] / self._rows[layer])


def _sum_of_squares(rows: Tensor, v: Tensor) -> Tensor:
    """Σ (row · v)² in float64."""
    return (rows.double() @ v.to(rows.device, torch.float64)).square().sum(0)


def _turned_to_front(matrix: Tensor, v: Tensor) -> Tensor:
    """H G H with the reflection H that takes the first coordinate to ±v."""
    if v.shape != matrix.shape[:1] or not torch.isclose(v.norm(), v.new_ones(())):
        raise GeometryError(
            f"a direction of shape {tuple(v.shape)} and norm {v.norm():.3g}: give a unit vector",
            setting="direction",
            given=tuple(v.shape),
        )
    w = v.to(matrix).clone()
    w[0] += 1.0 if w[0] >= 0 else -1.0
    H = torch.eye(len(w), dtype=matrix.dtype, device=matrix.device) - torch.outer(w, w) * (2 / (w @ w))
    return H @ matrix @ H
