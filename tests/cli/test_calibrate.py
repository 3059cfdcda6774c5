import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.cli import progress
from topograd.cli.main import main
from topograd.decode.calibration import tune as module
from topograd.decode.calibration.measure import EPS, Calibration, PositionCosts, heldout_readings
from topograd.decode.calibration.policy import ExpectedGainPolicy
from topograd.decode.calibration.store import load, open_pool
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.depths import engine_of
from topograd.runs import session
from topograd.runs.session import heldout_text, open_session

COSTS = PositionCosts({1: 2.0, 4: 3.0})
PAYS = DrafterSelection(("lookup", "stage 1"), ExpectedGainPolicy({}, COSTS, 1.3), 1.374)


@pytest.fixture
def folder(staged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(staged, tmp_path / "run")


def kept(folder: Path, weights: str = "float32") -> tuple[Calibration, Tuning]:
    opened = open_session(folder)
    return load(opened, engine_of(opened, weights=weights).runtime)


def test_what_is_measured_is_printed_and_kept(folder: Path, call: Any) -> None:
    results = call("calibrate", folder, "--bytes", 500, "--json").json
    assert list(results) == [
        *("run", "runtime", "weights", "step", "tokens"),
        *("transitions", "rival_gain", "agreement", "rules", "tuning", "pool"),
    ]
    calibration, tuning = kept(folder)
    assert (results["run"], results["step"], results["tokens"]) == (str(folder), 12, calibration.tokens)
    assert results["transitions"] == [
        {
            "from": 1,
            "to": 2,
            "p99": calibration.shift.p99[0],
            "max": calibration.shift.max[0],
            "change_rate": calibration.change_rate[0],
        }
    ]
    assert results["rival_gain"] == [
        {"stage": 1, "p99": calibration.gain.p99[0], "max": calibration.gain.max[0]}
    ]
    assert results["agreement"] == list(calibration.agreement)
    assert 0 < results["agreement"][0] < 1 == results["agreement"][1]
    found = results["tuning"]
    assert (found["greedy"] is None) == (tuning.greedy is None) == (found["predicted_speedup"] == 1)
    if tuning.greedy is not None:
        assert found["greedy"]["drafters"] == list(tuning.greedy.drafters)
        assert found["predicted_speedup"] == found["greedy"]["predicted"] == tuning.greedy.predicted > 1
    assert found["seconds"]["verify"]["1"] == tuning.costs.full > 0
    assert [entry.name for entry in folder.glob("*calibration*")] == ["calibration.json"]


def test_rules_are_measured_on_the_half_that_did_not_calibrate(folder: Path, call: Any) -> None:
    results = call("calibrate", folder, "--bytes", 500, "--json").json
    opened = open_session(folder)
    readings = heldout_readings(opened, heldout_text(opened, None, 500))
    odd = [i for i, row in enumerate(readings.sequence.tolist()) if row % 2]
    assert results["tokens"] == len(readings) - len(odd)
    assert len(odd) > 100
    calibration, _ = kept(folder)
    rows = results["rules"]
    assert [(row["rule"], row["number"]) for row in rows] == [
        ("sum-of-bounds", 1),
        ("rival-gain", 1),
        *(("flip-rate", eps) for eps in EPS),
    ]
    assert [row["thresholds"] for row in rows[:2]] == [
        list(calibration.shift.p99),
        list(calibration.gain.p99),
    ]
    seen = set()
    for row in rows:
        tau = row["thresholds"][0]
        left = [i for i in odd if tau is not None and readings.margin[0, i] > tau]
        wrong = [i for i in left if readings.top[0, i] != readings.top[1, i]]
        assert row["exits"] == pytest.approx([len(left) / len(odd), 1 - len(left) / len(odd)])
        assert row["agreement"] == pytest.approx(1 - len(wrong) / len(odd))
        assert row["mean_stage"] == pytest.approx(2 - len(left) / len(odd))
        seen.add(len(left))
    assert len(seen) > 2, "rules that all do the same would show nothing"


def test_the_pools_are_measured_kept_and_read(folder: Path, call: Any) -> None:
    pool = call("calibrate", folder, "--bytes", 500, "--json").json["pool"]
    assert list(pool["bpb"]) == ["last", "pool", "router", "shrinkage"]
    kept = open_pool(open_session(folder), "pool").weights
    assert kept is not None
    assert pool["weights"] == kept.w.tolist()
    for depth in pool["gain"]:
        low, high = pool["interval"][depth]
        assert low <= pool["gain"][depth] <= high
        words = ("--depth", depth, "--json")
        assert call("generate", folder, "--prompt", "a", "--tokens", 4, *words).json["depth"] == depth
        scored = call("score", folder, "--context", "a", "--continuation", " b", *words).json
        assert scored["depths"] == [depth]
        assert scored["stages"][0]["logprob"] < 0
    shown = call("calibrate", folder, "--bytes", 500).out
    assert "All exits pooled, on text that was not fitted to" in shown


def test_more_text_is_more_tokens_and_the_run_is_calibrated_anew(folder: Path, call: Any) -> None:
    few, many = (call("calibrate", folder, "--bytes", n, "--json").json for n in (100, 400))
    assert few["tokens"] < many["tokens"] == kept(folder)[0].tokens


def test_each_precision_is_measured_by_itself(folder: Path, call: Any) -> None:
    for weights in ("float32", "int8"):
        results = call("calibrate", folder, "--bytes", 500, "--weights", weights, "--json").json
        assert results["weights"] == weights
    float32, int8 = kept(folder), kept(folder, "int8")
    assert float32[0].tokens == int8[0].tokens
    assert float32[0].shift != int8[0].shift, "its readings are those of its weights"


def test_tables_for_people(folder: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tune", lambda *_: Tuning(PAYS, None, COSTS))
    answer = call("calibrate", folder, "--bytes", 500)
    assert answer.code == 0
    for words in ("1 → 2", "p99 |Δ|", "top-1 changes", "max gain", "top-1 agrees", "leave after 1..2, %"):
        assert words in answer.out
    for name in ("sum-of-bounds:1", "rival-gain:1", *(f"flip-rate:{eps:g}" for eps in EPS)):
        assert f"│ {name} " in answer.out
    assert answer.out.endswith(
        "Drafts: by lookup and stage 1, where they pay; 1.37 times full depth is predicted.\n"
    )
    assert max(map(len, answer.out.splitlines()[1:-1])) <= 80
    assert f"kept in {folder / 'calibration.json'}" in answer.err


def test_drafts_that_do_not_pay_are_off(folder: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tune", lambda *_: Tuning(None, None, COSTS))
    tuning = call("calibrate", folder, "--bytes", 500, "--json").json["tuning"]
    assert tuning == {
        "predicted_speedup": 1.0,
        "greedy": None,
        "sampled": None,
        "seconds": {"verify": {"1": 2.0, "4": 3.0}, "draft": 0.0, "keep": 0.0, "uneven": 0.0, "start": 0.0},
    }
    assert "Drafts: off; none is predicted to be faster" in call("calibrate", folder, "--bytes", 500).out


def test_whoever_waits_is_told(folder: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    answer = call("calibrate", folder, "--bytes", 100, "--json")
    assert answer.err.splitlines()[:2] == [f"topograd: windows read: {n} of 6" for n in (4, 6)]
    assert "measuring what drafts cost" in answer.err


def test_a_folder_that_cannot_be_written_is_said_before_the_work(
    folder: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != folder)
    monkeypatch.setattr(session, "heldout_text", lambda *_: pytest.fail("the work has started"))
    assert f"{folder} cannot be written, so nothing can be kept there" in call("calibrate", folder).refusal


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--bytes 0", "--bytes is 0; it must be at least 1"),
        ("--bytes 3", "too small for one window"),
        ("--bytes 20", "gives 1 window of 16 tokens; calibrating needs 2"),
        ("--bytes few", "--bytes is 'few'; it must be a whole number"),
        ("--data x", "Unrecognized options: --data"),
    ],
)
def test_bad_questions_are_one_line(words: str, why: str, staged: Path, call: Any) -> None:
    assert why in call("calibrate", staged, *words.split()).refusal
    assert not (staged / "calibration.json").exists()


def test_runs_that_cannot_be_calibrated(staged: Path, backprop: Path, call: Any) -> None:
    assert "has 1 predicting stages of 1; early exits" in call("calibrate", backprop).refusal
    assert "it does not exist" in call("calibrate", staged / "nowhere").refusal
    assert "MODEL is missing" in call("calibrate").refusal


def test_a_calibration_of_other_weights_is_refused(folder: Path, call: Any) -> None:
    assert main(["calibrate", str(folder), "--bytes", "200", "--json"]) == 0
    assert call("generate", folder, "--tokens", 2, "--depth", "wand").code == 0
    shutil.rmtree(folder / "checkpoints" / "step-00000012")
    why = call("generate", folder, "--tokens", 2, "--depth", "wand").refusal
    assert "is of step 12 and 2 stages, the weights are of step 10" in why
    assert f"run: topograd calibrate {folder}" in why
