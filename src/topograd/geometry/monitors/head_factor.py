"""The gradient factor of a head: its spectrum without the softmax direction, and its anisotropy.

a(G) = λ_max(G) / λ_min(G) is over the directions that are no symmetry: a softmax loss has Σ_c δ_c = 0, so
that G1 = 0 for every weight, and this direction is projected out first. The classes of a head of more than
`MAX_CLASSES` are added up, with random signs, in `MIXTURES` neighbouring blocks: old and new ones stay apart.

Source: "Dead Directions: Geometric Singular Learning", Algorithm 1.
Limits. Eigenvalues below `moments.RESOLUTION` of the largest are rounding, so a(G) is at most its inverse.
"""

import math

import torch
from torch import Tensor

from topograd.errors import GeometryError
from topograd.geometry.monitors.moments import RESOLUTION

MAX_CLASSES = 256
MIXTURES = 64
"""Blocks of classes of a head with more than MAX_CLASSES."""
RIDGE = 1e-9
"""Of the mean eigenvalue, added to all."""


def head_spectrum(rows: Tensor) -> Tensor | None:
    """Eigenvalues of the factor of gradients (rows, classes), smallest first; None where it has none."""
    classes = rows.shape[1]
    if classes < 3 or not rows.any():
        return None
    rows = rows.double()
    if classes > MAX_CLASSES:  # signed sums of classes have no softmax direction
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (classes,), generator=generator).to(rows) * 2 - 1
        blocks = (torch.arange(classes) * MIXTURES // classes).to(rows.device)
        rows = rows.new_zeros(len(rows), MIXTURES).index_add_(1, blocks, rows * signs)
    factor = rows.mT @ rows / len(rows)
    ridge = RIDGE * factor.diagonal().mean() * torch.eye(len(factor), dtype=factor.dtype).to(factor)
    return _spectrum(factor + ridge, softmax=classes <= MAX_CLASSES).cpu()


def anisotropy(factor: Tensor, *, softmax: bool) -> float:
    """λ_max / λ_min of a symmetric factor, without the 1-direction if it is a softmax head's.

    >>> anisotropy(torch.diag(torch.tensor([1.0, 2.0, 8.0])), softmax=False)
    8.0
    """
    size = len(factor) if factor.dim() else 0
    if factor.shape != (size, size) or size < 2 + softmax:
        shape = tuple(factor.shape)
        raise GeometryError(setting="factor", given=shape, allowed=f"a square of at least {2 + softmax}")
    factor = factor.detach().double()
    if not factor.isfinite().all():
        raise GeometryError(setting="factor", given="not finite", remedy="look at the gradients")
    values = _spectrum(factor, softmax)
    largest = float(values[-1])
    if not largest > 0:
        raise GeometryError(setting="factor", given="zero", remedy="there are no gradients to compare")
    return largest / max(float(values[0]), RESOLUTION * largest)


def _spectrum(factor: Tensor, softmax: bool) -> Tensor:
    """Eigenvalues of a symmetric factor, smallest first; of a softmax head's without the 1-direction."""
    if softmax:  # an orthonormal basis of what is orthogonal to (1, ..., 1), from a Householder reflection
        v = torch.ones(len(factor), dtype=torch.float64, device=factor.device)
        v[0] += math.sqrt(len(factor))
        basis = (torch.eye(len(factor)).to(v) - 2 * torch.outer(v, v) / (v @ v))[:, 1:]
        factor = basis.T @ factor @ basis
    return torch.linalg.eigvalsh(factor)
