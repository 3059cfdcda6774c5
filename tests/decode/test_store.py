"""Calibrating a run: readings against a direct computation, what is timed, the choice, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.data.windows import Text
from topograd.decode.calibration.measure import EPS, Bounds, Calibration, PositionCosts, heldout_readings
from topograd.decode.calibration.policy import Acceptance, ExpectedGainPolicy
from topograd.decode.calibration.store import load, store
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.depths import engine_of
from topograd.decode.engine import check_exits
from topograd.errors import ConfigError, RunError
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT, STEP = 257, 16, 7
COSTS = PositionCosts({1: 0.5, 4: 0.75}, draft=0.1, keep=0.2, start=0.3)
PAYS = DrafterSelection(
    ("lookup", "stage 2 (3)"),
    ExpectedGainPolicy(
        {"lookup": Acceptance((1.0,), (0.5,)), "stage 2": Acceptance((0.0, 2.0), (0.5, 0.9), (0.25, 0.75))},
        COSTS,
        1.25,
        4,
    ),
    1.375,
    (5, 9, 200),
)
OFF = Tuning(None, None, COSTS)
CALIBRATION = Calibration(
    step=STEP,
    stages=3,
    tokens=4,
    shift=Bounds((1.0, 2.0), (3.0, 4.0)),
    gain=Bounds((0.5, 0.25), (5.0, 6.0)),
    change_rate=(0.5, 0.25),
    agreement=(0.25, 0.75, 1.0),
    flip_thresholds=tuple((100 * eps, float("inf")) for eps in EPS),
)


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of three stages that disagree, saved as if of step 7."""
    return make_session(3, STEP)


@pytest.fixture
def here(session: LoadedTextRun, tmp_path: Path) -> LoadedTextRun:
    """The session of a folder in which nothing is kept yet."""
    return replace(session, run=Run(tmp_path))


def keep(session: LoadedTextRun, calibration: Calibration, tuning: Tuning) -> None:
    """Store it for the session's own runtime, in float32."""
    store(session, engine_of(session).runtime, calibration, tuning)


def kept(session: LoadedTextRun) -> tuple[Calibration, Tuning]:
    return load(session, engine_of(session).runtime)


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


def test_two_exits_are_needed_by_which_the_model_predicts(session: LoadedTextRun) -> None:
    check_exits(session.plan)
    with refused(ConfigError, setting="partition"):
        check_exits(Plan.of("3", 3))
    with refused(ConfigError, setting="partition"):
        check_exits(Plan.of(Topology.soft([1.0]), 2))
    check_exits(Plan.of(Topology.soft([0.0, 1.0]), 3))  # one stage has no loss, and is no exit
    path = Plan.of(replace(Topology.chain("1,1,1"), prediction="path:1,3"), 3)
    with refused(ConfigError, setting="depth", remedy="use depth full"):
        check_exits(path)


@pytest.mark.parametrize("tuning", [Tuning(PAYS, None, COSTS), Tuning(None, PAYS, COSTS), OFF])
def test_what_is_kept_comes_back(here: LoadedTextRun, tuning: Tuning) -> None:
    keep(here, CALIBRATION, tuning)
    assert kept(here) == (CALIBRATION, tuning)
    keep(here, replace(CALIBRATION, tokens=5), tuning)
    assert kept(here)[0].tokens == 5, "the newer one"
    assert sorted(path.name for path in here.run.folder.iterdir()) == ["calibration.json", "manifest.json"]


def refusal(session: LoadedTextRun) -> str:
    """Which field is at fault."""
    with pytest.raises(RunError) as caught:
        kept(session)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy == f"run: topograd calibrate {session.run.folder}"
    return caught.value.setting


def test_a_run_without_calibration_or_of_other_weights_is_refused(here: LoadedTextRun) -> None:
    assert refusal(here) == "calibration"
    keep(here, replace(CALIBRATION, step=6), OFF)
    assert refusal(here) == "step"
    keep(here, CALIBRATION, OFF)
    other = replace(here, plan=Plan.of("1,2", 3))
    assert refusal(other) == "stages"
    assert refusal(replace(here, weights="0" * 64)) == "weights", "of the same step"


def test_a_calibration_that_the_run_did_not_write_is_refused(here: LoadedTextRun) -> None:
    """R5: one of another run at the same step, even with the right weights written in, is not this run's."""
    keep(here, CALIBRATION, OFF)
    file = here.run.folder / "calibration.json"
    values = json.loads(file.read_text())
    next(iter(values["entries"].values()))["calibration"]["tokens"] = 5
    file.write_text(json.dumps(values))
    with pytest.raises(RunError, match=r"calibration\.json is not the file that this run wrote; delete it"):
        kept(here)
    file.unlink()
    assert refusal(here) == "calibration"


def test_each_runtime_and_precision_has_its_own(here: LoadedTextRun) -> None:
    """Costs of drafts and how often they are right differ between float32 and int8, torch and native."""
    native, torch_ = (engine_of(here, name).runtime for name in ("native", "torch"))
    int8 = engine_of(here, "native", "int8").runtime
    pays, other = Tuning(PAYS, None, COSTS), replace(CALIBRATION, tokens=5)
    store(here, native, CALIBRATION, pays)
    for runtime, name in ((int8, "native int8"), (torch_, "torch float32")):
        with refused(RunError, setting="precision", given=name) as caught:
            load(here, runtime)
        assert f"is calibrated for native float32, not for {name}; run: topograd calibrate" in str(
            caught.value
        )
    store(here, int8, other, OFF)
    assert load(here, native) == (CALIBRATION, pays)
    assert load(here, int8) == (other, OFF)
    store(replace(here, weights="0" * 64), int8, other, OFF)
    with refused(RunError, setting="precision"):
        load(replace(here, weights="0" * 64), native)


def test_a_calibration_of_version_2_is_of_float32(here: LoadedTextRun) -> None:
    """It did not say of which runtime, and it is kept beside newer ones."""
    keep(here, CALIBRATION, OFF)
    values = json.loads(here.run.calibration_file.read_text())
    (entry,) = values.pop("entries").values()
    here.run.manifest.bind("calibration.json", json.dumps({**values, **entry, "version": 2}))
    here = replace(here)
    int8 = engine_of(here, "native", "int8").runtime
    for runtime in ("native", "torch"):
        assert load(here, engine_of(here, runtime).runtime) == (CALIBRATION, OFF)
    with refused(RunError, setting="precision"):
        load(here, int8)
    store(here, int8, CALIBRATION, Tuning(PAYS, None, COSTS))
    assert load(here, int8)[1].greedy == PAYS
    assert kept(here) == (CALIBRATION, OFF)


def changed(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Kept values with another one at a path, of the file or of its entry; None leaves it out."""

    def change(values: dict[str, Any]) -> object:
        *way, last = path.split(".")
        inner = values if path in values else next(iter(values["entries"].values()))
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
    "another format": changed("format", "x"),
    "no format": changed("format", None),
    "a later version": changed("version", 4),
    "no entries": changed("entries", None),
    "entries as a list": changed("entries", []),
    "a stage too few": changed("calibration.agreement", [0.5, 1.0]),
    "a threshold too few": changed("calibration.flip_thresholds", {"0.0002": [1, 2]}),
    "no whole step": changed("tuning.greedy.steps", 1.5),
    "no tuning": changed("tuning", None),
    "a tuning of text": changed("tuning", "fast"),
    "nothing for greedy text": changed("tuning.greedy", None),
    "drafters of nothing": changed("tuning.greedy", {}),
    "drafters as a number": changed("tuning.greedy.drafters", 3),
    "an endless prediction": changed("tuning.greedy.predicted", "fast"),
    "no costs": changed("tuning.costs", {}),
    "drafts that cost less than nothing": changed("tuning.costs.draft", -1.0),
    "costs as a list": changed("tuning.costs.verify", [0.5, 0.75]),
    "rates above 1": changed("tuning.greedy.acceptance.lookup.rates", [2.0]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_calibration_is_refused(
    here: LoadedTextRun, damage: Callable[[dict[str, Any]], object]
) -> None:
    """Bound by the run all the same: so wrote a version that we do not know."""
    keep(here, CALIBRATION, Tuning(PAYS, None, COSTS))
    file = here.run.folder / "calibration.json"
    here.run.manifest.bind(file.name, json.dumps(damage(json.loads(file.read_text()))))
    refusal(here)


@pytest.mark.parametrize("text", ["", "{", '{"calibration": '], ids=["empty", "brace", "torn"])
def test_what_is_no_json_is_refused(here: LoadedTextRun, text: str) -> None:
    (here.run.folder / "calibration.json").write_text(text)
    refusal(here)
