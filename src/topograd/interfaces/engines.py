"""One training step of regions that are joined by interfaces, by three engines that give the same gradients.

    autograd   the executor (`training/executor.py`): each region's backward waits for the next region's
    scan       three phases: Jacobians of the regions, all independent; a suffix scan over them, which gives
               every interface's adjoint; each region's own backward, all independent (Algorithm 1)
    hybrid     the last `carried` inner regions hand the adjoint on by a VJP while the Jacobians of the
               earlier ones are built, then the scan goes on from there

Statement: with m̄_k = ∂L/∂m_k and J_k = ∂m_{k+1}/∂m_k, m̄_k = J_kᵀ m̄_{k+1} and
∇_{θ_k} L = (∂m_{k+1}/∂θ_k)ᵀ m̄_{k+1} (Theorem 2.7, Corollary 2.9 of "LBI: Parallel Scan Backpropagation via
Latent Bounded Interfaces"). The last region gives m̄_{K-1} in its own backward, and no state goes into the
first, so only regions 1..K-2 need a Jacobian. The canvas x0 and parameters that regions share collect the
gradients of each region; no backward runs through the whole graph.

Cost on one device, F the forward of a region: autograd about 2.9 K F; scan K F + (K-2) J + 1.9 K F, with
J near (r-2) F. It is a way to shorten the span on several devices, not the work (`timeline.py`,
`planner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.forward import run_stage
from topograd.interfaces.exactness import check_jacobians
from topograd.interfaces.jacobian import Visit, interface_jacobian, visit
from topograd.interfaces.regions import Regions
from topograd.interfaces.settings import BackwardEngine, Way
from topograd.interfaces.suffix_scan import Method, suffix_adjoints
from topograd.nn.stack import Bus, Stack
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan, PlannedStage
from topograd.training.executor import train_step
from topograd.training.objectives import Logits, Objective, objectives_of, stage_loss


@dataclass(frozen=True)
class Backward:
    """What a step found beside the gradients."""

    loss: Tensor
    adjoints: Tensor | None = None
    """m̄_1 ... m̄_{K-1}, (K-1, batch, n); autograd does not show them."""
    jacobians: Tensor | None = None
    """J of the inner regions that have one, (count, batch, n, n)."""


def region_step(
    stack: Stack,
    plan: Plan,
    inputs: Tensor,
    targets: Tensor,
    *,
    engine: BackwardEngine = "autograd",
    scale: float = 1.0,
    teacher: Logits | None = None,
    objectives: Mapping[str, Objective] | None = None,
) -> Tensor:
    """`train_step` with a backward of one's choice: each stage's loss (stages,), nan where it has none."""
    if engine == "autograd":
        return train_step(stack, plan, inputs, targets, teacher=teacher, objectives=objectives, scale=scale)
    step = backward(
        stack, plan, inputs, targets, engine=engine, teacher=teacher, objectives=objectives, scale=scale
    )
    loss = step.loss
    return torch.cat((loss.new_full((len(plan.stages) - 1,), float("nan")), loss[None]))


scan_step = partial(region_step, engine="scan")
hybrid_step = partial(region_step, engine="hybrid")
"""What `backward = "scan"` and `"hybrid"` in a run's settings call."""


def backward(
    stack: Stack,
    topology: Topology | Plan,
    inputs: Tensor,
    targets: Tensor,
    *,
    engine: BackwardEngine = "autograd",
    jacobian: Way = "loop",
    chunk: int | None = None,
    scan: Method = "matvec",
    carried: int | None = None,
    trimmed: bool = True,
    scale: float = 1.0,
    teacher: Logits | None = None,
    objectives: Mapping[str, Objective] | None = None,
) -> Backward:
    """Add the gradients of the loss, times `scale`, to every `.grad`.

    `jacobian`, `chunk` and `trimmed` say how Jacobians are built, `scan` how adjoints follow from them;
    `carried` belongs to the hybrid engine: how many inner regions hand the adjoint on (by default half).
    """
    if engine not in get_args(BackwardEngine):
        known = ", ".join(get_args(BackwardEngine))
        raise ConfigError(f"engine {engine!r} is unknown; choose one of {known}")
    if engine == "autograd":
        losses = train_step(
            stack, topology, inputs, targets, teacher=teacher, objectives=objectives, scale=scale
        )
        return Backward(losses[-1])
    regions = Regions.of(stack, topology)
    inner = regions.count - 2
    carried = 0 if engine == "scan" else -(-inner // 2) if carried is None else carried
    if not 0 <= carried <= inner:
        raise ConfigError(f"carried is {carried}; of {regions.count} regions, 0 to {inner} can hand it on")
    embedded = stack.embed(inputs)
    x0 = embedded.detach().requires_grad_(embedded.requires_grad)
    bus = stack.bus(x0, inputs)
    building = range(1, inner + 1 - carried)
    seen = _forward(regions, x0, bus, jacobian, building)
    jacobians = None
    if building:
        visits = [seen[region] for region in building]
        jacobians = torch.stack([interface_jacobian(one, jacobian, chunk, trimmed) for one in visits])
        check_jacobians(visits, jacobians, jacobian, trimmed)  # before any `.grad` is touched
    objective = objectives_of(regions.plan, objectives)[-1]
    loss, terminal = _last(regions, seen[-1].message_out, bus, objective, targets, teacher, scale)
    adjoints = _adjoints(seen[len(seen) - carried :], terminal, jacobians, scan)
    for one, adjoint in zip(seen, adjoints, strict=True):
        if one.message_out.requires_grad:
            torch.autograd.backward(one.message_out, adjoint.view_as(one.message_out).to(one.message_out))
    if x0.grad is not None:
        embedded.backward(x0.grad)
    return Backward(loss, adjoints, jacobians)


def _bus_of(planned: PlannedStage, bus: Bus) -> Bus:
    """The bus as this region sees it: its x0 carries gradient, or not."""
    return bus if planned.live_bus else replace(bus, x0=bus.x0.detach())


def _forward(regions: Regions, x0: Tensor, bus: Bus, way: Way, built: range) -> list[Visit]:
    """Visits of all regions but the last, each with a graph of its own."""
    seen: list[Visit] = []
    for planned in regions.plan.stages[:-1]:
        message = seen[-1].message_out.detach().requires_grad_() if seen else x0
        how = way if planned.index in built else "loop"
        seen.append(visit(regions, planned.index, message, _bus_of(planned, bus), how))
    return seen


def _last(
    regions: Regions,
    message: Tensor,
    bus: Bus,
    objective: Objective,
    targets: Tensor,
    teacher: Logits | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The loss, and in one backward the last region's gradients and the adjoint of its message."""
    planned = regions.plan.stages[-1]
    leaf = message.detach().requires_grad_()
    h, _ = run_stage(regions.stack, planned, [leaf], _bus_of(planned, bus))
    loss = stage_loss(regions.stack, h, planned.head, objective, targets, teacher=teacher)
    (loss * (planned.scale * scale)).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _adjoints(carrying: list[Visit], terminal: Tensor, jacobians: Tensor | None, scan: Method) -> Tensor:
    """m̄_1 ... m̄_{K-1}: by VJPs through the regions that carry, then by the scan."""
    late = [terminal.flatten(1)]
    for one in reversed(carrying):
        cotangent = late[0].view_as(one.message_out)
        (before,) = torch.autograd.grad(one.message_out, one.message_in, cotangent, retain_graph=True)
        late.insert(0, before.flatten(1))
    if jacobians is None:
        return torch.stack(late)
    early = suffix_adjoints(jacobians, late[0], scan)
    return torch.cat((early[:-1], torch.stack(late).to(early)))
