"""The bench on a tiny run: which numbers there are, and those that do not depend on the clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import written
from raising import refused
from topograd.data.windows import Text
from topograd.decode import benchmark as bench
from topograd.decode.benchmark import (
    EPS,
    bench_decode,
    continued,
    heldout_prompts,
    matrix_bytes,
    read_bandwidth,
)
from topograd.decode.calibration import measure
from topograd.decode.calibration.measure import PositionCosts, Readings, heldout_readings
from topograd.decode.calibration.policy import Acceptance, ExpectedGainPolicy
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.depths import engine_of
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Engine
from topograd.decode.settings import DecodeSettings
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.runs.session import LoadedTextRun, heldout_text
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

SETTINGS = DecodeSettings(prompts=2, prompt_tokens=4, tokens=4, rounds=1, bytes=300, rows=2)
COSTS = PositionCosts({1: 0.5, 4: 0.75}, keep=0.01)
PAYS = DrafterSelection(
    ("stage 1",), ExpectedGainPolicy({"stage 1": Acceptance((0.0,), (0.9,))}, COSTS, 1.25), 1.25
)
DRAFTS, OFF = Tuning(PAYS, PAYS, COSTS), Tuning(None, None, COSTS)
RULES = ["sum-of-bounds", "rival-gain", *(f"flip-rate:{eps}" for eps in EPS)]


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of two stages that disagree."""
    return make_session(2)


@pytest.fixture(scope="module", params=[DRAFTS, OFF, None], ids=["drafts", "off", "tuned"])
def results(session: LoadedTextRun, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What is measured with drafts, without them, and as the clock says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUNDS", 1)
        if request.param is not None:
            patch.setattr(bench, "tune", lambda *_: request.param)
        return bench_decode(session, SETTINGS)


@pytest.fixture(scope="module")
def unseen(session: LoadedTextRun) -> Readings:
    """The odd windows, on which nothing is calibrated."""
    return heldout_readings(session, heldout_text(session, None, 300)).split()[1]


def test_every_number_is_there(session: LoadedTextRun, results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results, allow_nan=False)) == results, "plain numbers"
    assert results["run"] == str(session.run.folder)
    assert results["settings"] == vars(SETTINGS)
    assert results["full"].keys() == {"tokens_per_second", "distinct_4grams"}
    assert len(results["prefix"]) == 1
    assert results["prefix"][0].keys() == {"stages", "tokens_per_second", "speedup", "spread", "agreement"}
    assert results["wand"].keys() >= {"speedup", "agreement", "mean_stage", "exits", "rule", "curve"}
    assert results["speculate"].keys() >= {"speedup", "acceptance", "mismatches", "ties", "identical", "on"}
    assert results["sampled"].keys() >= {"speedup", "acceptance", "temperature"}
    assert results["batch"].keys() >= {"rows", "full_tokens_per_second", "speculate_speedup", "pays"}
    sizes = results["row_costs"]["verify"]
    assert results["rows"] == {size: seconds / sizes["1"] for size, seconds in sizes.items()}
    assert results["row_costs"].keys() == {"verify", "draft", "keep", "uneven", "start"}
    for part in (results["full"], results["prefix"][0], results["speculate"], results["sampled"]):
        assert part["tokens_per_second"] > 0
    for part in (results["prefix"][0], results["wand"], results["speculate"], results["sampled"]):
        assert part["spread"]["low"] <= part["speedup"] == part["spread"]["median"] <= part["spread"]["high"]
    assert results["batch"]["rows"] == 2


def test_agreement_is_that_of_the_windows_not_calibrated_on(
    results: dict[str, Any], unseen: Readings
) -> None:
    same = unseen.top[0] == unseen.top[1]
    assert 0 < same.sum() < len(unseen), "stages that always agree would show nothing"
    assert results["prefix"][0]["agreement"] == same.double().mean().item()
    assert [point["rule"] for point in results["wand"]["curve"]] == RULES
    for point in results["wand"]["curve"]:
        early, late = point["exits"]
        assert early + late == pytest.approx(1)
        assert point["mean_stage"] == pytest.approx(1 + late)
        assert 0 <= point["agreement"] <= 1
        assert 1 - point["agreement"] <= early + 1e-12, "only what left early can be wrong"
        assert 0 <= point["identical"] <= 1 <= point["free_running_mean_stage"] <= 2


def test_the_headline_is_the_fastest_rule_that_agrees_enough(results: dict[str, Any]) -> None:
    wand = results["wand"]
    good = [point for point in wand["curve"] if point["agreement"] >= 0.999]
    if good:
        assert wand["speedup"] == max(point["speedup"] for point in good)
    assert wand["agreement"] >= max(p["agreement"] for p in wand["curve"]) or wand["agreement"] >= 0.999
    assert {key: wand[key] for key in wand if key != "curve"} in wand["curve"]


def test_speculation_writes_what_full_depth_writes(results: dict[str, Any]) -> None:
    found = results["speculate"]
    assert found["mismatches"] == 0
    assert found["identical"] == 1 - found["ties"] / 2
    assert found["on"] == ("drafters" in found) == ("teacher_forced" in found)
    if found["on"]:
        assert set(found["drafters"]) <= {"lookup", "stage 1"}
        assert found["teacher_forced"].keys() == {"acceptance", "speedup", "mean_draft"}
        assert 0 <= found["acceptance"] <= 1 <= found["mean_stage"] <= 2
    else:
        assert (found["acceptance"], found["mean_stage"], found["predicted_speedup"]) == (None, 2, 1)


def test_ways_are_the_results_as_rows(results: dict[str, Any]) -> None:
    rows, wand, draft = results["ways"], results["wand"], results["speculate"]
    assert [row["way"] for row in rows] == [
        "full",
        "prefix:1",
        f"wand:{wand['rule']}",
        "speculate" if draft["on"] else "speculate (off)",
        "full, temperature 0.8",
        "speculate, temperature 0.8",
        "full, 2 rows",
        "speculate, 2 rows",
    ]
    columns = ["way", "tokens_per_second", "speedup", "agreement", "identical", "mean_stage", "acceptance"]
    assert all(list(row) == columns for row in rows)
    assert [row["agreement"] for row in rows[:4]] == [
        *(1, results["prefix"][0]["agreement"], wand["agreement"], 1)
    ]
    assert [row["speedup"] for row in rows[:4]] == [
        *(1, results["prefix"][0]["speedup"], wand["speedup"], draft["speedup"])
    ]
    assert [row["mean_stage"] for row in rows[:4]] == [2, 1, wand["mean_stage"], draft["mean_stage"]]
    assert rows[3]["acceptance"] == draft["acceptance"]


def test_prompts_are_continued_one_by_one(session: LoadedTextRun) -> None:
    engine, prompts = engine_of(session), [[1, 2, 3], [4], [5, 6]]
    full = continued(FixedDepth(engine), prompts, 6)
    assert full.texts == [generate_batch(FixedDepth(engine), [prompt], 6)[0] for prompt in prompts]
    assert full.acceptance is None
    mode = Speculate(engine, DraftRule(0.0, 2))
    drafted = accepted = 0
    for prompt in prompts:
        _, tally = written(mode, [prompt], 6)
        drafted, accepted = drafted + tally.drafted, accepted + tally.accepted
    assert drafted > 0
    assert continued(mode, prompts, 6).acceptance == accepted / drafted


def numbered(windows: int) -> Text:
    """Window w holds 10 w .. 10 w + 5; the last two of it are padding."""
    inputs = torch.arange(windows)[:, None] * 10 + torch.arange(6)
    targets = inputs + 1
    targets[:, 4:] = -100
    return Text(inputs, targets, 1)


def test_prompts_are_beginnings_of_windows_not_calibrated_on() -> None:
    assert heldout_prompts(numbered(10), 2, 3) == [[10, 11, 12], [50, 51, 52]]
    assert heldout_prompts(numbered(10), 5, 1) == [[10], [30], [50], [70], [90]]
    assert heldout_prompts(numbered(3), 1, 9) == [[10, 11, 12, 13]], "padding is no text"


def test_of_few_windows_each_gives_one_prompt() -> None:
    assert heldout_prompts(numbered(6), 6, 1) == [[10], [30], [50]]
    assert heldout_prompts(numbered(2), 4, 1) == [[10]]


@pytest.mark.parametrize("name", ["prompts", "prompt_tokens", "tokens", "rounds", "bytes", "rows"])
def test_settings_below_one_are_refused(name: str) -> None:
    with refused(ConfigError, setting=name, given=0, allowed="at least 1"):
        replace(SETTINGS, **{name: 0})


def test_too_much_is_refused() -> None:
    with refused(ConfigError, setting="tokens", given=1000):
        DecodeSettings(prompts=1000, tokens=1000, rounds=2)


def test_too_little_text_is_refused(session: LoadedTextRun) -> None:
    with refused(ConfigError, setting="bytes", given=20):
        bench_decode(session, replace(SETTINGS, bytes=20))


def test_one_stage_is_refused(session: LoadedTextRun) -> None:
    one = replace(session, plan=Plan.of(Topology.chain("2"), 2))
    with refused(ConfigError, setting="partition"):
        bench_decode(one, SETTINGS)


def test_bytes_of_a_token() -> None:
    gpt = GPT(layers=2, width=16, heads=2, vocab=10, context=8, kv_heads=1, mlp_ratio=2.0)
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 2 * 16 * 32  # queries and output, keys and values, the MLP
    assert matrix_bytes(Engine(gpt, "1,1"), gpt) == 4 * (2 * layer + 10 * 16)


def test_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = iter((0.0, 9.0, 10.0, 19.0, 20.0, 20.5, 30.0, 30.25, 40.0, 41.0))  # two to warm up, then three
    monkeypatch.setattr("topograd.decode.benchmark.READ_BYTES", 2**16)
    assert read_bandwidth(1) > 0
    monkeypatch.setattr("topograd.runtime.native.library.missing_reason", lambda: "torch reads alone")
    with monkeypatch.context() as patch:
        patch.setattr("topograd.timing.time.perf_counter", lambda: next(shown))
        assert read_bandwidth(3) == 2**16 / 0.25, "the best round"
