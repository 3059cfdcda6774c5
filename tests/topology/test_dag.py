"""The stage DAG: its named points stage by stage, and one clear line for what does not exist."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest

from raising import refused
from topograd.errors import TopologyError
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology, own_relay
from topograd.topology.plan import Plan

ROOT = Edge(EMBEDDING, grad_scale=1.0)
WHOLE = Stage(0, 3, (ROOT,))


def intervals(topology: Topology) -> list[tuple[int, int]]:
    return [(stage.start, stage.stop) for stage in topology.stages]


def heard(topology: Topology) -> list[list[tuple[int, int | None, float]]]:
    return [[(e.source, e.layer, e.grad_scale) for e in stage.sources] for stage in topology.stages]


@pytest.mark.parametrize("given", ["2,1,3", Composition.parse("2,1,3"), Configuration.parse("2,1,3")])
def test_chain_follows_the_partition(given: str | Composition | Configuration) -> None:
    topology = Topology.chain(given)
    assert topology.layers == 6
    assert intervals(topology) == [(0, 2), (2, 3), (3, 6)]
    assert heard(topology) == [[(EMBEDDING, None, 1.0)], [(0, None, 0.0)], [(1, None, 0.0)]]
    assert (topology.heads, topology.bus, topology.reduction) == ("shared", "live", "mean")
    assert all(stage.weight == 1 and stage.objective == "cross-entropy" for stage in topology.stages)


def test_chain_takes_everything_else_by_name() -> None:
    configuration = Configuration.parse("1,1", heads="per-stage")
    topology = Topology.chain(
        configuration, grad_scale=0.25, objective="residual", bus="detached", reduction="sum"
    )
    assert heard(topology)[1] == [(0, None, 0.25)]
    assert [stage.objective for stage in topology.stages] == ["residual", "residual"]
    assert (topology.heads, topology.bus, topology.reduction) == ("per-stage", "detached", "sum")
    assert type(topology.heads) is str


def test_soft_has_a_boundary_after_every_layer_and_weights_one_minus_lambda() -> None:
    topology = Topology.soft([0.25, 1.0, 0.0], heads="per-stage")
    assert intervals(topology) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [stage.weight for stage in topology.stages] == [0.75, 0.0, 1.0, 1.0]
    assert [edges[0][2] for edges in heard(topology)] == [1.0, 0.25, 1.0, 0.0]
    assert topology.heads == "per-stage"
    assert Topology.soft([]) == Topology.chain("1")


def test_forest_is_several_chains_from_the_input() -> None:
    topology = Topology.forest(["1,2", Composition.parse("2")])
    assert intervals(topology) == [(0, 1), (1, 3), (3, 5)]
    assert heard(topology) == [[(EMBEDDING, None, 1.0)], [(0, None, 0.0)], [(EMBEDDING, None, 1.0)]]


def test_cover_starts_where_an_earlier_interval_passed() -> None:
    topology = Topology.cover([(0, 3), (1, 4), (0, 2), (4, 5)])
    assert topology.layers == 5
    assert heard(topology) == [
        [(EMBEDDING, None, 1.0)],
        [(0, 1, 0.0)],
        [(EMBEDDING, None, 1.0)],
        [(1, 4, 0.0)],
    ]


def test_cover_hears_the_latest_of_those_that_passed() -> None:
    assert heard(Topology.cover([(0, 3), (1, 4), (2, 5)]))[2] == [(1, 2, 0.0)]


def test_cover_by_a_partition_is_the_hard_chain() -> None:
    cover, chain = Topology.cover([(0, 2), (2, 3)]), Topology.chain("2,1")
    assert [[c.source_layer(e) for e in s.sources] for c in (cover, chain) for s in c.stages][:2] == [
        [chain.source_layer(e) for e in s.sources] for s in chain.stages
    ]
    assert intervals(cover) == intervals(chain)


def test_input_bus_reaches_every_stage_but_the_roots() -> None:
    topology = Topology.forest(["1,1", "1,1"]).with_input_bus()
    assert heard(topology) == [
        [(EMBEDDING, None, 1.0)],
        [(0, None, 0.0), (EMBEDDING, None, 0.0)],
        [(EMBEDDING, None, 1.0)],
        [(2, None, 0.0), (EMBEDDING, None, 0.0)],
    ]


def test_input_bus_from_an_early_layer_reaches_those_who_come_later_and_do_not_hear_it() -> None:
    topology = Topology.chain("2,1,1").with_input_bus(Edge(0, layer=1))
    assert heard(topology)[1:] == [[(0, None, 0.0), (0, 1, 0.0)], [(1, None, 0.0), (0, 1, 0.0)]]
    end = Topology.chain("2,1,1").with_input_bus(Edge(0, layer=2))
    assert heard(end)[1:] == [[(0, None, 0.0)], [(1, None, 0.0), (0, 2, 0.0)]]


def test_input_bus_leaves_roots_alone_wherever_it_comes_from() -> None:
    forest = Topology.forest(["1,1", "1"])
    assert forest.with_input_bus(Edge(0)).stages[2] == forest.stages[2]


def test_two_input_buses_add_up() -> None:
    topology = Topology.chain("2,1,1").with_input_bus().with_input_bus(Edge(0, layer=1)).with_input_bus()
    assert heard(topology)[2] == [(1, None, 0.0), (EMBEDDING, None, 0.0), (0, 1, 0.0)]


def relays(topology: Topology) -> list[list[str]]:
    return [[edge.relay for edge in stage.sources] for stage in topology.stages]


def test_relays_are_one_for_each_edge_between_stages() -> None:
    topology = Topology.chain("1,1,1", grad_scale=0.3).with_relays("gate")
    assert relays(topology) == [["identity"], ["gate-1"], ["gate-2"]]
    assert heard(topology) == heard(Topology.chain("1,1,1", grad_scale=0.3))
    assert relays(topology.with_relays("pre-norm")) == [["identity"], ["pre-norm"], ["pre-norm"]]
    assert relays(Topology.forest(["1,1", "1,1"]).with_relays("gate"))[2:] == [["identity"], ["gate-3"]]


def test_an_input_bus_has_a_relay_for_each_listener() -> None:
    ctx = Edge(0, layer=1, relay="low-rank")
    topology = Topology.chain("2,1,1").with_relays("gate").with_input_bus(ctx).with_input_bus()
    assert relays(topology)[1:] == [
        ["gate-1", "low-rank-1-beside-1", "identity"],
        ["gate-2", "low-rank-2-beside-1", "identity"],
    ]
    names = [own_relay(kind, k, i) for kind in ("gate", "low-rank") for k in (1, 11) for i in (0, 1, 11)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("source", [2, 3, 7])
def test_an_input_bus_from_downstream_is_one_clear_line(source: int) -> None:
    with refused(TopologyError, setting="source") as raised:
        Topology.chain("1,1,1").with_input_bus(Edge(source))
    assert "\n" not in str(raised.value)


def test_an_input_bus_on_backprop_changes_nothing() -> None:
    assert Topology.chain("3").with_input_bus() == Topology.chain("3")


def test_a_specialist_knows_which_of_its_base_never_had_a_loss() -> None:
    topology = Topology.regions("1,1").with_specialist(1)
    assert [stage.head for stage in topology.stages] == [False, True, True]
    assert [stage.head for stage in topology.with_specialist(1).stages] == [False, True, True, True]


@pytest.mark.parametrize("grad_scale", [0.0, 1.0])
def test_specialist_comes_last_on_a_frozen_base(grad_scale: float) -> None:
    base = Topology.chain("2,1", grad_scale=grad_scale)
    topology = base.with_specialist(2, "residual")
    assert topology.layers == 5
    assert topology.heads == "per-stage"
    assert [(s.frozen, s.weight) for s in topology.stages] == [(True, 0.0), (True, 0.0), (False, 1.0)]
    assert topology.stages[2] == Stage(3, 5, (Edge(1),), "residual")
    again = topology.with_specialist(1)
    assert [s.frozen for s in again.stages] == [True, True, True, False]


def test_a_tap_without_a_layer_is_the_end_of_its_source() -> None:
    topology = Topology.chain("2,3")
    assert topology.source_layer(Edge(1)) == (1, 5)
    assert topology.source_layer(Edge(0, layer=1)) == (0, 1)
    assert topology.source_layer(Edge(EMBEDDING)) == (EMBEDDING, 0)


def test_topologies_are_values() -> None:
    topology = Topology.chain("1,2")
    assert topology == Topology.chain("1,2") != Topology.chain("2,1")
    assert hash(topology) == hash(Topology.chain("1,2"))
    with pytest.raises(FrozenInstanceError):
        topology.layers = 4  # type: ignore[misc]


def after(edge: Edge, **stage: object) -> tuple[Stage, ...]:
    """Stages 0..2 and 2..3, of which the second hears `edge`."""
    return Stage(0, 2, (ROOT,)), replace(Stage(2, 3, (edge,)), **stage)  # type: ignore[arg-type]


TWICE = (Edge(0), Edge(0, layer=2))


@pytest.mark.parametrize(
    ("stages", "setting", "given"),
    [
        ((), "stages", ()),
        ((Stage(2, 2, (ROOT,)),), "stop", 2),
        ((Stage(-1, 3, (ROOT,)),), "stop", 3),
        ((Stage(0, 4, (ROOT,)),), "stop", 4),
        ((Stage(0, 2, (ROOT,)),), "stages", [2]),
        ((Stage(1, 2, (ROOT,)),), "stages", [0, 2]),
        ((replace(WHOLE, weight=-1.0),), "weight", -1.0),
        ((replace(WHOLE, weight=math.nan),), "weight", math.nan),
        ((replace(WHOLE, weight=math.inf),), "weight", math.inf),
        ((replace(WHOLE, weight=0.0),), "weight", 0),
        ((replace(WHOLE, frozen=True),), "weight", 1.0),
        ((replace(WHOLE, every=0),), "every", 0),
        ((replace(WHOLE, sources=()),), "sources", ()),
        ((replace(WHOLE, sources=(ROOT, Edge(EMBEDDING))),), "sources", (ROOT, Edge(EMBEDDING))),
        (after(Edge(0), sources=TWICE), "sources", TWICE),
        (after(Edge(0, grad_scale=1.5)), "grad_scale", 1.5),
        (after(Edge(0, grad_scale=-0.1)), "grad_scale", -0.1),
        (after(Edge(0, grad_scale=math.nan)), "grad_scale", math.nan),
        (after(Edge(1)), "source", 1),
        (after(Edge(2)), "source", 2),
        (after(Edge(-2)), "source", -2),
        (after(Edge(EMBEDDING, layer=1)), "layer", 1),
        (after(Edge(0, layer=0)), "layer", 0),
        (after(Edge(0, layer=3)), "layer", 3),
        (
            (Stage(0, 2, (ROOT,), weight=0.0, frozen=True), Stage(2, 3, (Edge(0, grad_scale=0.5),))),
            "grad_scale",
            0.5,
        ),
    ],
)
def test_what_does_not_exist_is_one_clear_line(
    stages: tuple[Stage, ...], setting: str, given: object
) -> None:
    with refused(TopologyError, setting=setting) as caught:
        Topology(3, stages)
    assert repr(caught.value.given) == repr(given)  # nan is not equal to itself


@pytest.mark.parametrize("name", ["heads", "bus", "reduction", "reach"])
def test_unknown_choices_name_the_known(name: str) -> None:
    with refused(TopologyError, setting=name, given="both"):
        replace(Topology.chain("3"), **{name: "both"})  # type: ignore[arg-type]


def test_constructors_refuse_what_they_cannot_build() -> None:
    with refused(TopologyError, setting="intervals"):
        Topology.cover([(0, 1), (2, 4)])
    with refused(TopologyError, setting="stages"):
        Topology.cover([])
    with refused(TopologyError, setting="stages"):
        Topology.forest([])
    with refused(TopologyError, setting="grad_scale", given=2.0):
        Topology.soft([2.0])
    with refused(TopologyError, setting="stop", given=2):
        Topology.chain("2").with_specialist(-1)
    with refused(TopologyError, setting="depth", given=0):
        Topology.chain("2").with_decoders(0)


def test_more_layers_than_any_machine_has_are_refused_at_once() -> None:
    for build in (
        lambda: Topology.cover([(0, 10**15)]),
        lambda: Topology.chain("1,1").with_decoders(10**15),
        lambda: Topology(10**15, (Stage(0, 10**15, (ROOT,)),)),
    ):
        with refused(TopologyError, setting="layers"):
            build()


def test_private_decoders_are_stages_that_nobody_hears() -> None:
    base = Topology.chain(Configuration.parse("2,1", heads="per-stage"), objective="residual")
    topology = base.with_decoders(2).with_relays("gate")
    assert topology.layers == 7
    assert intervals(topology) == [(0, 2), (3, 5), (2, 3), (5, 7)]
    assert [stage.weight for stage in topology.stages] == [0.0, 1.0, 0.0, 1.0]
    assert [stage.objective for stage in topology.stages] == ["residual"] * 4
    assert heard(topology) == [
        [(EMBEDDING, None, 1.0)],
        [(0, None, 1.0)],
        [(0, None, 0.0)],
        [(2, None, 1.0)],
    ]
    assert (topology.heads, topology.prediction) == ("per-stage", "sum")


def test_a_stage_without_a_loss_gets_no_decoder() -> None:
    topology = Topology.soft([1.0, 0.0]).with_decoders(1)
    assert intervals(topology) == [(0, 1), (1, 2), (3, 4), (2, 3), (4, 5)]
    assert [stage.weight for stage in topology.stages] == [0.0, 0.0, 1.0, 0.0, 1.0]


def test_decoders_of_all_but_the_last_stage() -> None:
    decoded = Topology.chain("2,2,2").with_decoders(1, last=False)
    assert decoded.layers == 8
    assert [(s.start, s.stop, s.weight) for s in decoded.stages] == [
        (0, 2, 0.0),
        (6, 7, 1.0),
        (2, 4, 0.0),
        (7, 8, 1.0),
        (4, 6, 1.0),
    ]
    plan = Plan.of(decoded, 8)
    assert plan.prediction.kind == "last"
    assert [layer for p in plan.needed(plan.last) for layer in p.layers] == [0, 1, 2, 3, 4, 5]
    with refused(TopologyError, setting="last", given=False):
        Topology.chain("1,1", objective="residual").with_decoders(1, last=False)


@pytest.mark.parametrize(
    ("edge", "setting"),
    [
        (Edge(0, grad_scale=1.0, delay=-1), "delay"),
        (Edge(0, grad_scale=1.0, delay=65), "delay"),
        (Edge(0, grad_scale=1.0, delay=True), "delay"),
        (Edge(0, grad_scale=1.0, grad_bits=5), "grad_bits"),
        (Edge(EMBEDDING, grad_scale=1.0, delay=1), "delay"),
        (Edge(EMBEDDING, grad_scale=1.0, grad_bits=4), "grad_bits"),
    ],
)
def test_when_and_in_how_many_bits_a_gradient_comes(edge: Edge, setting: str) -> None:
    root = Stage(0, 1, (Edge(EMBEDDING, grad_scale=1.0),))
    with refused(TopologyError, setting=setting, given=getattr(edge, setting)):
        Topology(2, (root, Stage(1, 2, (edge,))))


@pytest.mark.parametrize("bits", [1, 2])
def test_too_few_bits_are_refused_with_the_reason(bits: int) -> None:
    with refused(TopologyError, setting="grad_bits", given=bits) as caught:
        Topology.chain("1,1", grad_scale=1.0).with_gradient(bits=bits)
    assert "less than with no gradient" in str(caught.value)


def test_a_delay_is_refused_where_gradient_reaches_the_next_stage_only() -> None:
    late = Topology.chain("1,1", grad_scale=1.0).with_gradient(delay=1)
    with refused(TopologyError, setting="delay"):
        replace(late, reach="next")
