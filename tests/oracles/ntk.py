"""The empirical neural tangent kernel of Y = mean(u_L), by whole Jacobians. The slow, obvious version.

    K_αβ = Σ_l ⟨∂Y^α/∂W_l, ∂Y^β/∂W_l⟩          the gradient of one output by all weights, for every example

W_l (N_l, N_{l-1}), inputs (M, N_0), Jacobians (M, N_l, N_{l-1}). Cost: M · parameters numbers in memory, and
M² · parameters multiply-adds. This is the contraction that the documentation of `torch.func` shows.
Source: "Neural Tangent Kernel: Convergence and Generalization in Neural Networks" (A. Jacot, F. Gabriel,
C. Hongler). The fast version is in `fields/kernel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import jacrev, vmap


def output(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """Y = mean(u_L) of inputs (..., N_0)."""
    u = inputs
    for W in weights:
        u = torch.relu(u @ W.T)
    return u.mean(-1)


def jacobians(weights: Sequence[Tensor], inputs: Tensor) -> tuple[Tensor, ...]:
    """∂Y^α/∂W_l (M, N_l, N_{l-1}) for every layer."""
    return vmap(jacrev(output), (None, 0))(tuple(W.detach() for W in weights), inputs)


def empirical_ntk(
    weights: Sequence[Tensor], inputs: Tensor, others: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The part of each layer, (M, M); with `others`, (M, M')."""
    left = jacobians(weights, inputs)
    right = left if others is None else jacobians(weights, others)
    return tuple(J.flatten(1) @ H.flatten(1).T for J, H in zip(left, right, strict=True))
