"""The times of one region on this machine, and the backward that they call for.

`choose_engine` turns the times of the middle region (`topograd/interfaces/region_times.py`) into the backward
with the shortest span. On one device that is always autograd: all the work is done there either way, and the
scan adds Jacobians to it. The `reason` says so, with the factor.

Shapes: messages (B, states, r). Cost: about repeats + 1 Jacobians.
Source: the units of `timeline.py`. Limits: the first and the last region are taken to cost
as much as an inner one, though the last one also has the head, and runs where a lean region does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from papers.latent_bounded_interfaces.planner import EngineChoice, choose_engine
from papers.latent_bounded_interfaces.shape import SPREAD, Shape
from papers.latent_bounded_interfaces.timeline import Units
from topograd.errors import ConfigError, TopologyError
from topograd.interfaces.region_times import region_seconds
from topograd.interfaces.regions import Regions
from topograd.nn.config import Architecture, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.stack import Stack
from topograd.runs.topology_config import Jacobian
from topograd.topology.dag import Topology


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
    forward, vjp, local, whole = region_seconds(regions, inputs, jacobian, repeats)
    return Units(forward=forward, local=local, vjp=vjp, jacobian=whole)


def choose(
    stack: Stack, topology: Topology, inputs: Tensor, workers: int, jacobian: Jacobian = "loop"
) -> EngineChoice:
    """Measure this model here, and choose its backward for `workers` workers: 1, or one for each region."""
    count = Regions.of(stack, topology).count
    choose_engine(Units(jacobian=1.0), count, workers)  # a bad number of workers is refused before measuring
    return choose_engine(measure_units(stack, topology, inputs, jacobian), count, workers)
