"""K-FAC factors of a chain, one sample and one Jacobian at a time.

Statement. A_{l-1} = E[h_{l-1} h_{l-1}ᵀ] and, for squared error with unit label noise, G_l = E[J_lᵀ J_l] with
J_l = ∂f/∂z_l. Cost: a dense Jacobian for each layer and sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def factors_of_chain(
    weights: Sequence[Tensor], inputs: Tensor, activate: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """A_0 … A_{L-1} and G_1 … G_L, dense, of the chain z_l = W_l h_{l-1}, h_l = σ(z_l), f = z_L."""

    def onward(layer: int, z: Tensor) -> Tensor:
        for weight in weights[layer:]:
            z = weight @ activate(z)
        return z

    A = [torch.zeros(w.shape[1], w.shape[1], dtype=w.dtype) for w in weights]
    G = [torch.zeros(w.shape[0], w.shape[0], dtype=w.dtype) for w in weights]
    for h in inputs:
        for layer, weight in enumerate(weights, 1):
            A[layer - 1] += torch.outer(h, h) / len(inputs)
            z = weight @ h
            J = torch.func.jacrev(lambda z, layer=layer: onward(layer, z))(z)
            G[layer - 1] += J.T @ J / len(inputs)
            h = activate(z)
    return A, G
