"""Pullback metrics and backward transport of changes of the conjugate fields, without operators.

Statement. For examples α, β and 1 ≤ l ≤ L-1, with the masks and weights of one moment,

    D_l^{αβ} = diag(a_{l+1}^α ∘ a_{l+1}^β)                                      neurons active for both
    P_l^{αβ}[X] = W_{l+1}ᵀ diag(a_{l+1}^α) X diag(a_{l+1}^β) W_{l+1}            pullback of an operator
    G_l^{αβ} = P_l^{αβ}[I] = W_{l+1}ᵀ D_l^{αβ} W_{l+1}                          pullback metric
    M_l^{αβ} = S^{(l+1)}_{αβ} I + P_l^{αβ}[M_{l+1}^{αβ}],  M_{L-1}^{αβ} = S^{(L)}_{αβ} I
    Δb_l^α = -(2η/M) Σ_β M_l^{αβ} u_l^β r^β                                     first order, at fixed masks

D is symmetric, positive semidefinite and idempotent; G is symmetric and positive semidefinite. Of M the paper
says neither. Derived here: (M_l^{αβ})ᵀ = M_l^{βα}, and the operator on all examples together, with M_l^{αβ}
as its blocks, is positive semidefinite; a single block with α ≠ β need not be, since S_{αβ} may be negative,
and from L - l = 3 on it need not be symmetric.

No M_l is formed. Over all examples at once, M_l x is

    (M_l x)^α = Σ_β S^{(l+1)}_{αβ} x^β + W_{l+1}ᵀ (a_{l+1}^α ∘ (M_{l+1} y)^α),   y^β = a_{l+1}^β ∘ W_{l+1} x^β

up and down again; for x = r u_l the way up is known, y = r u_{l+1}, and one way down gives Δb of all layers.

Symbols and shapes. Pairs (α, β) are row numbers; an operator maps (..., N_l) to (..., N_l). Rows beyond the M
training examples are unseen inputs: they have no residual, and their fields are moved by the others.
Cost: Δb of all layers, L (M² N + M N²) multiply-adds and O(L M N) numbers; as matrices M_l takes M² N².

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), equations
164-170, 184-188. Its section 5 writes D_2 for what equation 164 calls D_1; we follow 164. The obvious version
is `tests.oracles.fields`.
Limits. Nothing here sees a mask crossing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from papers.gram_metrics.field_state import Fields, State
from papers.gram_metrics.network import FieldError, Network, weights_of

Operator = Callable[[Tensor], Tensor]
Pair = tuple[int, int]
"""(α, β), as row numbers."""


def pullback(network: Network, state: State, layer: int, pair: Pair, X: Operator) -> Operator:
    """P_l^{αβ}[X], for X on layer l + 1."""
    _check_layer(state, layer)
    W, a = weights_of(network)[layer], state.a[layer + 1]
    alpha, beta = pair
    return lambda x: (a[alpha] * X(a[beta] * (x @ W.T))) @ W


def metric(network: Network, state: State, layer: int, pair: Pair) -> Operator:
    """G_l^{αβ}; `metric(...)(torch.eye(N_l))` is its matrix."""
    return pullback(network, state, layer, pair, X=lambda x: x)


def conjugate_change(network: Network, state: State, residual: Tensor, eta: float) -> Fields:
    """Δb_l (rows, N_l) for l = 1..L, to first order at fixed masks; Δb_L is zero."""
    M = check_residual(state, residual)
    driven = {layer: residual[:, None] * state.u[layer][:M] for layer in range(1, state.depth)}
    changes = _descend(weights_of(network), state, driven) if driven else {}
    scaled = {layer: -(2 * eta / M) * change for layer, change in changes.items()}
    return {**scaled, state.depth: torch.zeros_like(state.b[state.depth])}


def materialised_numbers(state: State) -> int:
    """How many numbers M_1, ..., M_{L-1} are as matrices, for all pairs of rows."""
    rows = state.v[1].shape[0]
    return sum((rows * state.v[layer].shape[1]) ** 2 for layer in range(1, state.depth))


def check_residual(state: State, residual: Tensor) -> int:
    """M, after a look at the residual's shape."""
    rows = state.v[1].shape[0]
    if residual.dim() != 1 or not 1 <= residual.shape[0] <= rows:
        raise FieldError(
            setting="residual", given=tuple(residual.shape), allowed=f"(M,), M from 1 to {rows} rows"
        )
    return residual.shape[0]


def _descend(weights: tuple[Tensor, ...], state: State, driven: Fields) -> Fields:
    """Σ_β M_l^{αβ} x_l^β for every l in `driven`, which goes up to L - 1 and has x_{l+1} = a ∘ W x_l."""
    result: Fields = {}
    for layer in sorted(driven, reverse=True):
        z, M = state.z[layer + 1], driven[layer].shape[0]
        local = (z @ z[:M].T / state.N) @ driven[layer]
        above = result.get(layer + 1)
        result[layer] = local if above is None else local + (state.a[layer + 1] * above) @ weights[layer]
    return result


def _check_layer(state: State, layer: int) -> None:
    if not 1 <= layer < state.depth:
        last = state.depth - 1
        allowed = f"from 1 to L-1 = {last}" if last else "one of several: one hidden layer has no transport"
        raise FieldError(setting="layer", given=layer, allowed=allowed)
