"""First-order change of the fields by one step of gradient descent.

Statement. At fixed masks, for rows α and training examples β, with Δu_0 = 0 and D_l^α = diag(a_l^α),

    δu_l^α = -(2η/M) a_l^α ∘ Σ_β Q^{(l-1)}_{αβ} z_l^β r^β          by the step of W_l itself
    Δu_l^α = δu_l^α + D_l^α W_l Δu_{l-1}^α                         and by all layers below
    Δb_l^α = -(2η/M) Σ_β M_l^{αβ} u_l^β r^β                        `transport.py`
    Δr^α = mean(Δu_L^α) = -(2η/M) Σ_β K_αβ r^β                     the last equality is exact

Each is first order: against a true step the error is O(η²) as long as no mask changes, so half the step
leaves a fourth of the error. For L = 1 it is exact between crossings. Where a mask changes, Δb_l is wrong by
the weight that is switched, of order one, and Δu by what lies beyond the kink.

Symbols and shapes. Fields (rows, N_l), the M training rows first; r (M,).
Cost: 2 L (M² N + M N²) multiply-adds, O(L M N) numbers.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), equations
150-154, 171 and 184-187.
Limits. One step: W_l of that moment is needed to carry Δu and Δb through a layer, so this is no closed
dynamics of u and b, as the paper says too. For whole runs see `history.py` (exact) and `prediction.py`
(residuals only).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from papers.gram_metrics.field_state import Fields, State
from papers.gram_metrics.network import Network, weights_of
from papers.gram_metrics.transport import check_residual, conjugate_change


@dataclass(frozen=True)
class Change:
    """Δu_l, Δb_l by layer number, 1..L, each (rows, N_l)."""

    u: Fields
    b: Fields

    @property
    def Y(self) -> Tensor:
        """(rows,): the change of the outputs, which is that of the residuals."""
        return self.u[len(self.u)].mean(-1)


def first_order(network: Network, state: State, residual: Tensor, eta: float) -> Change:
    """Δu and Δb of one step of size η, from a state of this network and r (M,) on its first M rows."""
    return Change(
        activation_change(network, state, residual, eta), conjugate_change(network, state, residual, eta)
    )


def activation_change(network: Network, state: State, residual: Tensor, eta: float) -> Fields:
    """Δu_l (rows, N_l), l = 1..L."""
    weights, M = weights_of(network), check_residual(state, residual)
    changes: Fields = {}
    for layer in range(1, state.depth + 1):
        u = state.u[layer - 1]
        moved = -(2 * eta / M) * (u @ u[:M].T / state.N) @ (residual[:, None] * state.z[layer][:M])
        if layer > 1:
            moved = moved + changes[layer - 1] @ weights[layer - 1].T
        changes[layer] = state.a[layer] * moved
    return changes
