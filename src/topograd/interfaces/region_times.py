"""The times of one region on this machine.

Statement. For an inner region k (one with an interface on both sides; the middle one is taken), with the
message that reaches it in a real forward,

    forward     m_{k+1} = R_k(m_k), with its graph, at the positions that somebody reads
    vjp         J_kᵀ v for one v
    local       the same, and the gradients of the region's parameters and of the canvas
    jacobian    J_k

in seconds, medians over rounds. Each round builds the region anew and times all four one after the other, so
that a slow moment of the machine hits them all; the first round is not counted.

Shapes: messages (B, states, r). Cost: about repeats + 1 Jacobians, and `region_times` as many whole steps.
Source: the units of `region_events.py`. Limits: the first and the last region are taken to cost as much as an
inner one; what a whole step takes beyond these, the canvas and the head is every region's alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.interfaces.jacobian import has_jacobians, interface_jacobian, visit, vjp
from topograd.interfaces.region_events import RegionTimes
from topograd.interfaces.regions import Regions
from topograd.nn.stack import LayerContext
from topograd.runs.topology_config import Jacobian

T = TypeVar("T")


def region_times(
    regions: Regions, inputs: Tensor, targets: Tensor, jacobian: Jacobian = "loop", repeats: int = 5
) -> RegionTimes:
    """Seconds of a region, of the head, and of what every rank does beside its region; links cost nothing,
    and a Jacobian of too many products takes forever.

    Two regions have no inner one, and no schedule of theirs builds a Jacobian: a half of a step is one's.
    """
    stack, device, last = regions.stack, inputs.device, regions.plan.stages[-1]
    with torch.no_grad():
        hidden = stage_outputs(stack, regions.plan, inputs, [last.index])[last.index].requires_grad_()

    def canvas() -> None:
        stack.layer_context(x0 := stack.embed(inputs), inputs)
        if x0.requires_grad:  # images are no embedding
            x0.sum().backward()

    def readout() -> None:
        logits = stack.readout(hidden, last.head)
        F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten()).backward()

    def step() -> None:
        train_step(stack, regions.plan, inputs, targets)

    extra, head, whole = (
        statistics.median(timed(part, device)[0] for _ in range(repeats + 1))
        for part in (canvas, readout, step)
    )
    stack.zero_grad(set_to_none=True)
    if regions.count < 3:
        third = (whole - extra - head) / (3 * regions.count)
        return RegionTimes(forward=third, backward=2 * third, jacobian=0.0, head=head, extra=extra)
    way = jacobian if has_jacobians(regions) else None
    forward, _, local, built = region_seconds(regions, inputs, way, repeats)
    beside = max(whole - extra - head - regions.count * (forward + local), 0.0) / regions.count
    return RegionTimes(forward=forward, backward=local, jacobian=built, head=head, extra=extra + beside)


def region_seconds(
    regions: Regions, inputs: Tensor, jacobian: Jacobian | None, repeats: int
) -> tuple[float, float, float, float]:
    """Forward, VJP, local backward and Jacobian of the middle region, which takes forever where none is to be
    built. Nothing is added to any `.grad`."""
    middle, message, ctx = middle_region(regions, inputs)
    rounds = [_round(regions, middle, message, ctx, jacobian) for _ in range(repeats + 1)][1:]
    forward, vjp, local, whole = (statistics.median(times) for times in zip(*rounds, strict=True))
    return forward, vjp, local, whole


def middle_region(regions: Regions, inputs: Tensor) -> tuple[int, Tensor, LayerContext]:
    """The number of the region in the middle, its message, and the layer context, whose x0 is a leaf."""
    stack, middle = regions.stack, regions.count // 2
    x0 = stack.embed(inputs).detach().requires_grad_()
    ctx = stack.layer_context(x0, inputs)
    with torch.no_grad():
        _, ctx = regions.first(x0, ctx)
        return middle, regions.messages(x0, ctx)[middle - 1], ctx


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds of `run` and its result, with nothing left on the device's queue."""
    _wait(device)
    began = perf_counter()
    result = run()
    _wait(device)
    return perf_counter() - began, result


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _round(
    regions: Regions, region: int, message: Tensor, ctx: LayerContext, way: Jacobian | None
) -> tuple[float, float, float, float]:
    """Seconds of the forward, the VJP, the local backward and the Jacobian."""
    device, leaf = message.device, message.detach().requires_grad_()
    forward, seen = timed(lambda: visit(regions, region, leaf, ctx, way or "loop"), device)
    wanted = [leaf, ctx.x0, *(p for p in regions.stack.parameters() if p.requires_grad)]
    sent = seen.message_out
    cotangent = torch.randn(sent.shape, generator=torch.Generator().manual_seed(0)).to(sent)
    pulled, _ = timed(lambda: vjp(sent, leaf, cotangent), device)
    jacobian = math.inf if way is None else timed(lambda: interface_jacobian(seen, way), device)[0]
    local, _ = timed(lambda: torch.autograd.grad(sent, wanted, cotangent, allow_unused=True), device)
    return forward, pulled, local, jacobian
