"""Interfaces that add to the hidden state behind the first layers: against one graph of plain calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raising import refused
from tests.interfaces.test_forms import CONTEXT, FORMS, VOCAB, WIDTH, assert_same, batch, first, taken
from topograd.errors import ConfigError, TopologyError
from topograd.exec.forward import Predictor
from topograd.exec.gradient import Autograd, GradientEngine
from topograd.exec.train_step import train_step
from topograd.interfaces.engines import Hybrid, Scan
from topograd.interfaces.region_times import middle_region
from topograd.interfaces.regions import Regions
from topograd.interfaces.separator import check_separator
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import parse_interface
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.dag import CANVAS, Edge, Stage, Topology
from topograd.topology.plan import Plan

PARTITION = "2,1,1,1"
ENGINES: dict[str, GradientEngine] = {
    "autograd": Autograd(),
    "loop": Scan(),
    "batched-untrimmed": Scan("batched", trimmed=False),
    "forward": Scan("forward", 4),
    "hybrid": Hybrid(),
    "all-carried": Hybrid(carried=2),
}


def model(form: str, canvas: int, architecture: str = "transformer") -> tuple[GPT, Topology]:
    """A GPT of four regions with noise on every parameter."""
    topology = Topology.regions(PARTITION, first_region=first(form).first_region, canvas=canvas)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "layers": 5,
        "width": WIDTH,
        "heads": 2,
        "vocab": VOCAB,
        "context": CONTEXT,
        "ssm_state": 4,
    }
    stack = GPT(**sizes, architecture=architecture).double()
    add_interfaces(stack, FORMS[form], 4, WIDTH, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack, topology


def slow_logits(stack: Any, canvas: int, inputs: Tensor) -> Tensor:
    """Layer by layer: a region behind the first reads its message with the canvas in place of x0."""
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    relays = stack.learned_relays()
    h = relays["interface-0"].receive(x0, ctx) if "interface-0" in relays else x0
    base, message = x0, x0
    for k, layers in enumerate(([0, 1], [2], [3], [4])):
        if k:
            h = relays[f"interface-{k}"].receive(message, replace(ctx, x0=base))
        for layer in layers:
            h = stack.layers[layer](h, ctx)
            if layer + 1 == canvas:
                base = h
        if k < 3:
            message = relays[f"interface-{k + 1}"].send(h, message)
    return stack.readout(h, 3)


def slow(stack: GPT, canvas: int) -> dict[str, Tensor]:
    inputs, targets = batch()
    F.cross_entropy(slow_logits(stack, canvas, inputs).flatten(0, 1), targets.flatten()).backward()
    return taken(stack)


@pytest.mark.parametrize("canvas", [1, 2])
@pytest.mark.parametrize("form", ["residual", "published", "monarch", "attention", "bypass", "own"])
@pytest.mark.parametrize("way", ENGINES)
def test_every_gradient_is_that_of_one_graph(form: str, canvas: int, way: str) -> None:
    stack, topology = model(form, canvas)
    expected = slow(stack, canvas)
    assert "layers.0.attention.query.weight" in expected, "the canvas's own layers learn"
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("form", ["residual", "monarch"])
def test_recomputed_and_other_layers(form: str) -> None:
    for architecture in ("transformer", "mamba2", "hybrid"):
        stack, topology = model(form, 1, architecture)
        expected = slow(stack, 1)
        train_step(stack, topology, *batch(), gradient=Scan(), recompute=True)
        assert_same(taken(stack), expected)


def test_formulas_by_hand() -> None:
    stack, topology = model("monarch", 1)
    expected = slow(stack, 1)
    train_step(stack, topology, *batch(), gradient=Scan("pullback"))
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("canvas", [1, 2])
def test_of_full_rank_it_is_the_dense_model(canvas: int) -> None:
    stack: Any
    stack, topology = model("residual-full", canvas)
    inputs, _ = batch()
    with torch.no_grad():
        for relay in stack.learned_relays().values():
            relay.basis.copy_(torch.linalg.qr(relay.basis).Q)  # the noise bent it
        actual = Predictor(stack, topology)(inputs)
        del stack.relays
        torch.testing.assert_close(actual, stack(inputs), rtol=1e-11, atol=1e-12)


def test_the_canvas_is_no_path_past_the_interfaces() -> None:
    stack, topology = model("residual", 1)
    check_separator(stack, topology, batch()[0])
    assert Plan.of(topology, 5).prediction.kind == "last"


def test_the_region_that_is_timed_has_its_canvas() -> None:
    stack, topology = model("residual", 1)
    region, message, ctx = middle_region(Regions.of(stack, topology), batch()[0])
    x0 = stack.embed(batch()[0])
    assert ctx.canvas is not None
    torch.testing.assert_close(ctx.canvas, stack.layers[0](x0, stack.layer_context(x0, batch()[0])))
    assert (region, message.shape) == (2, (2, CONTEXT, 3))


def test_refused() -> None:
    for canvas in (-1, 3):
        with refused(TopologyError, setting="canvas", given=canvas):
            Topology.regions(PARTITION, canvas=canvas)
    with refused(ConfigError, setting="canvas", given=3):
        TopologyConfig(partition="2,2", interface="residual:r=2", canvas=3).build(4)
    with refused(ConfigError, setting="canvas", given=1):
        TopologyConfig(partition="2,2", canvas=1)
    with refused(TopologyError, setting="sources"):
        Topology(2, (Stage(0, 1, (Edge(-1),)), Stage(1, 2, (Edge(0, relay=CANVAS),))))
    stack, topology = model("residual", 1)
    cut = replace(topology.stages[2], sources=(topology.stages[2].sources[0], Edge(0, 1, 0.0, CANVAS)))
    stages = (*topology.stages[:2], cut, topology.stages[3])
    with refused(TopologyError, setting="sources"):
        Regions.of(stack, replace(topology, stages=stages))


def test_in_settings() -> None:
    built = TopologyConfig(partition="2,1,1", interface="residual:r=2", canvas=1).build(4)
    assert built == Topology.regions("2,1,1", "residual:r=2", canvas=1)
    assert parse_interface("residual:r=2").first_region == 1
