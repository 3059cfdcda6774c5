"""Networks on images keep the stack's contract: one executor, shapes that change, heads that pool."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raising import refused
from tests.oracles.train_step import graph_losses
from topograd.errors import StackError
from topograd.exec.train_step import train_step
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import ImageStack, make_image_stack
from topograd.nn.preparation import prepare
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Edge, Stage, Topology

Make = Callable[..., ImageStack]
Batch = tuple[Tensor, Tensor]


def gradients(stack: ImageStack) -> dict[str, Tensor]:
    return {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}


@pytest.mark.covers("images", "train", feature="topologies")
@pytest.mark.parametrize("partition", ["3", "1,2", "1,1,1"])
@pytest.mark.parametrize("grad_scale", [0.0, 0.5, 1.0])
def test_every_network_learns_as_the_reference_says(
    network: ImageConfig, partition: str, grad_scale: float, batch: Batch
) -> None:
    torch.manual_seed(0)
    topology = Topology.chain(partition, grad_scale=grad_scale)
    stack = make_image_stack(network, topology).double()
    plan = prepare(stack, topology)
    losses = train_step(stack, plan, *batch)
    ours = gradients(stack)
    stack.zero_grad()
    total, expected = graph_losses(stack, topology, *batch)
    total.backward()
    theirs = gradients(stack)
    torch.testing.assert_close(losses, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)


def test_no_gradient_crosses_a_boundary(network: ImageConfig, batch: Batch) -> None:
    """A stage's loss trains its own layers and heads alone."""
    topology = replace(Topology.chain("1,1,1"), bus="detached")
    first = replace(topology.stages[0], weight=0.0)
    second = replace(topology.stages[1], weight=0.0)
    topology = replace(topology, stages=(first, second, topology.stages[2]))
    stack = make_image_stack(network, topology).double()
    train_step(stack, prepare(stack, topology), *batch)
    assert all(name.startswith(("layers.2.", "head.")) for name in gradients(stack))


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet", "vit"])
def test_own_heads_start_as_the_shared_one(name: str, small: Make, batch: Batch) -> None:
    shared, own = small(name, "1,1,1"), small(name, "1,1,1")
    prepare(own, Topology.chain(Configuration.parse("1,1,1", heads="per-stage")))
    assert own.has_head(1)
    assert len(own.head_parameters(2)) == 1
    own.eval(), shared.eval()
    assert torch.equal(own(batch[0]), shared(batch[0]))


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet", "vit"])
def test_appended_layers_change_nothing_at_first(name: str, small: Make, batch: Batch) -> None:
    topology = Topology.chain("1,1,1").with_specialist(2)
    stack = small(name, topology).eval()
    h = stack.embed(batch[0])
    ctx = stack.layer_context(h, batch[0])
    before = h
    for i, layer in enumerate(stack.layers):
        h = layer(h, ctx)
        before = h if i == 2 else before
    assert torch.equal(h, before)


@pytest.mark.covers("images", "train", feature="topologies")
@pytest.mark.covers("images", "train", feature="relays")
@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet", "vit"])
def test_forests_and_decoders_are_built_for_their_places(name: str, small: Make, batch: Batch) -> None:
    forest = Topology.forest(["1,1,1", "3"])
    stack = small(name, forest)
    assert stack.shapes[:3] == stack.shapes[3:]
    assert train_step(stack, prepare(stack, forest), *batch).isfinite().all()
    decoded = Topology.chain("1,1,1").with_decoders(1)
    stack = small(name, decoded)
    assert [given for _, given in stack.shapes[3:]] == [given for _, given in stack.shapes[:3]]
    result = train_step(stack, prepare(stack, decoded), *batch)
    assert result[1::2].isfinite().all()
    assert result[::2].isnan().all()


def test_a_frozen_stage_does_not_move(small: Make, batch: Batch) -> None:
    topology = Topology.chain("1,1,1").with_specialist(1)
    stack = small("resnet", topology)
    plan = prepare(stack, topology)
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    train_step(stack, plan, *batch)
    moved = {name for name, value in stack.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("layers.3.") for name in moved)
    assert all(module.training for module in stack.modules())


def test_what_does_not_fit_is_refused(small: Make, batch: Batch) -> None:
    stack = small("vgg", "1,1,1")
    skipping = Topology(
        3, (Stage(0, 1, (Edge(-1, grad_scale=1.0),)), Stage(1, 2, (Edge(0),)), Stage(2, 3, (Edge(-1),)))
    )
    with refused(StackError, setting="topology"):
        prepare(stack, skipping)
    with refused(StackError, setting="inputs"):
        stack(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    with refused(StackError, setting="relay"):
        _ = stack.width


def test_images_are_normalised(small: Make) -> None:
    stack = small("vgg")
    white = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
    assert torch.allclose(stack.embed(white), torch.ones(1, 1, 8, 8, dtype=torch.float64))
