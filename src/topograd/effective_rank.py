"""Effective rank of a spectrum.

Statement.    r_eff = exp(-Σ p_i log p_i),   p = σ / Σ σ,   between 1 and d; 0 for a spectrum of zeros.

Symbols and shapes. σ (..., d): singular values of activations, or eigenvalues of a factor; say which, since
squares give a smaller number. Cost: O(d) from a spectrum.
Source: Roy and Vetterli, "The effective rank: a measure of effective dimensionality". In "Dead Directions:
Geometric Singular Learning" §12.1 the effective rank is a static reading: it means the same in every phase.
Limits. It does not tell a small direction from a dead one: a thousand tiny values weigh as much as a large
one.
"""

import torch
from torch import Tensor

from topograd.errors import GeometryError


def effective_rank(spectrum: Tensor) -> Tensor:
    """r_eff over the last dimension of singular values or eigenvalues, none below 0.

    >>> effective_rank(torch.tensor([[1.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
    [2.0, 1.0, 0.0]
    """
    if not (spectrum >= 0).all():
        worst = spectrum.min().item()
        raise GeometryError(setting="spectrum", given=worst, allowed="at least 0 in every entry")
    total = spectrum.sum(-1, keepdim=True)
    share = spectrum / torch.where(total > 0, total, 1.0)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0.0)
