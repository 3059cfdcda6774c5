"""Calibrating a run: readings against a direct computation, what is timed, the choice, and what is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from topograd.data.windows import Text
from topograd.decode import calibrate
from topograd.decode.autotune import DraftRule, RowCosts, simulate
from topograd.decode.calibrate import Tuning, heldout_readings, load, measure_costs, store, tune
from topograd.decode.calibration import EPS, Bounds, Calibration, Sample
from topograd.decode.depths import engine_of
from topograd.decode.engine import Engine
from topograd.decode.exit_rules import check_exits
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import ConfigError, RunError
from topograd.nn.stack import Stack
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT, STEP = 257, 16, 7
COSTS = RowCosts(0.1, {1: 0.5, 4: 0.75}, 0.6)
CALIBRATION = Calibration(
    step=STEP,
    stages=3,
    tokens=4,
    shift=Bounds((1.0, 2.0), (3.0, 4.0)),
    gain=Bounds((0.5, 0.25), (5.0, 6.0)),
    change_rate=(0.5, 0.25),
    agreement=(0.25, 0.75, 1.0),
    flip_thresholds=tuple((100 * eps, float("inf")) for eps in EPS),
    sample=Sample(((0.125, 1.0, 2.0, 0.5), (3.0, 1.5, 0.25, 4.0)), ((0, 1, 0, 0), (1, 1, 0, 1)), (3, 1)),
)


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of three stages that disagree, saved as if of step 7."""
    return make_session(3, STEP)


@pytest.fixture
def here(session: LoadedTextRun, tmp_path: Path) -> LoadedTextRun:
    """The session of a folder in which nothing is kept yet."""
    return replace(session, run=Run(tmp_path))


def logits_of(session: LoadedTextRun, inputs: Tensor) -> list[Tensor]:
    """Logits (time, vocab) of each stage on one window: the layers one after the other."""
    stack, row = session.stack, inputs[None]
    with torch.no_grad():
        h = stack.embed(row)
        ctx = stack.layer_context(h, row)
        found = []
        for stage, layer in enumerate(stack.layers):
            h = layer(h, ctx)
            found.append(stack.readout(h, stage)[0])
    return found


def test_readings_are_those_of_every_counted_token(session: LoadedTextRun) -> None:
    own = open_session(session.run.folder)
    own.stack.double()
    torch.manual_seed(3)
    inputs, targets = torch.randint(VOCAB, (2, 3, CONTEXT))
    targets[0, 2:5] = targets[2, 10:] = -100
    seen: list[tuple[int, int]] = []
    readings = heldout_readings(own, Text(inputs, targets, 1), 2, lambda *done: seen.append(done))
    assert seen == [(2, 3), (3, 3)]
    assert len(readings) == 3 * CONTEXT - 9
    where = [(row, t) for row in range(3) for t in range(CONTEXT) if targets[row, t] != -100]
    assert readings.sequence.tolist() == [row for row, _ in where]
    windows = [logits_of(own, row) for row in inputs]
    for n, (row, t) in enumerate(where):
        z = [stage[t] for stage in windows[row]]
        for k in range(3):
            best = z[k].sort(descending=True)
            assert readings.top[k, n] == best.indices[0]
            assert readings.margin[k, n].item() == pytest.approx((best.values[0] - best.values[1]).item())
            if k < 2:
                change = z[2] - z[k]
                gain = change.max() - change[best.indices[0]]
                assert readings.gain[k, n].item() == pytest.approx(gain.item(), abs=1e-6)
                assert readings.shift[k, n].item() == pytest.approx((z[k + 1] - z[k]).abs().max().item())
    assert 0 < (readings.top[0] != readings.top[2]).sum() <= len(readings), "stages that agree show nothing"


def test_of_the_runs_own_text_every_byte_is_read_once(session: LoadedTextRun) -> None:
    text = heldout_text(session, None, 200)
    readings = heldout_readings(session, text)
    assert 100 < len(readings) == text.nbytes <= 200
    even, odd = readings.split()
    assert set(even.sequence.tolist()) == set(range(0, len(text.inputs), 2))
    assert len(even) + len(odd) == len(readings)


@pytest.mark.parametrize(
    ("context", "sizes"), [(3, [1, 2]), (4, [1, 2, 3]), (9, [1, 2, 3, 4, 6]), (16, [1, 2, 3, 4, 6, 8])]
)
def test_costs_of_all_sizes_that_the_context_has_room_for(
    session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch, context: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    costs = measure_costs(Engine(session.stack, session.plan, context), 1)
    assert list(costs.deep) == sizes
    assert min(costs.draft, costs.full, *costs.deep.values()) > 0


@pytest.mark.parametrize("context", [1, 2])
def test_a_context_without_room_is_refused(session: LoadedTextRun, context: int) -> None:
    message = rf"^a context of {context} tokens has no room for drafts; use at least 3$"
    with pytest.raises(ConfigError, match=message):
        measure_costs(Engine(session.stack, session.plan, context), 0)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_timed(
    session: LoadedTextRun, visits_of: Callable[[Stack], Any], monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """In a half-full context: one token at full depth, then rounds: drafts run the first stages alone, and
    the others run them as one batch."""
    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    engine = engine_of(session, "torch")
    visits = visits_of(engine.stack)
    measure_costs(engine, stage)
    half, prompt = 7, [list(range(7))]
    sizes = (1, 2, 3, 4, 6, 8)
    drafts = [[[half + row]] for size in sizes for row in range(size)]
    batches = [[list(range(half, half + size))] for size in sizes]
    one = [[half]]
    for layer in range(3):
        turns = drafts if layer <= stage else batches
        assert visits.calls[layer] == [prompt, *[one, *turns] * 2], layer


def sampled(margins: list[list[float]], agrees: list[list[int]]) -> Calibration:
    rows = tuple(map(tuple, margins)), tuple(map(tuple, agrees))
    return replace(CALIBRATION, sample=Sample(*rows, (len(margins[0]),)))


def test_the_best_stage_drafts_by_the_rule_that_replay_prefers(
    session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    sure = [chance.random() < 0.9 for _ in range(300)]
    calibration = sampled(
        [[1.0] * 300, [2.0 if on else 0.1 for on in sure]], [[0] * 300, [int(on) for on in sure]]
    )
    asked = []

    def costs(engine: Engine, stage: int) -> RowCosts:
        asked.append(stage)
        return COSTS

    monkeypatch.setattr(calibrate, "measure_costs", costs)
    found = tune(engine_of(session), calibration.sample, calibration.sample)
    assert found.sampled == found.rule, "the same text gives the same rule"
    assert asked == [0, 1]
    assert (found.stage, found.costs) == (1, COSTS)
    assert found.rule is not None
    assert found.rule.longest > 1
    sample = calibration.sample
    replayed = simulate(sample.margins[1], sample.agrees[1], sample.lengths, found.rule, COSTS)
    assert found.predicted == replayed.speedup > 1.5


def test_drafts_that_are_never_right_are_off(session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure_costs", lambda engine, stage: COSTS)
    wrong = sampled([[1.0] * 50] * 2, [[0] * 50] * 2).sample
    right = sampled([[1.0] * 50] * 2, [[1] * 50] * 2).sample
    found = tune(engine_of(session), wrong, wrong)
    assert (found.rule, found.sampled, found.predicted) == (None, None, 1.0)
    greedy_only = tune(engine_of(session), text=wrong, own=right)
    assert greedy_only.rule is not None
    assert greedy_only.sampled is None


def test_tuning_by_the_clock(session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    half = sampled([[1.0] * 50] * 2, [[1, 0] * 25] * 2).sample
    found = tune(engine_of(session), half, half)
    assert isinstance(found, Tuning)
    assert found.stage in (0, 1)
    assert found.predicted >= 1
    assert (found.rule is None) == (found.predicted == 1)


def test_two_exits_are_needed_by_which_the_model_predicts(session: LoadedTextRun) -> None:
    check_exits(session.plan)
    message = r"^the model has 1 predicting stages of 1; early exits and drafts need at least 2: train"
    with pytest.raises(ConfigError, match=message):
        check_exits(Plan.of("3", 3))
    with pytest.raises(ConfigError, match="has 1 predicting stages of 2"):
        check_exits(Plan.of(Topology.soft([1.0]), 2))
    check_exits(Plan.of(Topology.soft([0.0, 1.0]), 3))  # one stage has no loss, and is no exit
    path = Plan.of(replace(Topology.chain("1,1,1"), prediction="path:1,3"), 3)
    with pytest.raises(
        ConfigError, match=r"^the model predicts by the path 1,3, of which .* use depth full$"
    ):
        check_exits(path)


@pytest.mark.parametrize("rule", [DraftRule(0.25, 4), None], ids=["drafts", "off"])
def test_what_is_kept_comes_back(here: LoadedTextRun, rule: DraftRule | None) -> None:
    tuning = Tuning(1, rule, 1.375, DraftRule(0.5, 2), COSTS)
    store(here, CALIBRATION, tuning)
    assert load(here) == (CALIBRATION, tuning)
    store(here, replace(CALIBRATION, tokens=5), tuning)
    assert load(here)[0].tokens == 5, "the newer one"
    assert sorted(path.name for path in here.run.folder.iterdir()) == ["calibration.json", "manifest.json"]


def refusal(session: LoadedTextRun) -> str:
    with pytest.raises(RunError) as caught:
        load(session)
    said = str(caught.value)
    assert "\n" not in said
    assert f"run: topograd calibrate {session.run.folder}" in said
    return said


def test_a_run_without_calibration_or_of_other_weights_is_refused(here: LoadedTextRun) -> None:
    assert "is not calibrated" in refusal(here)
    tuning = Tuning(0, None, 1.0, None, COSTS)
    store(here, replace(CALIBRATION, step=6), tuning)
    assert "is of step 6 and 3 stages, the weights are of step 7 and 3" in refusal(here)
    store(here, CALIBRATION, tuning)
    other = replace(here, plan=Plan.of("1,2", 3))
    assert "is of step 7 and 3 stages, the weights are of step 7 and 2" in refusal(other)
    assert "is of other weights" in refusal(replace(here, weights="0" * 64)), "of the same step"


def test_a_calibration_that_the_run_did_not_write_is_refused(here: LoadedTextRun) -> None:
    """R5: one of another run at the same step, even with the right weights written in, is not this run's."""
    store(here, CALIBRATION, Tuning(0, None, 1.0, None, COSTS))
    file = here.run.folder / "calibration.json"
    values = json.loads(file.read_text())
    values["calibration"]["tokens"] = 5
    file.write_text(json.dumps(values))
    with pytest.raises(RunError, match=r"calibration\.json is not the file that this run wrote; delete it"):
        load(here)
    file.unlink()
    assert "is not calibrated" in refusal(here)


def test_a_calibration_of_before_version_0_2_is_read(here: LoadedTextRun) -> None:
    """It names no weights, and its run has no manifest."""
    tuning = Tuning(0, None, 1.0, None, COSTS)
    store(here, CALIBRATION, tuning)
    file = here.run.folder / "calibration.json"
    values = json.loads(file.read_text())
    del values["weights"]
    file.write_text(json.dumps(values))
    here.run.manifest.path.unlink()
    assert load(here) == (CALIBRATION, tuning)


def changed(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Kept values with another one at a path; None leaves it out."""

    def change(values: dict[str, Any]) -> object:
        *way, last = path.split(".")
        inner = values
        for key in way:
            inner = inner[key]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
        return values

    return change


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list": lambda values: [values],
    "no calibration": changed("calibration", None),
    "another format": changed("calibration.format", "x"),
    "a stage too few": changed("calibration.agreement", [0.5, 1.0]),
    "no tuning": changed("tuning", None),
    "a tuning of text": changed("tuning", "fast"),
    "no rule": changed("tuning.rule", None),
    "a rule of nothing": changed("tuning.rule", {}),
    "a draft of nothing": changed("tuning.rule.longest", 0),
    "a stage of text": changed("tuning.stage", "one"),
    "an endless stage": changed("tuning.stage", float("inf")),
    "no costs": changed("tuning.costs", {}),
    "free drafts": changed("tuning.costs.draft", 0.0),
    "costs as a list": changed("tuning.costs.deep", [0.5, 0.75]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_calibration_is_refused(
    here: LoadedTextRun, damage: Callable[[dict[str, Any]], object]
) -> None:
    """Bound by the run all the same: so wrote a version that we do not know."""
    store(here, CALIBRATION, Tuning(1, DraftRule(0.25, 4), 1.375, None, COSTS))
    file = here.run.folder / "calibration.json"
    here.run.manifest.bind(file.name, json.dumps(damage(json.loads(file.read_text()))))
    refusal(here)


@pytest.mark.parametrize("text", ["", "{", '{"calibration": '], ids=["empty", "brace", "torn"])
def test_what_is_no_json_is_refused(here: LoadedTextRun, text: str) -> None:
    (here.run.folder / "calibration.json").write_text(text)
    refusal(here)


def test_the_models_own_text_is_read_behind_its_prompts(session: LoadedTextRun) -> None:
    """Every token but the prompt's, and each stage's agreement with the last on what full depth wrote."""
    engine = engine_of(session)
    text = heldout_text(session, None, 300)
    own = calibrate.own_text(session, engine, text)
    rows = min(calibrate.OWN_ROWS, len(text.inputs[::2]))
    start = engine.context // 4
    each = min(calibrate.OWN_TOKENS, engine.context - start)
    assert own.lengths == (each,) * rows
    prompt = text.inputs[0][:start].tolist()
    [written] = generate_batch(FixedDepth(engine), [prompt], each)
    [first] = generate_batch(FixedDepth(engine, 0), [prompt], 1)
    assert own.agrees[0][0] == int(first[0].token == written[0].token)
