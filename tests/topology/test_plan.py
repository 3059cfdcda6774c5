"""The compiled topology: ports, listeners, scales, and when a message may be forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raising import refused
from topograd.errors import TopologyError
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import EdgeOutput, Plan

ROOT = Edge(EMBEDDING, grad_scale=1.0)
X0 = EdgeOutput(EMBEDDING, 0, "identity")

DAG = Topology(
    6,
    (
        Stage(0, 3, (ROOT,)),
        Stage(3, 4, (Edge(0, layer=2), Edge(EMBEDDING)), weight=2.0),
        Stage(3, 5, (Edge(0, grad_scale=0.5), Edge(0, layer=2, grad_scale=1.0)), weight=0.0),
        Stage(5, 6, (Edge(1, grad_scale=0.3), Edge(2, grad_scale=1.0), Edge(0))),
    ),
)
"""Stage 0 speaks after layers 2 and 3, stages 1 and 2 share layer 3, stage 3 joins them all."""


def port(source: int, layer: int) -> EdgeOutput:
    return EdgeOutput(source, layer, "identity")


def test_ports_are_what_is_heard_each_once() -> None:
    plan = Plan.of(DAG, 6)
    assert [p.outputs for p in plan.stages] == [(port(0, 2), port(0, 3)), (port(1, 4),), (port(2, 5),), ()]
    assert [p.inputs for p in plan.stages] == [
        ((X0, 1.0),),
        ((port(0, 2), 0.0), (X0, 0.0)),
        ((port(0, 3), 0.5), (port(0, 2), 1.0)),
        ((port(1, 4), 0.3), (port(2, 5), 1.0), (port(0, 3), 0.0)),
    ]
    assert [list(p.layers) for p in plan.stages] == [[0, 1, 2], [3], [3, 4], [5]]


def test_listeners_are_the_stages_that_send_gradient_back() -> None:
    """Stage 2 sends through two ports of stage 0 and counts once; detached listeners do not count."""
    plan = Plan.of(DAG, 6)
    assert [p.num_grad_consumers for p in plan.stages] == [1, 1, 1, 0]
    assert [plan.gradient_sources(k) for k in range(4)] == [[], [], [0], [1, 2]]
    assert [p.num_grad_consumers for p in Plan.of(Topology.chain("1,1,1"), 3).stages] == [0, 0, 0]
    assert [p.num_grad_consumers for p in Plan.of(Topology.chain("1,1,1", grad_scale=0.1), 3).stages] == [
        1,
        1,
        0,
    ]


def test_a_port_is_forgotten_after_its_last_listener() -> None:
    plan = Plan.of(DAG, 6)
    forgotten = [set(p.last_use) for p in plan.stages]
    assert forgotten == [set(), {X0}, {port(0, 2)}, {port(0, 3), port(1, 4), port(2, 5)}]
    every = {p for planned in plan.stages for p, _ in planned.inputs}
    assert set.union(*forgotten) == every, "each port once, none for ever"


def test_relays_make_ports_of_their_own() -> None:
    stages = (Stage(0, 1, (ROOT,)), Stage(1, 2, (Edge(0),)), Stage(2, 3, (Edge(0, relay="gate"),)))
    plan = Plan.of(Topology(3, stages), 3)
    assert plan.stages[0].outputs == (EdgeOutput(0, 1, "identity"), EdgeOutput(0, 1, "gate"))


@pytest.mark.parametrize(
    ("reduction", "scales"), [("mean", [0.25, 0.5, 0.0, 0.25]), ("sum", [1.0, 2.0, 0.0, 1.0])]
)
def test_scales_of_the_losses(reduction: str, scales: list[float]) -> None:
    plan = Plan.of(replace(DAG, reduction=reduction), 6)  # type: ignore[arg-type]
    assert [p.scale for p in plan.stages] == scales
    assert plan.predicting() == [0, 1, 3]


def test_bus_is_live_at_the_roots_and_elsewhere_as_the_topology_says() -> None:
    assert [p.live_bus for p in Plan.of(DAG, 6).stages] == [True] * 4
    detached = Plan.of(replace(DAG, bus="detached"), 6)
    assert [p.live_bus for p in detached.stages] == [True, False, False, False]
    assert [p.live_bus for p in Plan.of(Topology.chain("1,1").with_specialist(1), 3).stages] == [
        False,
        False,
        True,
    ]


def test_needed_is_what_a_stage_depends_on() -> None:
    plan = Plan.of(DAG, 6)
    assert [[p.index for p in plan.needed(k)] for k in range(4)] == [[0], [0, 1], [0, 2], [0, 1, 2, 3]]
    forest = Plan.of(Topology.forest(["1,1", "1,1"]), 4)
    assert [p.index for p in forest.needed(3)] == [2, 3]


def test_a_frozen_stage_sends_no_gradient_whatever_its_edges_say() -> None:
    plan = Plan.of(Topology.chain("1,1", grad_scale=1.0).with_specialist(1), 3)
    assert plan.frozen
    assert [p.num_grad_consumers for p in plan.stages] == [0, 0, 0]
    assert all(lam == 0 for p in plan.stages for _, lam in p.inputs)
    assert [p.scale for p in plan.stages] == [0.0, 0.0, 1.0]
    assert plan.predicting() == [0, 1, 2], "frozen stages have heads worth reading"
    assert not Plan.of(DAG, 6).frozen


def test_another_depth_is_one_clear_line() -> None:
    with refused(TopologyError, setting="layers", given=6):
        Plan.of(DAG, 4)


def test_a_frozen_stage_predicts_if_it_ever_had_a_loss() -> None:
    topology = Topology.regions("1,1").with_specialist(1)
    assert Plan.of(topology, 3).predicting() == [1, 2]
    assert Plan.of(Topology.chain("1,1").with_specialist(1), 3).predicting() == [0, 1, 2]


@pytest.mark.parametrize(
    "given",
    ["2,2", " 2, 2 ", Composition.parse("2,2"), Configuration.parse("2,2"), Topology.chain("2,2")],
    ids=["text", "spaces", "composition", "configuration", "topology"],
)
def test_whatever_names_a_partition_is_a_plan(given: str | Composition | Configuration | Topology) -> None:
    plan = Plan.of(given, 4)
    assert plan == Plan.of(Topology.chain("2,2"), 4)
    assert Plan.of(plan, 4) is plan, "a plan is taken as it is"


@pytest.mark.parametrize("whole", ["L", "l", " L ", "4"])
def test_l_is_one_stage_of_all_layers(whole: str) -> None:
    assert Plan.of(whole, 4) == Plan.of(Topology.chain("4"), 4)


def test_a_configuration_brings_its_heads() -> None:
    assert Plan.of(Configuration.parse("2,2", heads="per-stage"), 4).topology.heads == "per-stage"


@pytest.mark.parametrize("given", [None, 4, 2.0, ["2", "2"], object()])
def test_what_is_no_topology_is_one_clear_line(given: Any) -> None:
    with refused(TopologyError, setting="topology") as caught:
        Plan.of(given, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["2,3", Topology.chain("2,3"), Plan.of("2,3", 5)])
def test_plans_of_another_depth_are_refused_however_they_come(given: str | Topology | Plan) -> None:
    with refused(TopologyError, setting="layers", given=5):
        Plan.of(given, 4)


def test_groups_are_the_stages_between_which_gradient_passes() -> None:
    assert Plan.of("1,1,1", 3).groups() == [[0], [1], [2]]
    assert Plan.of(Topology.chain("1,1,1", grad_scale=0.1), 3).groups() == [[0, 1, 2]]
    assert Plan.of(Topology.soft([0.0, 0.5, 0.0]), 4).groups() == [[0], [1, 2], [3]]
    assert Plan.of(Topology.cover([(0, 2), (1, 3), (3, 4)]), 4).groups() == [[0, 1], [2]], "a shared layer"
    assert Plan.of(Topology.chain("1,1").with_decoders(1), 4).groups() == [[0, 1], [2, 3]]
    assert Plan.of(Topology.chain("1,1").with_specialist(1), 3).groups() == [[2]], "frozen stages learn not"
    halted = Plan.of("1,1,1", 3).halted([1])
    assert halted.groups() == [[0], [2]]
