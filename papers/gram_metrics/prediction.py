"""Runs predicted by tangent kernels: one kernel for the whole run, or a new one at each step.

Statement. K has rows for training and then unseen inputs, and columns for training. With x = (r, Y_unseen),

    x(t+1) = x(t) - (2η/M) K(t) r(t)

    frozen          K(t) = K(0): r(t) = (I - (2η/M) K(0))^t r(0), what training would do if no field moved
    re-linearised   K(t) of the true run at t: equation 171 step after step, the field recursion at the level
                    of the residuals

Both are approximations. The re-linearised one errs by O(η²) a step between crossings, so by O(η) at a fixed
time η t. The frozen one keeps an error as η → 0. Under the mean as readout, K of order one and a residual of
order one, the fields move by an amount of order one at any width, and so this error does not shrink with
width (our measurement: `papers/gram_metrics/field_training.py`); it does where the residual shrinks. For one
hidden layer and a run without crossings both are exact.

Symbols and shapes. As in `simulation.py`: residuals (T+1, M), unseen outputs (T+1, M').
Cost: frozen, one kernel and T M (M + M') multiply-adds; re-linearised, T kernels and the exact run.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), equations
59, 60, 171; frozen kernels are those of "Neural Tangent Kernel: Convergence and Generalization in Neural
Networks" (A. Jacot, F. Gabriel, C. Hongler).
Limits. Nothing here can tell that it is wrong: compare with `simulate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch
from torch import Tensor

from papers.gram_metrics.field_state import State, state_of
from papers.gram_metrics.history import check_problem, evolve
from papers.gram_metrics.kernel import kernel_of
from papers.gram_metrics.network import Network, weights_of
from papers.gram_metrics.simulation import Trajectory, check_run


def frozen(
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    *,
    eta: float,
    steps: int,
    unseen: Tensor | None = None,
) -> Trajectory:
    """The run that the kernel of the start predicts."""
    check_run(eta, steps)
    weights = weights_of(network)
    state = state_of(weights, check_problem(weights, inputs, targets, unseen))
    return predict(repeat(_columns(state, inputs.shape[0]), steps), state.Y, targets, eta)


def relinearised(
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    *,
    eta: float,
    steps: int,
    unseen: Tensor | None = None,
) -> Trajectory:
    """The run that the kernels along the true run predict."""
    check_run(eta, steps)
    weights = weights_of(network)
    start = state_of(weights, check_problem(weights, inputs, targets, unseen)).Y
    states = evolve(weights, inputs, targets, eta=eta, steps=max(steps - 1, 0), unseen=unseen)
    kernels = (_columns(state, inputs.shape[0]) for state, _ in zip(states, range(steps), strict=False))
    return predict(kernels, start, targets, eta)


def predict(kernels: Iterable[Tensor], outputs: Tensor, targets: Tensor, eta: float) -> Trajectory:
    """The run from Y(0) (rows,), one step for each K (rows, M); targets (M,) are of the first M rows."""
    M = targets.shape[0]
    steps = [outputs]
    for K in kernels:
        steps.append(steps[-1] - (2 * eta / M) * K @ (steps[-1][:M] - targets))
    Y = torch.stack(steps)
    return Trajectory(Y[:, :M] - targets, Y[:, M:])


def _columns(state: State, M: int) -> Tensor:
    """K (rows, M) of a state whose first M rows are for training."""
    return kernel_of(state, state.rows(slice(M))).total
