"""The studies of edges: rates that lie between others, gaps by seed, and what each arm is."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from papers.beyond import edge_questions
from papers.beyond.edge_arms import (
    AHEAD,
    BACKPROP,
    BOTH,
    CUT,
    HEAD,
    LATE,
    LAYERS,
    OWN,
    SIX,
    SLOWER,
    THIN,
    THREE,
    UNIFORM,
    WHOLE,
    AheadQueue,
    Way,
    lateness,
    ways,
)
from papers.beyond.edges import (
    Question,
    add_gaps,
    answer,
    better,
    losses_gap,
    near,
    next_rate,
    of,
    training_of,
)
from papers.kept import Kept
from papers.outcome import asked
from papers.product_of_experts.gap_training import Training
from papers.staged_runs import bytes_config
from papers.verdicts import FAILED, HELD
from topograd.exec.train_step import train_step
from topograd.runs.config import OptimizerConfig
from topograd.topology.plan import Plan
from topograd.training.optimizers import OptimizerSet


def test_the_arms_differ_in_their_edges() -> None:
    plans = {name: Plan.of(way.topology, LAYERS) for name, way in ways().items()}
    assert plans[LATE].lateness == plans[BOTH].lateness == plans[SLOWER].lateness == (2, 1, 0)
    assert Plan.of(ways(SIX)[LATE].topology, LAYERS).lateness == (5, 4, 3, 2, 1, 0)
    assert plans[CUT].groups() == [[0], [1], [2]]
    assert plans[WHOLE].groups() == [[0, 1, 2]]
    bits = {
        name: {e.grad_bits for p in plan.stages for e in p.stage.sources[:1] if p.index}
        for name, plan in plans.items()
    }
    assert bits[THIN[3]] == {3}
    assert bits[BOTH] == bits[THIN[4]] == {4}
    assert bits[WHOLE] == bits[LATE] == {32}
    losses = [
        [p.scale > 0 for p in Plan.of(ways(exits=e)[AHEAD].topology, LAYERS).stages] for e in (0.1, 0.0)
    ]
    assert losses == [[True, True, True], [False, False, True]]


def test_a_rate_at_an_end_is_followed_by_the_one_beyond() -> None:
    assert next_rate({0.005: 3.0, 0.01: 2.0, 0.02: 1.0}) == 0.04
    assert next_rate({0.0025: 2.0, 0.005: 1.0, 0.01: 2.0, 0.02: 3.0}) is None
    assert next_rate({0.08: 1.0, 0.04: 2.0}) is None  # the widest
    assert next_rate({0.01: 1.0, 0.005: 2.0}, (0.001, 0.015)) is None


def test_gaps_are_of_the_same_seed() -> None:
    points = [{"losses": [None, 2.0]}, {"losses": [None, 1.0]}]
    later = [{"losses": [None, 2.2]}, {"losses": [None, 1.0]}]
    rows = [
        {"arm": arm, "seed": seed, "bpb": bpb, "trajectory": later if arm == LATE else points}
        for seed, numbers in enumerate(((2.0, 1.0, 2.5), (4.0, 5.0, 5.0)))
        for arm, bpb in zip((BACKPROP, WHOLE, LATE), numbers, strict=True)
    ]
    add_gaps(rows)
    assert of(rows, LATE) == [25.0, 25.0]
    assert of(rows, LATE, "price") == [150.0, 0.0]
    assert losses_gap(rows, LATE) == [[pytest.approx(10.0)] * 2, [0.0] * 2]
    alone = [{**row, "price": None} for row in rows if row["arm"] != WHOLE]
    add_gaps(alone)
    assert of(alone, LATE, "price") == [None, None], "no price without the whole gradient"


def test_claims_of_two_arms_and_of_a_goal() -> None:
    rows = [
        {"arm": arm, "seed": seed, "gap": gap + seed / 100}
        for seed in range(3)
        for arm, gap in ((LATE, 1.2), (CUT, 3.0))
    ]
    assert better(rows, LATE, CUT, "").verdict == HELD
    assert better(rows, CUT, LATE, "").verdict == FAILED
    assert near(rows, LATE, "").verdict == FAILED
    assert near(rows, LATE, "", goal=2.0).verdict == HELD


def test_a_rate_that_another_study_chose_is_not_tried_again() -> None:
    arms = {arm: ways()[arm] for arm in (BACKPROP, THIN[4], LATE, BOTH, CUT)}
    question = Question(arms, lambda rows: [], chosen={BACKPROP: 0.01})
    assert question.tuned == [LATE, CUT]
    rates = question.rates_of({LATE: {0.01: 2.0, 0.005: 1.0}, CUT: {0.01: 1.0}})
    assert rates == {BACKPROP: 0.01, THIN[4]: 0.01, LATE: 0.005, BOTH: 0.005, CUT: 0.01}


def test_every_question_has_backprop_and_the_rates_that_its_arms_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Question] = {}
    for name in ("stages", "uniform", "alone", "adamw", "length", "rates", "size", "early"):
        monkeypatch.setattr(edge_questions, "answer", lambda args, it, name=name: found.update({name: it}))
        getattr(edge_questions, name)(asked("edges", "tiny"))
    for question in found.values():
        assert next(iter(question.arms)) == BACKPROP
        tried = {arm: dict.fromkeys(question.rates, 1.0) for arm in question.tuned}
        assert question.rates_of(tried).keys() == question.arms.keys()
    assert found["adamw"].optimizer == "adamw"
    assert found["alone"].tuned == []


def test_rates_fall_with_the_root_of_the_lateness() -> None:
    settings = ways(SIX)[SLOWER].settings
    assert settings is not None
    config = settings(OptimizerConfig())
    assert [own.rate for own in config.stages] == [1 / math.sqrt(1 + late) for late in (5, 4, 3, 2, 1, 0)]
    assert config.lr_embedding == OptimizerConfig().lr_embedding / math.sqrt(6)


STEPS = 5


def training(way: Way) -> Training:
    """A small training of an arm in float64, by gradient descent so that its steps can be written down."""
    config = bytes_config(asked("edges", "tiny"), 0, batch=2, tiny_batch=2, eval_bytes=600)
    made = training_of("", replace(way, change=None), config, 0.01)
    made.stack.double()
    made.loop.optimizers = OptimizerSet.of(torch.optim.SGD(made.stack.parameters(), lr=0.3))
    made.optimizers = made.loop.optimizers.optimizers
    if way.change is not None:
        way.change(made)
    return made


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        drawn = torch.randint(257, (2, 17), generator=generator)
        yield drawn[:, :-1], drawn[:, 1:]


def weights(made: Training) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in made.stack.named_parameters()}


def gradient_at(
    made: Training, at: dict[str, Tensor], batch: tuple[Tensor, Tensor], grad_scale: float | None = None
) -> dict[str, Tensor]:
    """Of one graph over these weights, the same losses without any delay."""
    stack = copy.deepcopy(made.stack)
    stack.load_state_dict(at)
    stack.zero_grad(set_to_none=True)
    topology = made.plan.topology.with_gradient(delay=0)
    if grad_scale is not None:
        topology = topology.with_grad_scale(grad_scale)
    train_step(stack, Plan.of(topology, LAYERS), *batch)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stack.named_parameters()}


@pytest.mark.parametrize("partition", [THREE, SIX])
def test_late_edges_by_definition_are_those_of_the_executor(partition: str) -> None:
    late = ways(partition, exits=0.0)[AHEAD].topology
    made = [training(way) for way in (ways(partition, exits=0.0)[LATE], Way(late))]
    assert [len(each.plan.stages) for each in made] == [1, len(partition.split(","))]
    for each in made:
        given = batches()
        for step in range(8):
            each.learn(0.0, *next(given), step + 1)
    first, second = map(weights, made)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-10, atol=1e-12)


def test_uniform_takes_the_gradient_of_the_step_before() -> None:
    made, given = training(ways()[UNIFORM]), batches()
    expected, held = weights(made), None
    for step in range(STEPS):
        batch = next(given)
        gradient = gradient_at(made, expected, batch)
        made.learn(0.0, *batch, step + 1)
        if held is not None:
            expected = {name: w - 0.3 * held[name] for name, w in expected.items()}
        held = gradient
        for name, w in weights(made).items():
            torch.testing.assert_close(w, expected[name], rtol=1e-10, atol=1e-12)


def test_ahead_takes_gradients_of_weights_that_went_on_as_before() -> None:
    made, given = training(ways(exits=0.0)[AHEAD]), batches()
    assert isinstance(made.loop.late, AheadQueue)
    late = dict.fromkeys(weights(made), 0)
    for planned in made.plan.stages:
        for i in planned.layers:
            own = (name for name in late if name.startswith(f"layers.{i}."))
            late.update(dict.fromkeys(own, made.plan.lateness[planned.index]))
    (embedding,) = [
        name for name, module in made.stack.named_modules() if isinstance(module, torch.nn.Embedding)
    ]
    late[f"{embedding}.weight"] = made.plan.embedding_lateness
    assert set(late.values()) == {0, 1, 2}
    before = expected = weights(made)
    found: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        batch = next(given)
        ahead = {name: w + late[name] * (w - before[name]) for name, w in expected.items()}
        found.append(gradient_at(made, ahead, batch))
        made.learn(0.0, *batch, step + 1)
        before, old = expected, expected
        expected = {
            name: w - 0.3 * found[step - late[name]][name] if step >= late[name] else w
            for name, w in old.items()
        }
        for name, w in weights(made).items():
            torch.testing.assert_close(w, expected[name], rtol=1e-9, atol=1e-11, msg=f"{name}, step {step}")


@pytest.mark.parametrize("arm", [HEAD, OWN])
def test_what_is_not_late_of_early_losses(arm: str) -> None:
    made, given = training(ways()[arm]), batches()
    late = {
        n: lateness(made.stack, Plan.of(ways()[LATE].topology, LAYERS))[p]
        for n, p in made.stack.named_parameters()
    }
    assert set(late.values()) == {0, 1, 2}
    expected = weights(made)
    own: list[dict[str, Tensor]] = []
    other: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        batch = next(given)
        whole = gradient_at(made, expected, batch)
        at_once = gradient_at(made, expected, batch, grad_scale=0.0)
        if arm == HEAD:  # nothing but what has τ = 0
            at_once = {name: torch.zeros_like(g) for name, g in whole.items()}
        own.append(at_once)
        other.append({name: whole[name] - at_once[name] for name in whole})
        made.learn(0.0, *batch, step + 1)
        expected = {
            name: w - 0.3 * (own[-1][name] + (other[step - late[name]][name] if step >= late[name] else 0))
            for name, w in expected.items()
        }
        for name, w in weights(made).items():
            torch.testing.assert_close(w, expected[name], rtol=1e-9, atol=1e-11, msg=f"{name}, step {step}")


def test_a_study_that_was_ended_measures_what_is_missing_alone(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    arms = {arm: ways()[arm] for arm in (BACKPROP, LATE)}
    question = Question(
        arms, lambda rows: [better(rows, LATE, BACKPROP, "")], rates=(0.01,), widest=(0.009, 0.011)
    )
    first = answer(asked("edges", "tiny", kept=Kept(file)), question)
    kept = Kept(file)
    second = answer(asked("edges", "tiny", kept=kept, seeds=2), question)
    assert kept.found == 4, "two rates and one seed of two arms"
    assert second.rows[:2] == first.rows
    assert [row["seed"] for row in second.rows] == [0, 0, 1, 1]
    assert [len(table.rows) for table in second.tables] == [2, 2]


def test_arms_of_one_name_and_other_edges_are_measured_apart(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    for partition in (THREE, SIX):
        question = Question(
            {BACKPROP: ways()[BACKPROP], LATE: ways(partition)[LATE]}, lambda rows: [], (0.01,)
        )
        question = replace(question, widest=(0.009, 0.011))
        kept = Kept(file)
        exits = [len(row["bpb_prefix"]) for row in answer(asked("edges", "tiny", kept=kept), question).rows]
        assert exits == [1, len(partition.split(","))]
        assert kept.found == (2 if partition == SIX else 0), "backprop is trained once"
