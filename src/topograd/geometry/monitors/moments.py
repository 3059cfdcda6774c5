"""Mean and scatter of activations, accumulated over batches in float64.

Statement. For rows h_1..h_n (a row is one sample, or one position of one sample) with mean m,

    scatter           S = Σ (h_i - m)(h_i - m)ᵀ
    covariance        C = S / n
    second moment     M = C + m mᵀ = HᵀH / n          not centred: what σ_r(H)² / n are eigenvalues of

and two sets of rows are joined by  S = S₁ + S₂ + (n₁n₂ / n) δδᵀ,  δ = m₂ - m₁,  so that no large mean is
subtracted from a large square.

Symbols and shapes. H (n, d) with any leading shape flattened; m (d,), S (d, d). Cost: n d² in float64.
Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances".
Limits. An eigenvalue of M below `resolution` of the largest is rounding: that of float64's eigenvalues, or
of the numbers themselves where they came in a coarser type (float32: 1.4e-14, bfloat16: 6e-5). All
positions count, padding too. The device must have float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from topograd.errors import GeometryError
from topograd.geometry.gram_sums import gram

RESOLUTION = 1e-14
"""Of the largest eigenvalue: what `eigvalsh` can tell from zero in float64, for few columns."""


class Moments:
    """n, m and S of all rows so far."""

    def __init__(self, name: str = "the activations") -> None:
        self.name = name
        self.count = 0
        self.mean = torch.empty(0)
        self.scatter = torch.empty(0)
        self._coarsest = torch.finfo(torch.float64).eps

    def add(self, values: Tensor) -> None:
        """Take rows (..., d)."""
        rows = values.detach().reshape(-1, values.shape[-1])
        if not len(rows):
            return
        if self.count and rows.shape[1] != len(self.mean):
            raise GeometryError(
                f"{self.name} had width {len(self.mean)} and now {rows.shape[1]}",
                setting="values",
                given=rows.shape[1],
                allowed=f"of width {len(self.mean)}",
            )
        self._coarsest = max(self._coarsest, torch.finfo(rows.dtype).eps)
        rows = rows.double()
        mean = rows.mean(0)
        if not mean.isfinite().all():
            raise GeometryError(
                f"{self.name} is not finite",
                setting="values",
                given=self.name,
                remedy="look for the first layer that overflows",
            )
        rows = rows - mean
        self._join(len(rows), mean, gram(rows))

    def joined(self, other: Moments) -> Moments:
        """The moments of the rows of both."""
        both = Moments(self.name)
        for part in (self, other):
            if part.count:
                both._join(part.count, part.mean, part.scatter.clone())
                both._coarsest = max(both._coarsest, part._coarsest)
        return both

    def _join(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        if self.count:
            delta = mean - self.mean
            total = self.count + count
            self.mean = self.mean + delta * (count / total)
            self.scatter += scatter
            self.scatter.addr_(delta, delta, alpha=self.count * count / total)
        else:
            self.mean, self.scatter = mean, scatter
        self.count += count

    @property
    def covariance(self) -> Tensor:
        """C (d, d)."""
        if not self.count:
            raise GeometryError(
                f"{self.name} has no samples",
                setting="count",
                given=0,
                remedy="run the model on some while it is monitored",
            )
        return self.scatter / self.count

    @property
    def second_moment(self) -> Tensor:
        """M = HᵀH / n (d, d)."""
        return self.covariance + torch.outer(self.mean, self.mean)

    @property
    def resolution(self) -> float:
        """The share of the largest eigenvalue below which an eigenvalue is rounding."""
        rounding = len(self.mean) * torch.finfo(torch.float64).eps
        return max(RESOLUTION, rounding, self._coarsest**2)

    def singular_values(self) -> Tensor:
        """σ(H) / √n (d,), largest first; those that are rounding are 0."""
        values = torch.linalg.eigvalsh(self.second_moment).flip(0)
        return torch.where(values > self.resolution * values[0], values, 0.0).sqrt()


def hidden_of(output: Any, name: str) -> Tensor:
    """The hidden states of a layer's output: itself, the first of a tuple, or `last_hidden_state`."""
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state", next(iter(output.values()), None))
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2:
        kind = type(output).__name__
        raise GeometryError(
            f"{name} gives a {kind}", setting="layers", given=kind, allowed="layers that give rows of floats"
        )
    return output
