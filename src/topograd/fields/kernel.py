"""Tangent kernels by layer, from fields and without a Jacobian.

Statement. With r = Y - y and loss mean(r²) over M examples,

    K = Σ_l K^{[l]},   K^{[l]} = Q^{(l-1)} ∘ S^{(l)}                exact
    K_αβ = ⟨∂Y^α/∂W, ∂Y^β/∂W⟩, and K^{[l]} the same for W_l         exact: the empirical tangent kernel
    Δr = -(2η/M) K r                                                first order: error O(η²) between crossings

K between two sets of examples is rectangular: Q and S then pair the fields of one set with those of the
other, and an unseen output moves by ΔY = -(2η/M) K_{unseen,train} r, to the same order.

Symbols and shapes. K^{[l]} (rows, columns), stacked (L, rows, columns); N = N_L in both factors, so widths
may differ. Cost: the state, and two Gram products a layer: 2 L (M N² + M² N) multiply-adds, and L M² +
4 L M N numbers in memory; a contraction of Jacobians takes L M² N² multiply-adds and L M N² numbers.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), equations
171-175 (which it infers from L = 1..4; it follows at any L from the gradient of `field_state.py`). The
tangent kernel is that of "Neural Tangent Kernel: Convergence and Generalization in Neural Networks"
(A. Jacot, F. Gabriel, C. Hongler). The obvious version is `tests.oracles.ntk`.
Limits. Only one number an example is read out, by the mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import FieldError
from topograd.fields.field_state import State, state_of
from topograd.fields.network import Network


@dataclass(frozen=True)
class Kernel:
    """K with its parts."""

    total: Tensor
    """K (rows, columns)."""
    layers: Tensor
    """K^{[l]} (L, rows, columns), the first layer first."""

    def drift(self, residual: Tensor, eta: float) -> Tensor:
        """-(2η/M) K^{[l]} r, (L, rows): what each layer adds to the outputs in one step, to first order."""
        M = self.total.shape[1]
        if residual.shape != (M,):
            shape = tuple(residual.shape)
            raise FieldError(setting="residual", given=shape, allowed=f"({M},), as K has columns")
        return -(2 * eta / M) * (self.layers @ residual)


def kernel(network: Network, inputs: Tensor, others: Tensor | None = None) -> Kernel:
    """K of inputs (M, N_0) with themselves, or as rows with `others` (M', N_0) as columns.

    >>> K = kernel([torch.eye(2), torch.eye(2)], torch.tensor([[1.0, 2.0], [1.0, -1.0]]))
    >>> K.layers.tolist()
    [[[2.5, -0.25], [-0.25, 0.5]], [[2.5, 0.25], [0.25, 0.25]]]
    >>> K.total.tolist()
    [[5.0, 0.0], [0.0, 0.75]]
    """
    state = state_of(network, inputs)
    return kernel_of(state, state if others is None else state_of(network, others))


def kernel_of(rows: State, columns: State) -> Kernel:
    """K between the examples of two states of one network."""
    L, N = rows.depth, rows.N
    shape = (L, rows.v[1].shape[0], columns.v[1].shape[0])
    layers = rows.v[1].new_empty(shape)
    for layer in range(1, L + 1):
        part = layers[layer - 1]
        torch.mm(rows.u[layer - 1], columns.u[layer - 1].T, out=part)
        part.mul_(rows.z[layer] @ columns.z[layer].T).div_(N**2)
    return Kernel(layers.sum(0), layers)
