"""The times of one region on this machine, and the backward that they call for.

Statement. For an inner region k (one with an interface on both sides; the middle one is taken), with the
message that reaches it in a real forward,

    forward     m_{k+1} = R_k(m_k), with its graph, at the positions that somebody reads
    vjp         J_kᵀ v for one v
    local       the same, and the gradients of the region's parameters and of the canvas
    jacobian    J_k

in seconds, medians over rounds. Each round builds the region anew and times all four one after the other, so
that a slow moment of the machine hits them all; the first round is not counted. `choose_engine`
turns these into the backward with the shortest span. On one device that is always autograd: all the work is
done there either way, and the scan adds Jacobians to it. The `reason` says so, with the factor.

Shapes: messages (B, states, r). Cost: about repeats + 1 Jacobians.
Source: the units of `timeline.py`. Limits: the first and the last region are taken to cost
as much as an inner one, though the last one also has the head, and runs where a lean region does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from papers.latent_bounded_interfaces.planner import EngineChoice, choose_engine
from papers.latent_bounded_interfaces.shape import SPREAD, Shape
from papers.latent_bounded_interfaces.timeline import Units
from topograd.errors import ConfigError, TopologyError
from topograd.interfaces.jacobian import interface_jacobian, visit
from topograd.interfaces.regions import Regions
from topograd.nn.config import Architecture, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.stack import LayerContext, Stack
from topograd.runs.topology_config import Jacobian
from topograd.topology.dag import Topology

T = TypeVar("T")


def build_model(
    shape: Shape, interface: SegmentInterface | None = None, architecture: Architecture = "transformer"
) -> GPT:
    """The model of this shape, dense without an `interface`; always the same, and nothing in it is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = GPT(shape.config(architecture))
        if interface is not None:
            add_interfaces(stack, interface, shape.regions, shape.width, shape.context)
        for parameter in stack.parameters():
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=SPREAD)
    return stack


def random_tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch, context) for a model of this shape, always the same."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randint(shape.vocab, (2, shape.batch, shape.context), generator=generator)
    return both[0], both[1]


def measure_units(
    stack: Stack, topology: Topology, inputs: Tensor, jacobian: Jacobian = "loop", repeats: int = 5
) -> Units:
    """Seconds of the middle region's parts. Nothing is added to any `.grad`."""
    regions = Regions.of(stack, topology)
    if regions.count < 3:
        raise TopologyError(
            f"{regions.count} regions have no Jacobian between interfaces to measure",
            setting="regions",
            given=regions.count,
            remedy="give at least 3, or use backward 'autograd'",
        )
    if repeats < 1:
        raise ConfigError(setting="repeats", given=repeats, allowed="at least 1")
    middle, message, ctx = middle_region(regions, inputs)
    rounds = [_round(regions, middle, message, ctx, jacobian) for _ in range(repeats + 1)][1:]
    forward, vjp, local, whole = (statistics.median(times) for times in zip(*rounds, strict=True))
    return Units(forward=forward, local=local, vjp=vjp, jacobian=whole)


def middle_region(regions: Regions, inputs: Tensor) -> tuple[int, Tensor, LayerContext]:
    """The number of the region in the middle, its message, and the layer context, whose x0 is a leaf."""
    stack, middle = regions.stack, regions.count // 2
    x0 = stack.embed(inputs).detach().requires_grad_()
    ctx = stack.layer_context(x0, inputs)
    with torch.no_grad():
        return middle, regions.messages(x0, ctx)[middle - 1], ctx


def choose(
    stack: Stack, topology: Topology, inputs: Tensor, workers: int, jacobian: Jacobian = "loop"
) -> EngineChoice:
    """Measure this model here, and choose its backward for `workers` workers: 1, or one for each region."""
    count = Regions.of(stack, topology).count
    choose_engine(Units(jacobian=1.0), count, workers)  # a bad number of workers is refused before measuring
    return choose_engine(measure_units(stack, topology, inputs, jacobian), count, workers)


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
    regions: Regions, region: int, message: Tensor, ctx: LayerContext, way: Jacobian
) -> tuple[float, float, float, float]:
    """Seconds of the forward, the VJP, the local backward and the Jacobian."""
    device, leaf = message.device, message.detach().requires_grad_()
    forward, seen = timed(lambda: visit(regions, region, leaf, ctx, way), device)
    cotangent = message.detach()  # any will do but m_{k+1} itself, which a LayerNorm destroys
    wanted = [leaf, ctx.x0, *(p for p in regions.stack.parameters() if p.requires_grad)]
    sent = seen.message_out
    vjp, _ = timed(lambda: torch.autograd.grad(sent, leaf, cotangent, retain_graph=True), device)
    jacobian, _ = timed(lambda: interface_jacobian(seen, way), device)
    local, _ = timed(lambda: torch.autograd.grad(sent, wanted, cotangent, allow_unused=True), device)
    return forward, vjp, local, jacobian
