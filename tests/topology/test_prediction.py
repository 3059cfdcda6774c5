"""How a plan's stages predict together: what `auto` means, what may be asked for, and what cannot be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raising import refused
from topograd.errors import ConfigError, TopologyError
from topograd.topology.branches import predicting_plan
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan
from topograd.topology.prediction import Prediction, Terms


def predicted(topology: Topology) -> Prediction:
    return Plan.of(topology, topology.layers).prediction


def mixed(*objectives: str) -> Topology:
    """A chain of single layers with these objectives."""
    chain = Topology.chain(",".join("1" for _ in objectives))
    stages = tuple(replace(s, objective=o) for s, o in zip(chain.stages, objectives, strict=True))
    return replace(chain, stages=stages)


THREE = Topology.chain("1,1,1")
ALONE = {0: ((0, 1.0),), 1: ((1, 1.0),), 2: ((2, 1.0),)}
RUNNING: dict[int, Terms] = {
    0: ((0, 1.0),),
    1: ((0, 1.0), (1, 1.0)),
    2: ((0, 1.0), (1, 1.0), (2, 1.0)),
}
HALVES: Terms = ((1, 0.5), (2, 0.5))


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
@pytest.mark.parametrize("grad_scale", [0.0, 1.0])
def test_a_chain_predicts_by_its_last_stage(grad_scale: float, heads: str) -> None:
    chain = Topology.chain(Configuration.parse("1,1,1", heads=heads), grad_scale=grad_scale)
    assert predicted(chain) == Prediction("last", ((2, 1.0),), ALONE)
    assert predicted(chain).alone
    assert Plan.of(chain, 3).last == 2


def test_a_residual_chain_predicts_by_the_sum_and_its_exits_by_running_sums() -> None:
    result = predicted(Topology.chain("1,1,1", objective="residual"))
    assert result == Prediction("sum", RUNNING[2], RUNNING)
    assert [result.after(k) for k in range(3)] == [RUNNING[k] for k in range(3)]
    assert not result.alone


def test_a_stage_that_corrects_nobody_predicts_alone() -> None:
    """Only a stage with the objective residual was trained as a sum, wherever it stands."""
    result = predicted(mixed("cross-entropy", "residual", "cross-entropy"))
    assert result.kind == "last"
    assert result.full == ((2, 1.0),)
    assert result.exits == {0: ((0, 1.0),), 1: RUNNING[1], 2: ((2, 1.0),)}
    result = predicted(mixed("residual", "cross-entropy", "residual"))
    assert (result.kind, result.full) == ("sum", RUNNING[2])
    assert result.after(1) == ((1, 1.0),)


def test_a_forest_predicts_by_the_mean_of_its_branches() -> None:
    result = predicted(Topology.forest(["1,1", "2"]))
    assert result == Prediction("pool", HALVES, {0: ((0, 1.0),), 1: ((1, 1.0),), 2: HALVES})
    three = predicted(Topology.forest(["1", "1", "1"]))
    assert three.full == tuple((k, 1 / 3) for k in range(3))


def test_a_forest_of_one_branch_is_a_chain() -> None:
    assert predicted(Topology.forest(["1,1,1"])) == predicted(THREE)


def test_a_cover_predicts_by_the_mean_of_its_experts() -> None:
    """Every expert whose end nobody hears; one that another expert continues is on its way."""
    assert predicted(Topology.cover([(0, 2), (1, 3)])).full == ((0, 0.5), (1, 0.5))
    assert predicted(Topology.cover([(0, 2), (2, 3)])) == Prediction(
        "last", ((1, 1.0),), {0: ((0, 1.0),), 1: ((1, 1.0),)}
    )
    four = predicted(Topology.cover([(0, 1), (0, 3), (1, 4)]))
    assert four.full == tuple((k, 1 / 3) for k in range(3))


def test_decoders_predict_as_the_stages_did() -> None:
    """Stages 0 and 2 lost their losses to the decoders 1 and 3."""
    chain = Topology.chain("1,1").with_decoders(1)
    assert predicted(chain) == Prediction("last", ((3, 1.0),), {1: ((1, 1.0),), 3: ((3, 1.0),)})
    residual = Topology.chain("1,1", objective="residual").with_decoders(1)
    assert predicted(residual).full == ((1, 1.0), (3, 1.0))
    assert predicted(residual).after(1) == ((1, 1.0),)
    forest = Topology.forest(["1,1", "1"]).with_decoders(2)
    assert predicted(forest).full == ((3, 0.5), (5, 0.5))
    weighted = replace(Topology.forest(["1", "1"]), prediction=(1.0, 3.0)).with_decoders(1)
    assert predicted(weighted).full == ((1, 1.0), (3, 3.0))
    with refused(TopologyError, setting="prediction", given="path:1,3"):
        replace(THREE, prediction="path:1,3").with_decoders(1)


def test_stages_without_a_loss_have_no_say() -> None:
    assert predicted(Topology.regions("1,1,1")) == Prediction("last", ((2, 1.0),), {2: ((2, 1.0),)})
    soft = predicted(Topology.soft([1.0, 0.0]))
    assert soft == Prediction("last", ((2, 1.0),), {1: ((1, 1.0),), 2: ((2, 1.0),)})
    summed = predicted(replace(Topology.soft([1.0, 0.0]), prediction="sum"))
    assert summed.full == ((1, 1.0), (2, 1.0))


def test_a_specialist_predicts_alone_and_its_base_as_before() -> None:
    result = predicted(Topology.chain("1,1", objective="residual").with_specialist(1))
    assert result == Prediction("last", ((2, 1.0),), {0: ((0, 1.0),), 1: RUNNING[1], 2: ((2, 1.0),)})


@pytest.mark.parametrize("how", ["mean", (1.0, 3.0), "path:1"])
def test_a_specialist_predicts_by_its_objective_however_its_base_did(how: str | tuple[float, ...]) -> None:
    base = replace(Topology.chain("1,1"), prediction=how)
    assert predicted(base.with_specialist(1)).full == ((2, 1.0),)
    assert predicted(base.with_specialist(1, "residual")).full == RUNNING[2]
    assert predicted(Topology.forest(["1", "1"]).with_decoders(1).with_specialist(1)).full == ((4, 1.0),)


def test_halted_stages_predict_as_before() -> None:
    plan = Plan.of(Topology.forest(["1,1", "1"]), 3)
    halted = plan.halted([1])
    assert halted.prediction == plan.prediction
    assert halted.predicting() == plan.predicting()
    assert (halted.stages[1].scale, halted.stages[1].stage.frozen) == (0.0, True)
    assert halted.stages[2] == plan.stages[2], "the others keep their share of the loss"
    assert not halted.frozen, "what all share goes on learning"


@pytest.mark.parametrize("topology", [THREE, Topology.forest(["1", "1", "1"])], ids=["chain", "forest"])
def test_what_may_be_asked_for(topology: Topology) -> None:
    assert predicted(replace(topology, prediction="last")) == Prediction("last", ((2, 1.0),), ALONE)
    assert predicted(replace(topology, prediction="sum")) == Prediction("sum", RUNNING[2], RUNNING)
    mean = predicted(replace(topology, prediction="mean"))
    assert mean.kind == "pool"
    assert mean.exits == {k: tuple((j, 1 / (k + 1)) for j in range(k + 1)) for k in range(3)}
    assert mean.full == mean.after(2)


def test_weights_are_shared_out_over_the_stages_so_far() -> None:
    """The whole weight is 4: an exit has all of it, whichever stages have run."""
    result = predicted(replace(THREE, prediction=(0.0, 1.0, 3.0)))
    assert result.kind == "pool"
    assert result.full == result.after(2) == ((1, 1.0), (2, 3.0))
    assert result.after(1) == ((1, 4.0),)
    assert result.after(0) == ((0, 4.0),), "nothing that counts has run: the stage itself"
    assert predicted(replace(THREE, prediction=(1.0, 1.0, 2.0))).after(1) == ((0, 2.0), (1, 2.0))


def test_a_path_runs_what_it_names() -> None:
    plan = Plan.of(replace(THREE, prediction="path:1,3"), 3)
    assert plan.prediction == Prediction("path", ((2, 1.0),), ALONE, path=(0, 2))
    run = predicting_plan(plan)
    assert [(list(p.layers), p.head) for p in run.stages] == [([0], 0), ([2], 2)]
    assert run.prediction.full == ((1, 1.0),)
    assert predicting_plan(Plan.of(THREE, 3)) == Plan.of(THREE, 3), "without a path nothing is cut"


def test_a_path_through_residual_stages_adds_up_what_ran() -> None:
    chain = replace(Topology.chain("1,1,1", objective="residual"), prediction="path:1,3")
    result = predicting_plan(Plan.of(chain, 3)).prediction
    assert (result.kind, result.full) == ("sum", ((0, 1.0), (1, 1.0)))


@pytest.mark.parametrize(
    "how",
    [
        "best",
        "",
        (1.0, 1.0),
        (1.0, 1.0, 1.0, 1.0),
        (1.0, -1.0, 1.0),
        (1.0, math.nan, 1.0),
        (1.0, math.inf, 1.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_what_cannot_predict_is_one_line(how: str | tuple[float, ...]) -> None:
    with refused(TopologyError, setting="prediction", given=how):
        predicted(replace(THREE, prediction=how))


def test_logits_that_mean_nothing_are_refused() -> None:
    silent = Topology.regions("1,1,1")
    with refused(TopologyError, setting="prediction"):
        predicted(replace(silent, prediction=(0.0, 1.0, 1.0)))
    assert predicted(replace(silent, prediction=(0.0, 0.0, 2.0))).full == ((2, 2.0),)
    with refused(TopologyError, setting="prediction", given="path:1-2"):
        predicted(replace(silent, prediction="path:1-2"))


@pytest.mark.parametrize("path", ["path:", "path:0", "path:1,x", "path:3-1"])
def test_a_path_that_cannot_be_read_is_one_line(path: str) -> None:
    with refused(ConfigError, setting="path") as caught:
        predicted(replace(THREE, prediction=path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "setting", "given"),
    [
        ("path:1,4", "prediction", "path:1,4"),
        ("path:2,3", "path", (1, 2)),
        ("path:1,1", "path", (0, 0)),
    ],
)
def test_a_path_that_no_plan_has_is_one_line(path: str, setting: str, given: object) -> None:
    with refused(TopologyError, setting=setting, given=given):
        predicting_plan(Plan.of(replace(THREE, prediction=path), 3))


def test_leaves_are_the_stages_whose_end_no_stage_reads() -> None:
    root = Edge(EMBEDDING, grad_scale=1.0)
    early = Topology(3, (Stage(0, 2, (root,)), Stage(2, 3, (Edge(0, layer=1),))))
    assert early.leaves() == [0, 1], "tapped before its end"
    assert THREE.leaves() == [2]
    assert Topology.chain("1,1").with_decoders(1).leaves() == [1, 3]


def test_a_specialist_hears_the_end_of_every_branch() -> None:
    """And not the last branch alone (D13)."""
    topology = Topology.forest(["1,1", "2"]).with_specialist(1)
    assert [edge.source for edge in topology.stages[-1].sources] == [1, 2]
    assert predicted(topology).full == ((3, 1.0),)


def test_the_last_exit_predicts_as_the_model_does_where_the_only_leaf_comes_earlier() -> None:
    root = Edge(EMBEDDING, grad_scale=1.0)
    stages = (Stage(0, 1, (root,)), Stage(1, 2, (root,)), Stage(2, 3, (Edge(1),), weight=0.0))
    prediction = Plan.of(Topology(3, stages), 3).prediction
    assert prediction.full == prediction.after(1) == ((0, 1.0),)
