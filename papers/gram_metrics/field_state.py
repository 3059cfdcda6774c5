"""Activation and conjugate fields of a network on a set of examples, and their overlaps.

Statement. For every example, with b_L = 1 and ⟨x y⟩ = (1/N) Σ_i x_i y_i,

    v_l = W_l u_{l-1},   u_l = max(v_l, 0),   a_l = [v_l > 0]           forward
    b_l = W_{l+1}ᵀ (a_{l+1} ∘ b_{l+1}),   z_l = a_l ∘ b_l               backward: b_l = N ∂Y/∂u_l
    Q^{(l)}_{αβ} = ⟨u_l^α u_l^β⟩,   S^{(l)}_{αβ} = ⟨z_l^α z_l^β⟩,   A^{(l)}_{αβ} = ⟨a_l^α a_l^β⟩
    J^{(l)} = Q^{(l-1)} ∘ A^{(l)}                                       collective kernel of one layer

All of it is exact: definitions, and one identity, ∂L/∂W_l = 2/(M N) Σ_β r^β z_l^β (u_{l-1}^β)ᵀ.
For one hidden layer J^{(1)} is the whole kernel K; S^{(L)} = A^{(L)} at any depth.

Symbols and shapes. Fields are (rows, N_l) and have the paper's layer numbers as keys: u[0..L]; v, a, b, z
[1..L]. Rows are examples; where training and unseen inputs stand together, the training rows come first.
N = N_L in every average, also where N_l differs: then K is the tangent kernel for unequal widths as well. The
paper has one width for all layers.
Cost: one forward and one backward of the network, 2 L M N² multiply-adds; 4 L M N numbers are kept.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), section 2
and equations 51, 52, 156, 157, 176.
Limits. a_l = 0 where v_l = 0, as in torch's derivative of the ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from papers.gram_metrics.network import FieldError, Network, check_inputs, weights_of

Fields = dict[int, Tensor]
Product = Callable[[int, Tensor], Tensor]
"""(l, x) to W_l x or W_lᵀ x, for each row of x."""


@dataclass(frozen=True)
class State:
    """u, v, a, b, z on some rows, by layer number."""

    u: Fields
    v: Fields
    a: Fields
    b: Fields
    z: Fields

    @property
    def depth(self) -> int:
        """L."""
        return len(self.v)

    @property
    def N(self) -> int:
        """The width under the readout."""
        return self.v[self.depth].shape[1]

    @property
    def Y(self) -> Tensor:
        """(rows,): the outputs."""
        return self.u[self.depth].mean(-1)

    def Q(self, layer: int) -> Tensor:
        """⟨u_l u_l⟩ (rows, rows), l = 0..L."""
        return self._overlap(self._of(self.u, layer))

    def S(self, layer: int) -> Tensor:
        """⟨z_l z_l⟩ (rows, rows), l = 1..L."""
        return self._overlap(self._of(self.z, layer))

    def A(self, layer: int) -> Tensor:
        """⟨a_l a_l⟩ (rows, rows), l = 1..L."""
        return self._overlap(self._of(self.a, layer).to(self.v[1].dtype))

    def J(self, layer: int = 1) -> Tensor:
        """Q^{(l-1)} ∘ A^{(l)} (rows, rows), l = 1..L."""
        return self.A(layer) * self.Q(layer - 1)

    def rows(self, which: slice) -> State:
        """The same fields on some of the rows."""
        parts = (self.u, self.v, self.a, self.b, self.z)
        return State(*({layer: x[which] for layer, x in part.items()} for part in parts))

    def _overlap(self, x: Tensor) -> Tensor:
        return x @ x.T / self.N

    def _of(self, part: Fields, layer: int) -> Tensor:
        if layer not in part:
            raise FieldError(setting="layer", given=layer, allowed=f"from {min(part)} to {max(part)}")
        return part[layer]


def state_of(network: Network, inputs: Tensor) -> State:
    """Every field of a network on inputs (rows, N_0).

    >>> state = state_of([torch.tensor([[1.0, 0.0], [0.0, -1.0]])], torch.tensor([[2.0, 4.0]]))
    >>> state.v[1].tolist(), state.u[1].tolist(), state.Y.tolist(), state.J().tolist()
    ([[2.0, -4.0]], [[2.0, 0.0]], [1.0], [[5.0]])
    """
    weights = weights_of(network)
    check_inputs(weights, inputs)
    return run(
        inputs,
        len(weights),
        push=lambda layer, x: x @ weights[layer - 1].T,
        pull=lambda layer, z: z @ weights[layer - 1],
    )


def run(inputs: Tensor, depth: int, push: Product, pull: Product) -> State:
    """The fields, given the products W_l x and W_lᵀ z in whatever way they are formed."""
    u, v, a = {0: inputs.detach()}, {}, {}
    for layer in range(1, depth + 1):
        v[layer] = push(layer, u[layer - 1])
        u[layer], a[layer] = v[layer].clamp(min=0), v[layer] > 0
    b = {depth: torch.ones_like(v[depth])}
    z = {depth: a[depth] * b[depth]}
    for layer in range(depth - 1, 0, -1):
        b[layer] = pull(layer + 1, z[layer + 1])
        z[layer] = a[layer] * b[layer]
    return State(u, v, a, b, z)
