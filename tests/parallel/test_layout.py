"""Who runs what, and what that makes shared."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raising import refused
from topograd.errors import ParallelError
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.parallel.layout import Layout, deal, keep_own, present, shed
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_stages_are_dealt_in_order_and_as_even_as_can_be(costs: list[int], ranks: int) -> None:
    ranks = min(ranks, len(costs))
    owners = deal(costs, ranks)
    assert sorted(owners) == list(owners)
    assert set(owners) == set(range(ranks))
    largest = max(sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks))
    assert largest == _least(costs, ranks)


def _least(costs: list[int], ranks: int) -> int:
    """By trying every cut."""
    if ranks == 1:
        return sum(costs)
    return min(max(sum(costs[:i]), _least(costs[i:], ranks - 1)) for i in range(1, len(costs) - ranks + 2))


def small(topology: Topology) -> tuple[GPT, Plan]:
    stack = GPT(layers=topology.layers, width=16, heads=2, vocab=11, context=8)
    return stack, prepare(stack, topology)


def test_every_parameter_is_owned_once_or_shared() -> None:
    stack, plan = small(Topology.chain("1,1,2"))
    layout = Layout.of(plan, 3)
    shared = {id(p) for rank in range(3) for p in layout.shared(stack, rank)}
    owned = [id(p) for rank in range(3) for p in layout.owned(stack, rank)]
    assert len(owned) == len(set(owned))
    assert not shared & set(owned)
    assert shared | set(owned) == {id(p) for p in stack.parameters()}
    names = {name for name, p in stack.named_parameters() if id(p) in shared}
    assert names == {"embedding.weight", "previous.weight", "head.weight"}
    assert layout.names(stack, 1) == [n for n, _ in stack.named_parameters() if n.startswith("layers.1.")]


def test_parameters_belong_to_the_ranks_that_use_them() -> None:
    """One loss at the end: the head is the last rank's. x0 is read by all, or by the first rank alone."""
    topology = Topology.chain("1,1,2", grad_scale=1.0)
    *before, last = topology.stages
    topology = replace(topology, stages=(*(replace(stage, weight=0.0) for stage in before), last))
    for blend, readers in ((True, (0, 1, 2)), (False, (0,))):
        stack = GPT(layers=4, width=16, heads=2, vocab=11, context=8, x0_blend=blend)
        layout = Layout.of(prepare(stack, topology), 3, stack=stack)
        expected = {"embedding.weight": readers, "previous.weight": readers, "head.weight": (2,)}
        assert layout.readers == expected
        keep_own(stack, layout, 1)
        held = set(present(stack.state_dict())) - {n for n in stack.state_dict() if n.startswith("layers.1.")}
        assert held == ({"embedding.weight", "previous.weight"} if blend else set())
    stack, plan = small(Topology.chain("1,1,2"))
    assert set(Layout.of(plan, 3, stack=stack).readers.values()) == {(0, 1, 2)}


def test_a_message_goes_to_those_who_hear_it() -> None:
    _, plan = small(Topology.forest(["2", "1,1"]))
    layout = Layout.of(plan, 3)
    assert {(port.source, ranks) for port, ranks in layout.listeners.items()} == {(1, (2,))}
    prior = Layout.of(small(Topology.chain("1,1,2"))[1], 3, with_prior=True)
    assert {(port.source, ranks) for port, ranks in prior.listeners.items()} == {(0, (1, 2)), (1, (2,))}
    assert [port.source for port in prior.incoming(0, 2)] == [0]


def test_gradient_goes_back_over_ranks() -> None:
    _, plan = small(Topology.chain("1,1,2", grad_scale=0.5))
    layout = Layout.of(plan, 3)
    assert layout.back_edges == [(1, 0), (2, 0)]
    assert [layout.ahead(rank) for rank in range(3)] == [2, 1, 0], "as many batches as ranks lie behind"
    late = Layout.of(small(Topology.chain("1,1,2", grad_scale=0.5).with_gradient(delay=1))[1], 3)
    assert [late.ahead(rank) for rank in range(3)] == [0, 0, 0], "nobody waits"
    assert Layout.of(small(Topology.chain("1,1,2"))[1], 3).back_edges == []
    with refused(ParallelError, setting="stages", given=4):
        Layout.of(plan, 4)


def test_what_cannot_be_parted_stays_together() -> None:
    shared = Topology.cover([(0, 2), (1, 3)])
    with refused(ParallelError, setting="stages"):
        Layout.of(small(shared)[1], 2)
    assert Layout.of(small(shared)[1], 1).owners == (0, 0)
    overlapping = replace(Topology.chain("1,1,2", grad_scale=0.5), reach="next")
    with refused(ParallelError, setting="stages"):
        Layout.of(small(overlapping)[1], 2)


def test_what_is_shed_keeps_its_name_and_ties_and_no_memory() -> None:
    stack, plan = small(Topology.chain("1,1"))
    layer: Any = stack.layers[1]
    layer.twin = layer.mlp.up
    layout = Layout.of(plan, 2)
    names = list(stack.state_dict())
    shed(stack, [*layout.owned(stack, 0), *layout.shared(stack, 0)])
    assert list(stack.state_dict()) == names
    assert set(present(stack.state_dict())) == {name for name in names if not name.startswith("layers.1.")}
    assert layer.twin.weight is layer.mlp.up.weight
    assert not any(p.requires_grad for p in stack.layers[1].parameters())
