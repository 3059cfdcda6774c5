"""Sketches of wide K-FAC factors, and the flattest direction of any factor.

Statement. Of a factor M = (1/n) Σ h hᵀ of side d above `WIDEST` only a sketch is stored,

    Y = M Ω,  Ω (d, r) orthonormal columns at random,  and the trace,

from which the Nyström approximation M ≈ Y (ΩᵀY)⁻¹ Yᵀ gives the leading eigenvalues and eigenvectors. Its
flattest direction is then a random one orthogonal to those r: not the bottom, but outside of everything that
leads; the Fisher along it is read afterwards and is exact.

The bottom of a factor that is formed comes from inverse iteration,  x ← (M + ε λ_max 1)⁻¹ x,  a Cholesky
factor and `TURNS` solves: a third of the work of all eigenvectors.

Symbols and shapes. M (d, d), Y (d, r). Cost: 2 n d r multiply-adds and memory d r; the bottom O(d³/3).
Source: Halko, Martinsson and Tropp, "Finding structure with randomness"; Tropp, Yurtsever, Udell and Cevher,
"Fixed-rank approximation of a positive-semidefinite matrix from streaming data" (the shift by ν).
Limits. Eigenvalues of a sketch are at most those of M, and close for the leading ones if they fall off.
Where several directions are equally flat, the bottom is one of them by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.geometry.factors import GramSums, gram
from topograd.geometry.layers import Call

WIDEST = 4096
"""The widest factor that is formed."""
RANK = 64
TURNS = 16
SHIFT = 1e-12
"""ε of the inverse iteration."""


@dataclass(frozen=True)
class Sketched:
    """The leading eigenpairs of a factor of side d, largest first, and its trace."""

    values: Tensor
    vectors: Tensor
    trace: float


class Sketch:
    """Σ h (hᵀΩ) and Σ |h|² of rows h (d)."""

    def __init__(self, size: int, like: Tensor) -> None:
        generator = torch.Generator().manual_seed(size)
        draw = torch.randn(size, min(RANK, size), generator=generator, dtype=torch.float64)
        self._omega = torch.linalg.qr(draw.to(like.device)).Q
        self._sum = torch.zeros_like(self._omega)
        self._squares = 0.0

    def add(self, rows: Tensor) -> None:
        """Take rows (n, d)."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        self._sum += (rows.mT @ (rows @ self._omega.to(rows.dtype))).double()
        self._squares += float(rows.double().square().sum())

    def factor(self, count: int) -> Sketched:
        """The eigenpairs of the mean over `count` rows."""
        Y = self._sum / count
        shift = torch.finfo(Y.dtype).eps * torch.linalg.matrix_norm(Y)
        Y = Y + shift * self._omega
        core = self._omega.mT @ Y
        L, failed = torch.linalg.cholesky_ex((core + core.mT) / 2)
        if failed:
            values, vectors = torch.linalg.eigh((core + core.mT) / 2)
            B = Y @ vectors / values.clamp_min(float(shift) + 1e-300).sqrt()
        else:
            B = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
        U, s, _ = torch.linalg.svd(B, full_matrices=False)
        return Sketched((s.square() - shift).clamp(min=0), U, self._squares / count)


class FactorSums(GramSums):
    """A reducer that sums A and G of every layer: formed in float64 up to `WIDEST`, sketched beyond.

    Rows of a float32 model are multiplied in float64 too: else a few massive rows would round away the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sketched: dict[tuple[str, str], Sketch] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None

    def see_inputs(self, layer: str, call: Call) -> None:
        if call.sides[0] <= WIDEST:
            super().see_inputs(layer, call)
            return
        rows = call.inputs(call.source.detach())
        self.rows[layer] = self.rows.get(layer, 0) + len(rows)
        self._sketch(layer, "A", rows)

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        if rows.shape[1] <= WIDEST:
            super().see_gradients(layer, rows)
        else:
            self._sketch(layer, "G", rows)

    def product(self, rows: Tensor) -> Tensor:
        return gram(rows.double())

    def _sketch(self, layer: str, side: str, rows: Tensor) -> None:
        if (layer, side) not in self._sketched:
            self._sketched[layer, side] = Sketch(rows.shape[1], rows)
        self._sketched[layer, side].add(rows)

    def factor(self, layer: str, side: str, terms: int) -> Tensor | Sketched | None:
        """The mean, or the sketch of one that is too wide."""
        if (layer, side) in self._sketched:
            return self._sketched[layer, side].factor(self.rows[layer] if side == "A" else terms)
        return self.mean(layer, side, terms)


def flattest(factor: Tensor | Sketched, apart: Tensor | None = None) -> Tensor:
    """A unit vector (d,) at the bottom of a factor, or outside of what leads in a sketch.

    With `apart`, a unit vector, the flattest that is orthogonal to it.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(factor, Sketched):
        x = torch.randn(len(factor.vectors), generator=generator, dtype=torch.float64).to(factor.vectors)
        for _ in range(2):
            x = x - factor.vectors @ (factor.vectors.mT @ x)
            x = x if apart is None else x - apart * (apart @ x)
        return x / x.norm()
    if apart is not None:  # lifted above everything else
        factor = factor + 2 * factor.trace() * torch.outer(apart, apart)
    size = len(factor)
    x = torch.randn(size, 1, generator=generator, dtype=torch.float64).to(factor)
    scale = float(factor.diagonal().max())
    if scale == 0:
        return (x / x.norm())[:, 0]
    shift = SHIFT * scale * size
    for _ in range(3):  # a matrix with rounding below zero needs more
        L, failed = torch.linalg.cholesky_ex(factor + shift * torch.eye(size).to(factor))
        if not failed:
            break
        shift *= 1e3
    for _ in range(TURNS):
        x = torch.cholesky_solve(x, L)
        x = x / x.norm()
    return x[:, 0]
