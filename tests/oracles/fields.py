"""Learning in the weights, by autograd, and transport operators as whole matrices. The slow, obvious version.

    W_l ← W_l - η ∂/∂W_l mean_α (Y^α - y^α)²,   Y = mean(u_L)              gradient descent
    Σ_k mean_α (Y_k^α - y^α)²,  with the input of stage k detached          the same, in stages
    D_l^{αβ} = diag(a_{l+1}^α ∘ a_{l+1}^β),   G_l^{αβ} = P_l^{αβ}[I]
    P_l^{αβ}[X] = W_{l+1}ᵀ diag(a_{l+1}^α) X diag(a_{l+1}^β) W_{l+1}
    M_l^{αβ} = S^{(l+1)}_{αβ} I + P_l^{αβ}[M_{l+1}^{αβ}],   M_{L-1}^{αβ} = S^{(L)}_{αβ} I

W_l (N_l, N_{l-1}), inputs (M, N_0), targets (M,), M_l (M, M, N_l, N_l). Layers count from 1.
Cost: descent keeps a copy of the weights for each step; a transport is M² N² numbers for each layer.
Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), sections
2 and 7. The fast version is in `fields/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tests.oracles.ntk import output


@dataclass(frozen=True)
class Descent:
    """What gradient descent did: weights and masks at steps 0..T, residuals (T+1, M), unseen outputs."""

    weights: list[list[Tensor]]
    masks: list[list[Tensor]]
    residuals: Tensor
    unseen: Tensor

    @property
    def crossings(self) -> Tensor:
        """(T,): how many mask entries of the training examples changed in each step."""
        pairs = pairwise(self.masks)
        return torch.tensor([sum(int((a != b).sum()) for a, b in zip(*two, strict=True)) for two in pairs])


def activations(weights: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
    """u_0, ..., u_L, each (M, N_l)."""
    fields = [inputs]
    for W in weights:
        fields.append(torch.relu(fields[-1] @ W.T))
    return fields


def masks(weights: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
    """a_1, ..., a_L."""
    return [u > 0 for u in activations(weights, inputs)[1:]]


def descend(
    weights: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    eta: float,
    steps: int,
    unseen: Tensor | None = None,
) -> Descent:
    """Full-batch gradient descent on the weights, `steps` times."""
    unseen = inputs[:0] if unseen is None else unseen
    now = [W.detach().clone() for W in weights]
    kept, seen, residuals, outputs = [], [], [], []
    for step in range(steps + 1):
        leaves = [W.clone().requires_grad_() for W in now]
        r = output(leaves, inputs) - targets
        kept.append(now)
        seen.append(masks(now, inputs))
        residuals.append(r.detach())
        outputs.append(output(now, unseen))
        if step < steps:
            gradients = torch.autograd.grad(r.square().mean(), leaves)
            now = [W - eta * g for W, g in zip(now, gradients, strict=True)]
    return Descent(kept, seen, torch.stack(residuals), torch.stack(outputs))


def staged_outputs(weights: Sequence[Tensor], inputs: Tensor, stages: Sequence[int]) -> list[Tensor]:
    """Y_k (M,) for each stage of so many layers; no gradient passes from one stage to the one before."""
    answers, u, start = [], inputs, 0
    for size in stages:
        u = activations(weights[start : start + size], u.detach())[-1]
        answers.append(u.mean(-1))
        start += size
    return answers


def staged_step(
    weights: Sequence[Tensor], inputs: Tensor, targets: Tensor, eta: float, stages: Sequence[int]
) -> list[Tensor]:
    """The weights after one step on the sum of the stages' losses."""
    leaves = [W.detach().clone().requires_grad_() for W in weights]
    total = torch.stack([(Y - targets).square().mean() for Y in staged_outputs(leaves, inputs, stages)]).sum()
    gradients = torch.autograd.grad(total, leaves)
    return [W.detach() - eta * g for W, g in zip(leaves, gradients, strict=True)]


def conjugates(weights: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
    """b_1, ..., b_L: N_L times the gradient of Y by each activation, by autograd."""
    fields = activations([W.detach().requires_grad_() for W in weights], inputs)[1:]
    total = fields[-1].mean(-1).sum()
    return [fields[-1].shape[1] * g for g in torch.autograd.grad(total, fields)]


def projectors(weights: Sequence[Tensor], inputs: Tensor, layer: int) -> Tensor:
    """D_l^{αβ} (M, M, N_{l+1}, N_{l+1})."""
    a = masks(weights, inputs)[layer].to(inputs.dtype)
    return torch.diag_embed(a[:, None] * a[None])


def pulled_back(weights: Sequence[Tensor], inputs: Tensor, layer: int, X: Tensor) -> Tensor:
    """P_l^{αβ}[X^{αβ}] (M, M, N_l, N_l) of X (M, M, N_{l+1}, N_{l+1})."""
    a, W = masks(weights, inputs)[layer].to(inputs.dtype), weights[layer]
    return W.T @ (a[:, None, :, None] * X * a[None, :, None, :]) @ W


def transports(weights: Sequence[Tensor], inputs: Tensor, layer: int) -> Tensor:
    """M_l^{αβ} (M, M, N_l, N_l), 1 ≤ l ≤ L-1, down from the last layer."""
    z = [m * b for m, b in zip(masks(weights, inputs), conjugates(weights, inputs), strict=True)]
    N = weights[-1].shape[0]

    def local(above: int) -> Tensor:
        S = z[above - 1] @ z[above - 1].T / N
        identity = torch.eye(weights[above - 1].shape[1], dtype=inputs.dtype, device=inputs.device)
        return S[:, :, None, None] * identity

    operator = local(len(weights))
    for below in range(len(weights) - 2, layer - 1, -1):
        operator = local(below + 1) + pulled_back(weights, inputs, below, operator)
    return operator
