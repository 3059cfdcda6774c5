"""Late and thin gradients by their definition: a list of one-graph gradients, taken τ steps later.

Every batch has a copy of the model as it was when the batch ran forward, and one graph over it. What goes
back along an edge is λ times the gradient, rounded by the same seeded generator. The gradient of the whole
graph is cut into parts: the layers of stage k and the head as its own loss sees it (part k, taken τ_k steps
later), and the embedding (taken at the largest τ of the stages that send gradient to x0).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.exec.thin import rounded
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan

Part = dict[str, Tensor]


class _Crossing(torch.autograd.Function):
    """The identity; backwards λ times the gradient, rounded."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, lam: float, bits: int, key: tuple[int, ...]) -> Tensor:
        ctx.edge = lam, bits, key
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        lam, bits, key = ctx.edge
        return rounded(g * lam, bits, key), None, None, None


def lateness(topology: Topology) -> list[int]:
    """τ of each stage by looking along every path of edges with gradient."""
    stages = topology.stages

    def of(k: int) -> int:
        heard = [
            edge.delay + of(j)
            for j in range(k + 1, len(stages))
            for edge in stages[j].sources
            if edge.source == k and edge.grad_scale > 0
        ]
        return max(heard, default=0)

    return [of(k) for k in range(len(stages))]


@dataclass
class LateTraining:
    """Steps of an optimizer on the parts that are due."""

    stack: Any
    topology: Topology
    optimizer: torch.optim.Optimizer
    seed: int = 0
    parts: dict[int, list[Part]] = field(default_factory=dict)
    """The parts by the step at which they are taken."""
    step: int = 0

    def train(self, *batches: tuple[Tensor, Tensor]) -> list[Tensor]:
        """One step on the mean gradient of its batches; the losses of each."""
        losses = []
        for number, (inputs, targets) in enumerate(batches):
            losses.append(self._read(inputs, targets, number, 1 / len(batches)))
        self.stack.zero_grad(set_to_none=True)
        own = dict(self.stack.named_parameters())
        for part in self.parts.pop(self.step, []):
            for name, g in part.items():
                own[name].grad = g.clone() if own[name].grad is None else own[name].grad + g
        self.optimizer.step()
        self.step += 1
        return losses

    def _take(self, late: int, part: Part) -> None:
        self.parts.setdefault(self.step + late, []).append(part)

    def _read(self, inputs: Tensor, targets: Tensor, number: int, share: float) -> Tensor:
        stack = copy.deepcopy(self.stack)
        stack.zero_grad(set_to_none=True)
        plan, late = Plan.of(self.topology, len(stack.layers)), lateness(self.topology)
        embedded = stack.embed(inputs)
        x0 = embedded.detach().requires_grad_()
        ctx = stack.layer_context(x0, inputs)
        messages: dict[Any, Tensor] = {}
        total, losses, layered = torch.zeros(()), [], {id(p) for p in stack.layers.parameters()}
        outside = {n: p for n, p in stack.named_parameters() if id(p) not in layered}
        for planned in plan.stages:
            bus = ctx if planned.live_bus else replace(ctx, x0=x0.detach())
            h = torch.zeros(())
            for i, (port, lam) in enumerate(planned.inputs):
                edge = planned.stage.sources[i]
                key = (self.seed, self.step, number, planned.index, i)
                value = x0 if port.source == EMBEDDING else messages[port]
                crossed = _Crossing.apply(value, lam, edge.grad_bits, key) if lam else value.detach()
                h = h + stack.relay(port.relay).receive(crossed, bus)
            for layer in planned.layers:
                h = stack.layers[layer](h, bus)
                for port in planned.outputs:
                    if port.layer == layer + 1:
                        messages[port] = h
            loss = F.cross_entropy(stack.readout(h, planned.head).flatten(0, -2), targets.flatten())
            losses.append(loss.detach() if planned.scale else torch.tensor(torch.nan))
            if planned.scale:
                total = total + planned.scale * share * loss
                alone = F.cross_entropy(
                    stack.readout(h.detach(), planned.head).flatten(0, -2), targets.flatten()
                )
                self._take(late[planned.index], _gradients(planned.scale * share * alone, outside))
        inner = {n: p for n, p in stack.named_parameters() if id(p) in layered}
        found = _gradients(total, {**inner, "x0": x0})
        if "x0" in found:
            touching = [late[p.index] for p in plan.stages if p.live_bus]
            embedding = _gradients((embedded * found.pop("x0")).sum(), outside)
            self._take(max(touching), embedding)
        for planned in plan.stages:
            prefixes = tuple(f"layers.{i}." for i in planned.layers)
            own = {name: g for name, g in found.items() if name.startswith(prefixes)}
            self._take(late[planned.index], own)
        return torch.stack([loss.double() for loss in losses])


def _gradients(value: Tensor, parameters: Part) -> Part:
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
