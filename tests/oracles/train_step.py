"""The training loss of a topology as one graph: the definition, without any scheduling.

    L̃ = Σ_k scale_k ℓ_k,   every edge wrapped in D_λ(h) = sg(h) + λ (h - sg(h))

("Stage-Partitioned Learning" eqs. 6-7 and 26). Where gradient reaches the next stage only, ℓ_k is that of a
graph of its own, in which the edges into stage k have their λ and all other edges between stages 0. All
activations and all logits are alive at once. Call
`.backward()` on the sum; `exec/train_step.py` must give the same gradients.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import EdgeOutput, Plan

TEMPERATURE, MIX = 2.0, 0.5
"""Of the objective `distillation`, as it is by default."""
Z_WEIGHT = 1e-4
"""Of the objective `z-loss`."""


def soft_detach(h: Tensor, grad_scale: float) -> Tensor:
    """D_λ(h): the value of h, with λ times its gradient."""
    return h.detach() + grad_scale * (h - h.detach())


def graph_losses(
    stack: Any, topology: Topology, inputs: Tensor, targets: Tensor, teacher: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(training loss with its whole graph, the stages' losses) of a `Stack`."""
    given = (inputs, targets, teacher)
    if topology.reach == "next":
        count = len(topology.stages)
        losses = [_graph(stack, _only_into(topology, k), *given)[k] for k in range(count)]
    else:
        losses = _graph(stack, topology, *given)
    scales = [planned.scale for planned in Plan.of(topology, len(stack.layers)).stages]
    total = torch.stack([s * loss for s, loss in zip(scales, losses, strict=True) if s > 0]).sum()
    return total, torch.stack(losses).detach()


def _only_into(topology: Topology, stage: int) -> Topology:
    """No gradient crosses an edge between stages but those into `stage`."""
    stages = list(topology.stages)
    for k, each in enumerate(stages):
        if k != stage:
            cut = (e if e.source == EMBEDDING else replace(e, grad_scale=0.0) for e in each.sources)
            stages[k] = replace(each, sources=tuple(cut))
    return replace(topology, stages=tuple(stages))


def _graph(
    stack: Any, topology: Topology, inputs: Tensor, targets: Tensor, teacher: Tensor | None
) -> list[Tensor]:
    """The loss of each stage, in one graph."""
    plan = Plan.of(topology, len(stack.layers))
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    messages: dict[EdgeOutput, Tensor] = {}
    logits: list[Tensor] = []
    losses: list[Tensor] = []
    for planned in plan.stages:
        own_bus = ctx if planned.live_bus else replace(ctx, x0=x0.detach())
        received = [
            (port, soft_detach(x0 if port.source == EMBEDDING else messages[port], lam))
            for port, lam in planned.inputs
        ]
        h = torch.stack([stack.relay(port.relay).receive(m, own_bus) for port, m in received]).sum(0)
        for layer in planned.layers:
            h = stack.layers[layer](h, own_bus)
            for port in planned.outputs:
                if port.layer == layer + 1:
                    messages[port] = stack.relay(port.relay).send(h, received[0][1])
        z = stack.readout(h, planned.head)
        losses.append(
            _loss(planned.stage.objective, z, logits, teacher, _thinned(targets, planned.stage.every))
        )
        if planned.predicts:
            logits.append(z.detach())
    return losses


def _thinned(targets: Tensor, every: int) -> Tensor:
    """targets (rows, time) or (rows,); places whose row + time is no multiple of `every` are left out."""
    kept = targets.clone()
    for place in itertools.product(*map(range, targets.shape)):
        if sum(place) % every:
            kept[place] = -100
    return kept


def _loss(name: str, z: Tensor, prior: list[Tensor], teacher: Tensor | None, targets: Tensor) -> Tensor:
    y = targets.flatten()
    if name == "residual" and prior:
        z = torch.stack(prior).sum(0) + z
    loss = F.cross_entropy(z.flatten(0, -2), y)
    if name == "z-loss":
        loss = loss + Z_WEIGHT * z.flatten(0, -2)[y != -100].logsumexp(-1).square().mean()
    if name == "distillation":
        assert teacher is not None
        log_p = F.log_softmax(teacher.flatten(0, -2) / TEMPERATURE, dim=-1)
        log_q = F.log_softmax(z.flatten(0, -2) / TEMPERATURE, dim=-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)[y != -100].mean()
        loss = (1 - MIX) * loss + MIX * TEMPERATURE**2 * divergence
    return loss
