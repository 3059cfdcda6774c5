"""Sketches of wide K-FAC factors, and the flattest direction of any factor.

Statement. Of a factor M = (1/n) Σ h hᵀ of side d above `WIDEST` only a sketch is stored,

    Y = M Ω,  Ω (d, r) orthonormal columns at random,  and the trace,

from which the Nyström approximation M ≈ Y (ΩᵀY)⁻¹ Yᵀ gives the leading eigenvalues and eigenvectors. Its
flattest direction is then a random one orthogonal to those r: not the bottom, but outside of everything that
leads; the Fisher along it is read afterwards and is exact.

The bottom of a factor that is formed comes from inverse iteration,  X ← orth((M + ε λ_max 1)⁻¹ X),  a
Cholesky factor and `TURNS` solves: a third of the work of all eigenvectors.

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

from topograd.geometry.gram_sums import GramSums, HalfGram, Total

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

    def take(self, other: Sketch) -> None:
        """Add another sketch with the same Ω."""
        self._sum += other._sum
        self._squares += other._squares

    def mean(self, count: int) -> Sketched:
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
    """Sums of A and G of every layer: formed up to `WIDEST`, sketched beyond.

    Rows of a float32 model are multiplied in float64 too: else a few massive rows would round away the rest.
    """

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None

    def empty(self, rows: Tensor) -> Total:
        size = rows.shape[1]
        return HalfGram(size, rows.device, torch.float64) if size <= WIDEST else Sketch(size, rows)


def flattest(factor: Tensor | Sketched, count: int = 1) -> Tensor:
    """Orthonormal columns (d, count) at the bottom of a factor, the flattest first, or outside of a sketch.

    A factor with fewer sides has as many columns.
    """
    generator = torch.Generator().manual_seed(0)
    size = len(factor.vectors) if isinstance(factor, Sketched) else len(factor)
    x = torch.randn(size, min(count, size), generator=generator, dtype=torch.float64)
    if isinstance(factor, Sketched):
        x = x.to(factor.vectors)
        for _ in range(2):
            x = torch.linalg.qr(x - factor.vectors @ (factor.vectors.mT @ x)).Q
        return x
    x = torch.linalg.qr(x.to(factor)).Q
    scale = float(factor.diagonal().max())
    if scale == 0:
        return x
    shift = SHIFT * scale * size
    for _ in range(3):  # a matrix with rounding below zero needs more
        L, failed = torch.linalg.cholesky_ex(factor + shift * torch.eye(size).to(factor))
        if not failed:
            break
        shift *= 1e3
    for _ in range(TURNS):
        x = torch.linalg.qr(torch.cholesky_solve(x, L)).Q
    return x @ torch.linalg.eigh(x.mT @ factor @ x).eigenvectors
