"""History form of gradient descent: runs at any depth without new weights.

Statement. Exact for any step η, through mask crossings, for training and unseen rows alike. With W_l(0) the
weights at the start and sums over past steps s < t and training examples β,

    v_l(t) = W_l(0) u_{l-1}(t) - (2η/(M N)) Σ_s Σ_β r^β(s) z_l^β(s) ⟨u_{l-1}^β(s), u_{l-1}(t)⟩
    b_{l-1}(t) = W_l(0)ᵀ z_l(t) - (2η/(M N)) Σ_s Σ_β r^β(s) u_{l-1}^β(s) ⟨z_l^β(s), z_l(t)⟩

with plain inner products ⟨·,·⟩: the step of W_l is a sum of M outer products, and so is W_l(t) - W_l(0).
Layer 1 needs no history, since u_0 stands still: with Q^{(0)} between all rows and the training rows,

    v_1(t+1) = v_1(t) - (2η/M) Q^{(0)} (r(t) ∘ z_1(t))

For one hidden layer, where z_1 = a_1, this is all: training runs in v alone, and no weight occurs (`hidden`).
An unseen input is one more row of v.

Symbols and shapes. Rows (training first, then unseen), M training rows, fields (rows, N_l). t = 0..T.
Cost: step t takes 4 t M · rows · N multiply-adds a layer, so a run of T steps takes O(L T² M · rows · N), and
the history holds T M (N_{l-1} + N_l) numbers for each layer l ≥ 2. With weights a step takes 3 M N² and
nothing is remembered: once T M exceeds about N, weights are cheaper. For one hidden layer a step takes
rows · M · N.

Source. Layer 1: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio),
equation 47 (its form in u, equation 50, loses how far below zero an inactive neuron is, and so holds only
between crossings). At any depth it is derived here from the gradient; for a single linear layer the dual form
is old, see "The Dual Form of Neural Networks Revisited" (K. Irie, R. Csordás, J. Schmidhuber).
Limits. Rounding adds up over the history in another order than in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from papers.gram_metrics.field_state import State, run
from papers.gram_metrics.network import FieldError, Network, check_inputs, check_same_kind, weights_of


def hidden(v: Tensor, overlaps: Tensor, targets: Tensor, eta: float, steps: int) -> Iterator[Tensor]:
    """v (rows, N) of one hidden layer at t = 0..steps, from v(0) and Q^{(0)} (rows, M) alone.

    >>> [v.tolist() for v in hidden(torch.tensor([[1.0], [-1.0]]), torch.eye(2), torch.zeros(2), 0.5, 1)]
    [[[1.0], [-1.0]], [[0.5], [-1.0]]]
    """
    M = targets.shape[0]
    for _ in range(steps):
        yield v
        r = v[:M].clamp(min=0).mean(-1) - targets
        v = v - (2 * eta / M) * overlaps @ (r[:, None] * (v[:M] > 0))
    yield v


def evolve(
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    *,
    eta: float,
    steps: int,
    unseen: Tensor | None = None,
) -> Iterator[State]:
    """The state at t = 0..steps on the rows of `inputs`, then those of `unseen`."""
    weights = weights_of(network)
    rows, M = check_problem(weights, inputs, targets, unseen), inputs.shape[0]
    past = _Past(weights, rows, M, eta, steps)
    for t in range(steps + 1):
        state = run(rows, len(weights), past.push, past.pull)
        yield state
        if t < steps:
            past.add(state, state.Y[:M] - targets)


def check_problem(
    weights: Sequence[Tensor], inputs: Tensor, targets: Tensor, unseen: Tensor | None = None
) -> Tensor:
    """All rows, training inputs and then unseen ones, after a look at every shape."""
    check_inputs(weights, inputs)
    M = inputs.shape[0]
    if targets.shape != (M,):
        shape = tuple(targets.shape)
        raise FieldError(setting="targets", given=shape, allowed=f"({M},): Y is one number an example")
    check_same_kind("targets", targets, inputs)
    if unseen is None:
        return inputs
    check_inputs(weights, unseen, "unseen")
    return torch.cat([inputs, unseen])


class _Past:
    """W_l(0), the fields of past steps, and the products with W_l(t) that follow from them."""

    def __init__(self, weights: tuple[Tensor, ...], rows: Tensor, M: int, eta: float, steps: int) -> None:
        self.weights, self.M, self.filled = weights, M, 0
        self.scale = 2 * eta / (M * weights[-1].shape[0])
        self.v = rows @ weights[0].T
        self.overlaps = self.scale * (rows @ rows[:M].T)
        layers = range(2, len(weights) + 1)
        self.u = {layer: rows.new_empty(steps * M, weights[layer - 1].shape[1]) for layer in layers}
        self.rz = {layer: rows.new_empty(steps * M, weights[layer - 1].shape[0]) for layer in layers}

    def push(self, layer: int, x: Tensor) -> Tensor:
        """W_l(t) x; for layer 1, x is u_0."""
        if layer == 1:
            return self.v
        u, rz = self.u[layer][: self.filled], self.rz[layer][: self.filled]
        return x @ self.weights[layer - 1].T - self.scale * (x @ u.T) @ rz

    def pull(self, layer: int, z: Tensor) -> Tensor:
        """W_l(t)ᵀ z, l ≥ 2."""
        u, rz = self.u[layer][: self.filled], self.rz[layer][: self.filled]
        return z @ self.weights[layer - 1] - self.scale * (z @ rz.T) @ u

    def add(self, state: State, residual: Tensor) -> None:
        """One more step, from the fields before it."""
        M, r = self.M, residual[:, None]
        here = slice(self.filled, self.filled + M)
        for layer in self.u:
            self.u[layer][here] = state.u[layer - 1][:M]
            self.rz[layer][here] = r * state.z[layer][:M]
        self.v = self.v - self.overlaps @ (r * state.z[1][:M])
        self.filled += M
