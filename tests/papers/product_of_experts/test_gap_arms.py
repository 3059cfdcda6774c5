"""Every arm is a point of the space, and says what it changes."""

import pytest

from papers.product_of_experts.gap_arms import (
    ARMS,
    BACKPROP,
    DECIDING,
    DEMO,
    LENGTHS,
    LIGHT,
    STAGED,
    TINY,
    Arm,
    cooling,
    early,
    late,
    long_warmdown,
    opened,
    own_head_rate,
    rates_by_stage,
)
from topograd.runs.config import OptimizerConfig
from topograd.topology.closed_forms import gradient_depth
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan

CHAIN = Topology.chain("2,2,2")


def lambdas(topology: Topology) -> list[float]:
    return [e.grad_scale for s in topology.stages for e in s.sources if e.source != EMBEDDING]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_an_arm_is_a_plan_at_every_moment_and_predicts_from_six_layers(arm: Arm) -> None:
    for share in (0.0, 0.3, 0.6, 0.9):
        plan = Plan.of(arm.topology_at(share), arm.topology.layers)
        needed = {layer for p in plan.needed(plan.last) for layer in p.layers}
        assert needed == set(range(6)), "a private decoder is not on the way of the last stage"
        assert plan.prediction.kind == ("sum" if arm.name == "staged, residual" else "last")


def test_there_is_one_arm_of_each_name_and_backprop_has_lengths() -> None:
    names = [arm.name for arm in ARMS]
    assert len(set(names)) == len(names)
    assert sorted(arm.length for arm in ARMS if arm.name.startswith(BACKPROP)) == sorted(LENGTHS)
    assert ARMS[0].name == BACKPROP
    assert {arm.name for arm in TINY} >= {BACKPROP, STAGED, "next"}


def test_presets_have_what_equal_time_needs() -> None:
    """Backprop at two lengths, plain stages, and whatever is judged with every seed."""
    for arms in (DECIDING, DEMO):
        assert {BACKPROP, f"{BACKPROP}, 1.4 × steps", STAGED} <= {arm.name for arm in arms}
        assert all(arm.core for arm in arms)
    light = [arm for arm in DEMO if arm.name in LIGHT.values()]
    assert [[(s.weight, s.every) for s in arm.topology.stages[:2]] for arm in light] == [
        [(0.1, 4)] * 2,
        [(0.02, 4)] * 2,
    ]
    assert len(DEMO) == 8


def test_gradient_depth_orders_the_arms() -> None:
    depth = {arm.name: gradient_depth(Plan.of(arm.topology, arm.topology.layers)) for arm in ARMS}
    assert depth[BACKPROP] == depth["hierarchical"] == 6
    assert depth["next"] == 4
    assert depth["staged 3,3"] == depth["staged, overlapping"] == 3
    assert depth["staged, decoders of 2"] == 4
    assert depth[STAGED] == depth["next 1,1,1,1,1,1"] == 2
    assert depth["staged 1,1,1,1,1,1"] == 1


def test_what_changes_over_a_training() -> None:
    assert lambdas(cooling(CHAIN, 0.0)) == [1.0, 1.0]
    assert lambdas(cooling(CHAIN, 0.25)) == [0.5, 0.5]
    assert lambdas(cooling(CHAIN, 0.5)) == lambdas(cooling(CHAIN, 0.9)) == [0.0, 0.0]
    assert lambdas(opened(CHAIN, 0.7)) == [0.0, 0.0]
    assert lambdas(opened(CHAIN, 0.75)) == [1.0, 1.0]
    first = late(CHAIN, 0.4)
    assert [stage.weight for stage in first.stages] == [0.0, 0.0, 1.0]
    assert lambdas(first) == [1.0, 1.0]
    assert late(CHAIN, 0.5) == CHAIN


def test_early_stages_are_all_but_the_last() -> None:
    assert [stage.every for stage in early(CHAIN, every=4).stages] == [4, 4, 1]
    assert lambdas(CHAIN.with_grad_scale(0.3)) == [0.3, 0.3]


def test_settings_of_the_optimizer() -> None:
    config = OptimizerConfig()
    assert own_head_rate(config).lr_head == config.lr_head / 2
    assert [stage.rate for stage in rates_by_stage(config).stages] == [0.7, 1.0, 1.4]
    assert long_warmdown(config).warmdown == 0.9
