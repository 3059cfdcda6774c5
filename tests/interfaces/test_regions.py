"""Reading a stack as a chain of regions: its messages, and each thing that is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from tests.oracles.interfaces import interface_forward
from topograd.errors import StackError, TopologyError
from topograd.interfaces.regions import Regions
from topograd.nn.config import Pool, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.stack import LayerContext
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology

CONTEXT = 12
CHAIN = Topology.regions("1,2,1")


def model(settings: SegmentInterface | None = None) -> GPT:
    torch.manual_seed(0)
    stack = GPT(layers=4, width=8, heads=2, vocab=11, context=CONTEXT).double()
    add_interfaces(stack, settings or SegmentInterface(segments=4, rank=4), 3, 8, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


def with_stage(index: int, stage: Stage) -> Topology:
    stages = list(CHAIN.stages)
    stages[index] = stage
    return replace(CHAIN, stages=tuple(stages))


@pytest.mark.parametrize("pool", ["tail", "mean", "cumulative"])
def test_messages_are_the_reference_s(pool: Pool) -> None:
    stack = model(SegmentInterface(segments=3, rank=4, pool=pool))
    regions = Regions.of(stack, CHAIN)
    assert regions.count == 3
    assert regions.relays == (stack.relay("interface-1"), stack.relay("interface-2"))
    inputs = torch.randint(11, (2, CONTEXT))
    x0 = stack.embed(inputs)
    ours = regions.messages(x0, stack.layer_context(x0, inputs))
    _, expected = interface_forward(stack, CHAIN, inputs)
    assert len(ours) == len(expected) == 2
    for message, slow in zip(ours, expected, strict=True):
        assert message.shape == (2, 2, 4)
        torch.testing.assert_close(message, slow, rtol=1e-12, atol=1e-13)


def test_one_region() -> None:
    with refused(TopologyError, setting="topology", given=1):
        Regions.of(model(), Topology.regions("4"))


def test_another_number_of_layers() -> None:
    with pytest.raises(TopologyError, match="the topology has 5 layers and the stack has 4"):
        Regions.of(model(), Topology.regions("1,2,2"))


def test_a_relay_that_is_no_interface() -> None:
    with refused(TopologyError, setting="relay", given="identity"):
        Regions.of(model(), Topology.chain("1,2,1", grad_scale=1.0))


def test_a_stack_without_interfaces() -> None:
    bare = GPT(layers=4, width=8, heads=2, vocab=11, context=CONTEXT)
    with pytest.raises(StackError, match="relay 'interface-1' is unknown"):
        Regions.of(bare, CHAIN)


@pytest.mark.parametrize(
    ("extra", "sources"),
    [
        (Edge(0), [(1, 1.0), (0, 0.0)]),
        (Edge(EMBEDDING, None, 0.5), [(1, 1.0), (EMBEDDING, 0.5)]),
    ],
)
def test_a_second_source(extra: Edge, sources: list[tuple[int, float]]) -> None:
    last = CHAIN.stages[2]
    bypass = with_stage(2, replace(last, sources=(*last.sources, extra)))
    with refused(TopologyError, setting="sources", given=sources):
        Regions.of(model(), bypass)


def test_a_source_that_is_not_the_region_before() -> None:
    skipping = with_stage(2, replace(CHAIN.stages[2], sources=(Edge(0, None, 1.0, "interface-2"),)))
    with refused(TopologyError, setting="sources", given=[(0, 1.0)]):
        Regions.of(model(), skipping)


def test_a_boundary_that_stops_gradient() -> None:
    stopped = with_stage(1, replace(CHAIN.stages[1], sources=(Edge(0, None, 0.5, "interface-1"),)))
    with refused(TopologyError, setting="sources", given=[(0, 0.5)]):
        Regions.of(model(), stopped)


def test_a_loss_in_between() -> None:
    with refused(TopologyError, setting="weight", given=0.5):
        Regions.of(model(), with_stage(1, replace(CHAIN.stages[1], weight=0.5)))


def test_a_frozen_region() -> None:
    root = Edge(EMBEDDING, grad_scale=0.0)
    frozen = (
        Stage(0, 1, (root,), weight=0.0, frozen=True),
        Stage(1, 4, (Edge(0, None, 0.0, "interface-1"),)),
    )
    with refused(TopologyError, setting="sources", given=[(EMBEDDING, 0.0)]):
        Regions.of(model(), Topology(4, frozen))


class _Wrapped(nn.Module):
    """A block with something behind it."""

    def __init__(self, block: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.block, self.inner = block, inner

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return self.inner(self.block(h, ctx))


@pytest.mark.parametrize(
    ("inner", "given"),
    [
        (nn.BatchNorm1d(CONTEXT), "BatchNorm1d"),
        (nn.SyncBatchNorm(CONTEXT), "SyncBatchNorm"),
        (nn.Dropout(0.1), 0.1),
        (nn.AlphaDropout(0.2), 0.2),
    ],
)
def test_what_makes_jacobians_wrong_is_refused_while_it_is_active(inner: nn.Module, given: object) -> None:
    stack = model()
    stack.layers[2] = _Wrapped(stack.layers[2], inner)
    with refused(StackError, setting="layers.2.inner", given=given):
        Regions.of(stack, CHAIN)
    assert Regions.of(stack.eval(), CHAIN).count == 3


def test_dropout_of_nothing_is_allowed() -> None:
    stack = model()
    stack.layers[2] = _Wrapped(stack.layers[2], nn.Dropout(0.0))
    assert Regions.of(stack, CHAIN).count == 3
