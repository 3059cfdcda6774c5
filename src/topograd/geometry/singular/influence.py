"""Loss kernel and Bayesian influence: how the losses of data vary together over the draws of a posterior.

Statement. ℓ_i(w) is the loss of term i, w ~ exp(-β Σ_i ℓ_i) around a model's weights. Over the draws,

    C_ij = Cov_w(ℓ_i, ℓ_j),     kernel_ij = C_ij / √(C_ii C_jj),     influence_ij = -β C_ij.

The kernel says which data the model treats alike: weights that lose one lose the other. The influence of term
i on term j is the derivative of E_w[ℓ_j] by the weight of term i in the data: what one more copy of i does to
the loss of j, to first order. No Hessian is inverted.

Symbols and shapes. losses (draws, n), as `LearningCoefficient.losses` has them from the very chains of λ̂.
Cost: draws · n². Its memory is n² numbers: choose `terms` where n is large.
Source: Kreer, Wu, Adam, Furman and Hoogland, "Bayesian Influence Functions for Hessian-Free Data
Attribution"; Adam, Furman and Hoogland, "The Loss Kernel: A Geometric Probe for Deep Learning
Interpretability".
Limits. A covariance of S draws is off by about 1/√S of the deviations; draws of one chain follow one another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.errors import GeometryError

WIDEST = 16384
"""Terms of a kernel: 2 GiB in float64."""


def loss_kernel(losses: Tensor, terms: Sequence[int] | None = None) -> Tensor:
    """Correlations (n, n) of the terms' losses over the draws; 0 beside a term whose loss never moves.

    >>> losses = torch.tensor([[1.0, 2.0, 5.0], [2.0, 4.0, 5.0], [0.0, 0.0, 5.0]])
    >>> loss_kernel(losses)[0].round(decimals=6).tolist()
    [1.0, 1.0, 0.0]
    """
    centred = _centred(losses, terms)
    unit = centred / centred.norm(dim=0).clamp_min(torch.finfo(centred.dtype).tiny)
    return unit.mT @ unit


def bayesian_influence(
    losses: Tensor,
    beta: float,
    terms: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Tensor:
    """-β Cov (terms, queries): what one more copy of each term does to the mean loss of each query.

    β is that of the draws, `n_beta / terms` of a `LearningCoefficient`.
    """
    if not beta > 0:
        raise GeometryError(setting="beta", given=beta, allowed="above 0, as inverse temperatures are")
    of, on = _centred(losses, terms), _centred(losses, queries)
    return -beta * (of.mT @ on) / (len(losses) - 1)


def _centred(losses: Tensor, chosen: Sequence[int] | None) -> Tensor:
    """Deviations from the mean over draws, of some terms, float64."""
    if losses.dim() != 2 or len(losses) < 2:
        shape = tuple(losses.shape)
        raise GeometryError(setting="losses", given=shape, allowed="(draws, terms), 2 draws or more")
    n = losses.shape[1]
    if chosen is not None and not all(0 <= i < n for i in chosen):
        raise GeometryError(setting="terms", given=tuple(chosen), allowed=f"places from 0 to {n - 1}")
    part = losses if chosen is None else losses[:, list(chosen)]
    if part.shape[1] > WIDEST:
        raise GeometryError(
            setting="terms", given=part.shape[1], allowed=f"at most {WIDEST}", remedy="choose some of them"
        )
    part = part.detach().double()
    return part - part.mean(0)
