"""One training step of regions that are joined by interfaces, by three engines that give the same gradients.

    autograd   the executor (`training/executor.py`): each region's backward waits for the next region's
    scan       three phases: Jacobians of the regions, all independent; a suffix scan over them, which gives
               every interface's adjoint; each region's own backward, all independent (Algorithm 1)
    hybrid     the last `carried` inner regions hand the adjoint on by a VJP while the Jacobians of the
               earlier ones are built, then the scan goes on from there

Statement: with m̄_k = ∂L/∂m_k and J_k = ∂m_{k+1}/∂m_k, m̄_k = J_kᵀ m̄_{k+1} and
∇_{θ_k} L = (∂m_{k+1}/∂θ_k)ᵀ m̄_{k+1} (Theorem 2.7, Corollary 2.9 of "LBI: Parallel Scan Backpropagation via
Latent Bounded Interfaces"). The last region gives m̄_{K-1} in its own backward, and the first hears no state,
so only regions 1..K-2 need a Jacobian. The canvas x0 and parameters that regions share collect what each
region says about them; no backward runs through the whole graph.

Cost on one device, F the forward of a region: autograd about 2.9 K F; scan K F + (K-2) J + 1.9 K F, with
J near (r-2) F. It is a way to shorten the span on several devices, not the work (`timeline.py`,
`planner.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.interfaces.jacobian import Visit, Way, interface_jacobian, visit
from topograd.interfaces.regions import Regions
from topograd.interfaces.scan import Method, suffix_adjoints
from topograd.nn.stack import Bus, Stack
from topograd.topology.dag import Topology
from topograd.training.executor import train_step
from topograd.training.forward import run_stage
from topograd.training.objectives import OBJECTIVES, objective_named, stage_loss

Engine = Literal["autograd", "scan", "hybrid"]


@dataclass(frozen=True)
class Backward:
    """What a step found beside the gradients."""

    loss: Tensor
    adjoints: Tensor | None = None
    """m̄_1 ... m̄_{K-1}, (K-1, batch, n); autograd does not show them."""
    jacobians: Tensor | None = None
    """J of the inner regions that have one, (count, batch, n, n)."""


def backward(
    stack: Stack,
    topology: Topology,
    inputs: Tensor,
    targets: Tensor,
    *,
    engine: Engine = "autograd",
    jacobian: Way = "loop",
    chunk: int | None = None,
    scan: Method = "matvec",
    carried: int | None = None,
    trimmed: bool = True,
    scale: float = 1.0,
) -> Backward:
    """Add the gradients of the loss, times `scale`, to every `.grad`.

    `jacobian`, `chunk` and `trimmed` say how Jacobians are built, `scan` how adjoints follow from them;
    `carried` belongs to the hybrid engine: how many inner regions hand the adjoint on (by default half).
    """
    if engine not in get_args(Engine):
        raise ConfigError(f"engine {engine!r} is unknown; choose one of {', '.join(get_args(Engine))}")
    if engine == "autograd":
        return Backward(train_step(stack, topology, inputs, targets, scale=scale)[-1])
    regions = Regions.of(stack, topology)
    inner = regions.count - 2
    carried = 0 if engine == "scan" else -(-inner // 2) if carried is None else carried
    if not 0 <= carried <= inner:
        raise ConfigError(f"carried is {carried}; of {regions.count} regions, 0 to {inner} can hand it on")
    embedded = stack.embed(inputs)
    x0 = embedded.detach().requires_grad_(embedded.requires_grad)
    bus = stack.bus(x0, inputs)
    seen = _forward(regions, x0, bus, jacobian, built=range(1, inner + 1 - carried))
    loss, terminal = _last(regions, seen[-1].said, bus, targets, scale)
    adjoints, jacobians = _adjoints(seen, terminal, carried, jacobian, chunk, scan, trimmed)
    for one, adjoint in zip(seen, adjoints, strict=True):
        if one.said.requires_grad:
            torch.autograd.backward(one.said, adjoint.view_as(one.said).to(one.said.dtype))
    if x0.grad is not None:
        embedded.backward(x0.grad)
    return Backward(loss.detach(), adjoints, jacobians)


def _forward(regions: Regions, x0: Tensor, bus: Bus, way: Way, built: range) -> list[Visit]:
    """Visits of all regions but the last, each with a graph of its own."""
    seen: list[Visit] = []
    for region in range(regions.count - 1):
        heard = seen[-1].said.detach().requires_grad_() if seen else x0
        seen.append(visit(regions, region, heard, bus, way if region in built else "loop"))
    return seen


def _last(regions: Regions, said: Tensor, bus: Bus, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The loss, and in one backward the last region's gradients and the adjoint of what it heard."""
    planned = regions.plan.stages[-1]
    heard = said.detach().requires_grad_()
    h, _ = run_stage(regions.stack, planned, [heard], bus)
    objective = objective_named(OBJECTIVES, planned.stage.objective)
    loss = stage_loss(regions.stack, h, planned.index, objective, targets)
    (loss * scale).backward()
    assert heard.grad is not None
    return loss, heard.grad


def _adjoints(
    seen: list[Visit],
    terminal: Tensor,
    carried: int,
    way: Way,
    chunk: int | None,
    scan: Method,
    trimmed: bool,
) -> tuple[Tensor, Tensor | None]:
    """m̄_1 ... m̄_{K-1}, and the Jacobians that they came from."""
    late = [terminal.flatten(1)]
    for one in reversed(seen[len(seen) - carried :]):
        (before,) = torch.autograd.grad(one.said, one.heard, late[0].view_as(one.said), retain_graph=True)
        late.insert(0, before.flatten(1))
    building = seen[1 : len(seen) - carried]
    if not building:
        return torch.stack(late), None
    jacobians = torch.stack([interface_jacobian(one, way, chunk, trimmed) for one in building])
    early = suffix_adjoints(jacobians, late[0], scan)
    return torch.cat((early[:-1], torch.stack(late).to(early))), jacobians
