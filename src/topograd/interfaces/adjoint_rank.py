"""How many directions gradient needs at every boundary of a trained model.

Statement. With h_l (positions, width) the hidden states behind layer l, g_l = ∂L/∂h_l their adjoints, and σ
the singular values of the matrix of all g_l,

    rank_q = min r :  Σ_{i≤r} σ_i² >= q Σ_i σ_i²                           for q = 0.9 and 0.99

is the smallest rank of a fixed subspace, the same at all positions, through which that share of the
gradient's energy would cross the boundary: a subspace of fewer directions loses more. The effective rank
exp(-Σ p log p), p = σ / Σ σ, is beside it.

This is the question that "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" leaves open (§A,
"effective interface rank"), read off the adjoints instead of whole Jacobians. The loss is of the model's
prediction: of next tokens, of hidden ones, or of an image's class, where the positions of a feature map are
its pixels. Gradient passes every boundary, whatever λ was in training.

Cost: a forward and a backward, and a QR of (positions, width) at each boundary, whose R has the same σ: so
positions are read in parts, and their adjoints are not kept. Limits: one linear subspace;
what a learned, nonlinear interface could carry may be more. A rank is at most the number of positions: give
several times the width. What is small in energy matters all the same: in a small GPT 90 % of it kept 73 % of
what depth was worth (`papers/latent_bounded_interfaces/interface_rank.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.effective_rank import effective_rank
from topograd.exec.forward import stage_logits
from topograd.nn.stack import Stack
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

AT_ONCE = 2048
"""Tokens or pixels that go through the model together."""


def boundary_ranks(
    stack: Stack,
    topology: Topology | Plan,
    inputs: Tensor,
    targets: Tensor,
    on_more: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Behind each layer but the last: `layer`, how many lie before it, the `width` there, and the ranks."""
    each = max(1, AT_ONCE // max(inputs[0].numel(), 1))
    triangles: list[Tensor] = []
    for done, (x, y) in enumerate(zip(inputs.split(each), targets.split(each), strict=True), 1):
        count = int((y != -100).sum())  # a mean over few targets weighs as much as they are
        adjoints = boundary_adjoints(stack, topology, x, y)[:-1] if count else []
        for layer, adjoint in enumerate(adjoints):
            rows = adjoint.movedim(1, -1) if adjoint.dim() == 4 else adjoint  # channels of a feature map
            more = count * rows.flatten(0, -2).double()
            if layer == len(triangles):
                triangles.append(more[:0])
            triangles[layer] = torch.linalg.qr(torch.cat((triangles[layer], more)), mode="r").R
        on_more(min(done * each, len(inputs)), len(inputs))
    return [{"layer": layer, **_ranks(R)} for layer, R in enumerate(triangles, 1)]


def _ranks(rows: Tensor) -> dict[str, Any]:
    singular = torch.linalg.svdvals(rows)
    return {
        "width": rows.shape[-1],
        "rank_90": energy_rank(singular, 0.9),
        "rank_99": energy_rank(singular, 0.99),
        "effective_rank": effective_rank(singular).item(),
    }


def energy_rank(singular: Tensor, share: float) -> int:
    """How many of the largest σ hold this share of Σ σ²; 0 where all are zero.

    >>> energy_rank(torch.tensor([3.0, 1.0, 0.0]), 0.9), energy_rank(torch.tensor([3.0, 1.0]), 0.99)
    (1, 2)
    """
    energy = singular.square().cumsum(0)
    return 0 if energy[-1] == 0 else int((energy < share * energy[-1]).sum()) + 1


def boundary_adjoints(
    stack: Stack, topology: Topology | Plan, inputs: Tensor, targets: Tensor
) -> list[Tensor]:
    """∂L/∂h behind each layer, (batch, time, width); zero where the prediction does not read it."""
    plan = Plan.of(topology, len(stack.layers))
    last = plan.predicting()[-1]
    x0 = stack.embed(inputs).detach().requires_grad_()  # a graph even where no parameter learns
    outputs: dict[int, Tensor] = {}

    def keep(layer: int, module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[layer] = output

    with ExitStack() as hooks:
        for i, module in enumerate(stack.layers):
            hooks.callback(module.register_forward_hook(partial(keep, i)).remove)
        logits = stage_logits(stack, plan, last, inputs, x0, lean=False)
    loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
    ran = [layer for layer in range(len(stack.layers)) if layer in outputs]
    gradients = torch.autograd.grad(loss, [outputs[layer] for layer in ran], allow_unused=True)
    known = {layer: g for layer, g in zip(ran, gradients, strict=True) if g is not None}
    nothing = torch.zeros_like(x0)
    return [known.get(layer, nothing).detach() for layer in range(len(stack.layers))]
