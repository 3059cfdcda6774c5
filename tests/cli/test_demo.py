"""The demo, on its smallest settings: two real processes train, and the rest reads what they left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import main

FLAGS = ("--preset", "tiny", "--steps", "3", "--seed", "4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo", *FLAGS, "--out", str(folder), "--json"]) == 0
    return folder


def test_the_demo_trains_both_compares_and_reports(made: Path, call: Callable[..., Any]) -> None:
    value = call("demo", *FLAGS, "--out", made, "--json").json
    assert value["backprop"]["steps"] == value["staged"]["steps"] == 3
    assert [len(value[name]["bpb"]["prefix"]) for name in ("backprop", "staged")] == [1, 2]
    gap = 100 * (value["staged"]["bpb"]["last"] / value["backprop"]["bpb"]["last"] - 1)
    assert value["comparison"]["gap"] == pytest.approx(gap)
    memory = value["comparison"]["memory"]
    assert memory["by_stages"].keys() == {"1", "2", "4"}
    assert memory["staged"] == memory["by_stages"]["2"] < memory["backprop"] == memory["by_stages"]["1"]
    titles = [sample["title"] for sample in value["comparison"]["samples"]]
    assert titles == ["first 1 of 2 stages, 2 layers", "first 2 of 2 stages, 4 layers", "backprop, 4 layers"]
    page = Path(value["report"]).read_text()
    assert page.count("<svg") >= 4
    assert all(title in page for title in titles)


def test_a_second_demo_reuses_everything(made: Path, call: Callable[..., Any]) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.glob("*/checkpoints/*/*")}
    kept = (made / "comparison.json").read_bytes()
    answer = call("demo", *FLAGS, "--out", made)
    assert answer.code == 0
    assert answer.err.count("is trained already") == 2
    assert "measuring" not in answer.err
    assert {path: path.stat().st_mtime_ns for path in made.glob("*/checkpoints/*/*")} == before
    assert (made / "comparison.json").read_bytes() == kept
    for words in ("backprop", "stages 1 to 2", "mean of all stages", "peak activation memory", "Report: "):
        assert words in answer.out


def test_an_unfinished_demo_goes_on(made: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    for leftover in ("results.json", "checkpoints"):
        target = folder / "staged" / leftover
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    value = call("demo", *FLAGS, "--out", folder, "--json").json
    again = json.loads((made / "staged" / "results.json").read_text())
    assert value["staged"]["bpb"] == again["bpb"], "the same training gives the same result"


def test_other_settings_in_the_same_folder_are_refused(made: Path, call: Callable[..., Any]) -> None:
    refusal = call("demo", "--preset", "tiny", "--steps", "5", "--seed", "4", "--out", made).refusal
    assert "holds a run with other settings; pass another --out" in refusal
