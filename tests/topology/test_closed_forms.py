"""Closed forms: the paper's on hard chains, values worked out by hand on other DAGs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lattice import from_bits
from topograd.topology.closed_forms import (
    activation_layers,
    closed_forms,
    coordination,
    coupling_cost,
    exit_layers,
    gradient_bits,
    gradient_depth,
    head_matrices,
    pipeline_granularity,
    staleness,
    stashed_layers,
    waiting_stages,
)
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

small = settings(deadline=None, max_examples=100)
parts = st.lists(st.integers(1, 9), min_size=1, max_size=9)

ROOT = Edge(EMBEDDING, grad_scale=1.0)


def compiled(topology: Topology) -> Plan:
    return Plan.of(topology, topology.layers)


@small
@given(parts, st.sampled_from(["shared", "per-stage"]))
def test_hard_chains_have_the_papers_closed_forms(depths: list[int], heads: str) -> None:
    """max d_k (P2, P4) and K (P5), as the configuration says."""
    configuration = Configuration.parse(depths, heads=heads)
    plan = compiled(Topology.chain(configuration))
    assert gradient_depth(plan) == configuration.gradient_depth == max(depths)
    assert activation_layers(plan) == max(depths)
    assert pipeline_granularity(plan) == configuration.pipeline_granularity == len(depths)


@small
@given(parts, st.floats(0.01, 1.0))
def test_any_grad_scale_above_zero_has_backprops_closed_forms(depths: list[int], lam: float) -> None:
    plan = compiled(Topology.chain(Composition.of(depths), grad_scale=lam))
    layers = sum(depths)
    assert (gradient_depth(plan), activation_layers(plan), pipeline_granularity(plan)) == (layers, layers, 1)


@small
@given(st.lists(st.integers(0, 1), max_size=12))
def test_soft_boundaries_at_a_vertex_have_the_hard_closed_forms(vector: list[int]) -> None:
    """λ = 1 - b(π) behaves as π, though it has a stage for every layer (Prop. 9.4)."""
    soft = compiled(Topology.soft([1.0 - bit for bit in vector]))
    hard = compiled(Topology.chain(from_bits(vector)))
    for closed_form in (gradient_depth, activation_layers, pipeline_granularity):
        assert closed_form(soft) == closed_form(hard)


DIAMOND = Topology(
    7,
    (
        Stage(0, 3, (ROOT,)),
        Stage(3, 4, (Edge(0, layer=2, grad_scale=0.5),)),
        Stage(4, 6, (Edge(0),)),
        Stage(6, 7, (Edge(1, grad_scale=1.0), Edge(2, grad_scale=1.0))),
    ),
)
"""Stage 3 reaches back through 1 (tapped: 2 + 1 layers) and through 2 (detached from 0: 2 layers)."""

BY_HAND = {
    # gradient depth, activation layers, granularity
    "forest": (Topology.forest(["1,2", "3,1"]), 3, 3, 4),
    "cover": (Topology.cover([(0, 3), (1, 4), (4, 5)]), 3, 3, 2),
    "cover-apart": (Topology.cover([(0, 2), (2, 4)]), 2, 2, 2),
    "two-linked-chains": (
        Topology(
            5,
            (
                Stage(0, 1, (ROOT,)),
                Stage(1, 2, (Edge(0, grad_scale=1.0),)),
                Stage(2, 3, (ROOT,)),
                Stage(3, 5, (Edge(2, grad_scale=1.0),)),
            ),
        ),
        3,
        3,
        2,
    ),
    "diamond": (DIAMOND, 4, 7, 1),
    "diamond-cut": (
        replace(
            DIAMOND, stages=(*DIAMOND.stages[:3], replace(DIAMOND.stages[3], sources=(Edge(1), Edge(2))))
        ),
        3,
        4,
        3,
    ),
    "input-bus": (Topology.chain("2,2").with_input_bus(), 2, 2, 2),
    "specialist": (Topology.chain("4,4").with_specialist(2), 2, 2, 1),
    "specialist-on-hierarchical": (Topology.chain("4,4", grad_scale=1.0).with_specialist(2), 2, 2, 1),
    "silent-end": (Topology(5, (Stage(0, 2, (ROOT,)), Stage(2, 5, (Edge(0),), weight=0.0))), 2, 3, 2),
}


@pytest.mark.parametrize(("topology", "depth", "held", "groups"), BY_HAND.values(), ids=BY_HAND)
def test_values_worked_out_by_hand(topology: Topology, depth: int, held: int, groups: int) -> None:
    plan = compiled(topology)
    assert gradient_depth(plan) == depth
    assert activation_layers(plan) == held
    assert pipeline_granularity(plan) == groups


@small
@given(st.lists(st.floats(0.0, 1.0), max_size=9))
def test_soft_boundaries_couple_by_the_sum_of_their_grad_scales(soft: list[float]) -> None:
    """Eq. 30 with c_i = 1; and a vertex couples as the hard chain does."""
    assert coupling_cost(compiled(Topology.soft(soft))) == pytest.approx(sum(soft))
    vertex = [round(lam) for lam in soft]
    hard = from_bits([1 - bit for bit in vertex])
    assert coupling_cost(compiled(Topology.chain(hard))) == sum(vertex) == hard.layers - hard.stages


COUPLED = {
    "backprop": (Topology.chain("5"), 4, 1.0),
    "local": (Topology.chain("1,1,1"), 0, 0.0),
    "one-layer": (Topology.chain("1"), 0, 0.0),
    "hierarchical": (Topology.chain("2,3", grad_scale=0.5), 3.5, 0.875),
    "input-bus": (Topology.chain("2,2").with_input_bus(), 2, 2 / 3),
    "specialist": (Topology.chain("4,4", grad_scale=1.0).with_specialist(2), 1, 1 / 9),
    "diamond": (DIAMOND, 5.5, 5.5 / 6),
    "silent-end": (Topology(5, (Stage(0, 2, (ROOT,)), Stage(2, 5, (Edge(0),), weight=0.0))), 1, 0.25),
    "regions": (Topology.regions("2,2"), 3, 1.0),
}


@pytest.mark.parametrize(("topology", "cost", "share"), COUPLED.values(), ids=COUPLED)
def test_couplings_worked_out_by_hand(topology: Topology, cost: float, share: float) -> None:
    assert coupling_cost(compiled(topology)) == pytest.approx(cost)
    assert coordination(compiled(topology)) == pytest.approx(share)


def test_heads_and_exits() -> None:
    own = compiled(Topology.chain(Configuration.parse("2,1,3", heads="per-stage")))
    assert (head_matrices(own), exit_layers(own)) == (4, [2, 3, 6])
    assert head_matrices(compiled(Topology.chain("2,1,3"))) == 1
    assert exit_layers(compiled(Topology.forest(["1,2", "3"]))) == [1, 3, 3]
    assert exit_layers(compiled(Topology.regions("2,2"))) == [4]


def test_closed_forms_are_all_there() -> None:
    assert closed_forms(compiled(Topology.chain("4,4,4"))) == {
        "gradient_depth": 4,
        "activation_layers": 4,
        "pipeline_granularity": 3,
        "coupling_cost": 9,
        "coordination": 9 / 11,
        "head_matrices": 1,
        "exit_layers": [4, 8, 12],
        "gradient_bits": 0,
        "staleness": 0,
        "stashed_layers": 0,
        "waiting_stages": 0,
    }


def test_late_and_thin_gradients_by_hand() -> None:
    whole = Topology.chain("2,1,3", grad_scale=1.0)
    assert [gradient_bits(compiled(whole)), waiting_stages(compiled(whole))] == [64, 2]
    thin = compiled(whole.with_gradient(bits=4))
    assert [gradient_bits(thin), waiting_stages(thin), staleness(thin), activation_layers(thin)] == [
        8,
        2,
        0,
        6,
    ]
    late = compiled(whole.with_gradient(delay=1))
    assert late.lateness == (2, 1, 0)
    assert [staleness(late), stashed_layers(late), waiting_stages(late)] == [2, 2 * 2 + 1, 0]
    kept = 2 * 2 + 1  # of earlier batches, when all three stages have run forward
    assert [activation_layers(late), pipeline_granularity(late), gradient_depth(late)] == [kept + 6, 3, 6]
    assert late.groups() == [[0], [1], [2]]
    cut = compiled(Topology.chain("2,1,3").with_gradient(delay=1, bits=4))
    assert [gradient_bits(cut), staleness(cut)] == [0, 0], "nothing crosses"
