"""Nothing but the interfaces may join regions: chains pass, and every planted bypass is refused by name."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import TopologyError
from topograd.interfaces.separator import check_separator
from topograd.nn.config import ARCHITECTURES, Pool, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import SegmentRelay, add_interfaces
from topograd.nn.stack import LayerContext
from topograd.topology.dag import EMBEDDING, Edge, Topology

CONTEXT = 12
CHAIN = Topology.regions("2,2,2,1")
TAIL = SegmentInterface(segments=4, rank=4)


def model(settings: SegmentInterface = TAIL, **config: Any) -> GPT:
    """As it starts: output matrices and decoders are zero."""
    torch.manual_seed(0)
    sizes = {"layers": 7, "width": 8, "heads": 2, "vocab": 11, "context": CONTEXT, "ssm_state": 4}
    stack = GPT(**{**sizes, **config}).double()
    add_interfaces(stack, settings, 4, 8, CONTEXT)
    return stack


def tokens() -> Tensor:
    return torch.randint(11, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


def also_reads(region: int, edge: Edge) -> Topology:
    stages = list(CHAIN.stages)
    stages[region] = replace(stages[region], sources=(*stages[region].sources, edge))
    return replace(CHAIN, stages=tuple(stages))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("pool", ["tail", "mean", "cumulative"])
def test_chains_of_interfaces_pass(pool: Pool, architecture: str) -> None:
    stack = model(SegmentInterface(segments=4, rank=4, pool=pool), architecture=architecture)
    check_separator(stack, CHAIN, tokens())


def test_the_published_interface_is_a_separator_too() -> None:
    check_separator(model(SegmentInterface(segments=1, rank=4, pool="mean", causal=False)), CHAIN, tokens())


def test_the_canvas_is_allowed() -> None:
    check_separator(model(), also_reads(2, Edge(EMBEDDING, grad_scale=1.0)), tokens())


def test_an_interface_past_a_region_is_one_all_the_same() -> None:
    stack = model()
    stack.add_relay("far", SegmentRelay(TAIL, 8, CONTEXT, first=True).double())
    check_separator(stack, also_reads(3, Edge(0, relay="far")), tokens())


@pytest.mark.parametrize(
    ("region", "edge", "named"),
    [
        (3, Edge(1), r"layers\.3 \(region 2\) reaches region 4 .*: an edge from layers\.3 \(region 2\)"),
        (
            3,
            Edge(0, layer=1),
            r"layers\.0 \(region 1\) reaches region 4 .*: an edge from layers\.0 \(region 1\)",
        ),
        (
            1,
            Edge(0, layer=1),
            r"layers\.0 \(region 1\) reaches region 2 .*: an edge from layers\.0 \(region 1\)",
        ),
    ],
)
def test_an_edge(region: int, edge: Edge, named: str) -> None:
    with pytest.raises(TopologyError, match=f"{named}.* 'identity' leads there; remove that path") as caught:
        check_separator(model(), also_reads(region, edge), tokens())
    assert "\n" not in str(caught.value)


def test_a_chain_without_interfaces() -> None:
    with pytest.raises(TopologyError, match=r"layers\.1 \(region 1\) reaches region 2 past the interface"):
        check_separator(model(), Topology.chain("2,2,3"), tokens())


def test_one_region_has_nothing_to_separate() -> None:
    check_separator(model(), Topology.regions("7"), tokens())


class _Keeps(nn.Module):
    """A block that keeps what it reads or returns."""

    kept: Tensor

    def __init__(self, block: nn.Module, what: str = "output") -> None:
        super().__init__()
        self.block, self.what = block, what

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        out = self.block(h, ctx)
        self.kept = h if self.what == "input" else out
        return out


class _Reads(nn.Module):
    """A block that adds what another has kept, times a matrix that starts at zero."""

    def __init__(self, block: nn.Module, other: Any) -> None:
        super().__init__()
        self.block, self.other = block, [other]  # in a list: no submodule
        self.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return self.block(h + self.other[0].kept @ self.weight, ctx)


@pytest.mark.parametrize("what", ["input", "output"])
@pytest.mark.parametrize(
    ("writer", "reader", "named"),
    [
        (0, 6, r"layers\.0 \(region 1\) reaches region 4 .* layers\.6 changes"),
        (3, 6, r"layers\.3 \(region 2\) reaches region 4 .* layers\.6 changes"),
        (2, 5, r"layers\.2 \(region 2\) reaches region 3 .* layers\.5 changes"),
        (1, 2, r"layers\.1 \(region 1\) reaches region 2 .* layers\.2 changes"),
    ],
)
def test_a_hidden_attribute(writer: int, reader: int, named: str, what: str) -> None:
    stack = model()
    stack.layers[writer] = _Keeps(stack.layers[writer], what)
    stack.layers[reader] = _Reads(stack.layers[reader], stack.layers[writer])
    with pytest.raises(TopologyError, match=named):
        check_separator(stack, CHAIN, tokens())


def test_an_attribute_within_a_region_is_nobody_s_business() -> None:
    stack = model()
    stack.layers[2] = _Keeps(stack.layers[2])
    stack.layers[3] = _Reads(stack.layers[3], stack.layers[2])
    check_separator(stack, CHAIN, tokens())


class _Memory(nn.Module):
    """A module that two layers share: its buffer is what the first of them wrote."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, h: Tensor, write: bool) -> Tensor:
        if write:
            self.mean.mul_(0.9).add_(0.1 * h.mean((0, 1)))
            return h
        return h + self.mean


class _Shares(nn.Module):
    def __init__(self, block: nn.Module, memory: _Memory, write: bool) -> None:
        super().__init__()
        self.block, self.memory, self.write = block, memory, write

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return self.memory(self.block(h, ctx), self.write)


def test_module_state() -> None:
    stack, memory = model(), _Memory()
    stack.layers[2] = _Shares(stack.layers[2], memory, write=True)
    stack.layers[5] = _Shares(stack.layers[5], memory, write=False)
    before = copy.deepcopy(stack.state_dict())
    with pytest.raises(TopologyError, match=r"layers\.2 \(region 2\) reaches region 3 .* layers\.5 changes"):
        check_separator(stack, CHAIN, tokens())
    after = stack.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "all is put back"


class _KeepingRelay(SegmentRelay):
    """An interface that keeps what it has decoded."""

    kept: Tensor

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        self.kept = super().receive(message, ctx)
        return self.kept


def test_a_relay_that_keeps_what_it_received() -> None:
    """No layer's noise can show this one: the message itself goes on to a region further behind."""
    stack = model()
    stack.add_relay("interface-1", _KeepingRelay(TAIL, 8, CONTEXT, first=True).double())
    stack.layers[5] = _Reads(stack.layers[5], stack.relays["interface-1"])
    with pytest.raises(
        TopologyError, match=r"its message \(region 2\) reaches region 3 .* layers\.5 changes"
    ):
        check_separator(stack, CHAIN, tokens())


def test_a_path_to_the_readout() -> None:
    stack = model()
    keeps = _Keeps(stack.layers[1])
    stack.layers[1] = keeps
    plain = stack.readout
    stack.readout = lambda h, stage, rows=None: plain(h + keeps.kept, stage, rows)  # type: ignore[method-assign]
    with pytest.raises(
        TopologyError, match=r"layers\.1 \(region 1\) reaches region 4 .* its readout changes"
    ):
        check_separator(stack, CHAIN, tokens())


def test_what_differs_from_run_to_run_is_refused() -> None:
    class Dropping(nn.Module):
        def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
            return nn.functional.dropout(h, 0.5, self.training)

    stack = model()
    stack.layers[4] = Dropping()
    with refused(TopologyError, setting="stack", given="layers.4"):
        check_separator(stack, CHAIN, tokens())
    check_separator(stack.eval(), CHAIN, tokens())


def test_a_path_to_the_next_forward_is_refused() -> None:
    """An early layer reads what a late one kept in the forward before."""
    stack = model()
    keeps = _Keeps(stack.layers[5])
    keeps.kept = torch.zeros(2, CONTEXT, 8, dtype=torch.float64)
    stack.layers[5] = keeps
    stack.layers[0] = _Reads(stack.layers[0], keeps)
    with refused(TopologyError, setting="stack", given="layers.0"):
        check_separator(stack, CHAIN, tokens())


def test_the_stack_is_left_as_it_was() -> None:
    stack = model()
    before = copy.deepcopy(stack.state_dict())
    random_state = torch.get_rng_state()
    check_separator(stack, CHAIN, tokens())
    after = stack.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None and p.requires_grad for p in stack.parameters())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in stack.layers)
