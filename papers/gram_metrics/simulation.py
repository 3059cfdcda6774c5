"""Exact runs of gradient descent in the fields, for training and unseen inputs together.

Statement. `simulate` is exact: the residuals r(t) and unseen outputs Y(t) of gradient descent on mean(r²)
with step η, for t = 0..T, through every mask crossing (`history.py`). It also counts the crossings: entries
of a_1, ..., a_L, on training rows, that differ between t and t + 1. Statements to first order hold where
there are none.

Symbols and shapes. Inputs (M, N_0), targets (M,), unseen (M', N_0); residuals (T+1, M), unseen outputs
(T+1, M'), crossings (T,).
Cost: that of `history.py`. One hidden layer, M (M + M') N multiply-adds a step; deeper, a cost that grows
with t, and T M (N_{l-1} + N_l) numbers for each layer l ≥ 2.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), sections
3.3 and 3.6; the form at any depth is derived in `history.py`. The obvious version is
`tests.oracles.fields.descend`.
Limits. A step too large for the loss raises `DivergenceError`, which names t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from papers.gram_metrics.field_state import State
from papers.gram_metrics.history import evolve
from papers.gram_metrics.network import FieldError, Network
from topograd.errors import DivergenceError


@dataclass(frozen=True)
class Trajectory:
    """Residuals and unseen outputs at t = 0..T."""

    residuals: Tensor
    """r (T+1, M)."""
    unseen: Tensor
    """Y of the unseen inputs (T+1, M')."""

    @property
    def losses(self) -> Tensor:
        """mean(r²) (T+1,)."""
        return self.residuals.square().mean(-1)


@dataclass(frozen=True)
class Simulation(Trajectory):
    """A trajectory with its mask crossings."""

    crossings: Tensor
    """(T,): how many mask entries of training rows changed in each step."""


def simulate(
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    *,
    eta: float,
    steps: int,
    unseen: Tensor | None = None,
) -> Simulation:
    """Run `steps` steps of gradient descent in the fields.

    >>> W, x, y = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [-2.0]]), torch.tensor([1.0, 1.0])
    >>> run = simulate([W], x, y, eta=0.5, steps=2, unseen=torch.tensor([[2.0]]))
    >>> run.losses.tolist(), run.unseen.flatten().tolist(), run.crossings.tolist()
    ([0.125, 0.095703125, 0.073272705078125], [1.0, 1.125, 1.234375], [0, 0])
    """
    check_run(eta, steps)
    outputs, crossed, M = [], [], inputs.shape[0]
    last: State | None = None
    for state in evolve(network, inputs, targets, eta=eta, steps=steps, unseen=unseen):
        seen = state.rows(slice(M))
        outputs.append(state.Y)
        if last is not None:
            crossed.append(crossings(last, seen))
        last = seen
    Y = torch.stack(outputs)
    bad = (~Y.isfinite()).any(-1).nonzero()
    if len(bad):
        raise DivergenceError(
            f"the outputs are not finite from step {int(bad[0])} on",
            setting="eta",
            given=eta,
            remedy="take a smaller eta",
        )
    counts = torch.stack(crossed) if crossed else torch.zeros(0, dtype=torch.int64, device=inputs.device)
    return Simulation(Y[:, :M] - targets, Y[:, M:], counts)


def crossings(before: State, after: State) -> Tensor:
    """How many entries of the masks changed, over all layers and rows; a tensor without dimensions."""
    changed = [(before.a[layer] != after.a[layer]).sum() for layer in before.a]
    return torch.stack(changed).sum()


def check_run(eta: float, steps: int) -> None:
    """Raise FieldError for a step size or count out of range."""
    if not (math.isfinite(eta) and eta > 0):
        raise FieldError(setting="eta", given=eta, allowed="a positive number")
    if steps < 0:
        raise FieldError(setting="steps", given=steps, allowed="0 or more")
