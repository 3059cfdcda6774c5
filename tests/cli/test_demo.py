"""The demo, on its smallest settings: two real processes train, and the rest reads what they left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import main
from topograd.cli.side_by_side import side_by_side
from topograd.errors import RunError

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


def test_a_training_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"failed: topograd: there is no run at .*nowhere"):
        side_by_side(tmp_path / "out", {"lost": ["--resume", str(tmp_path / "nowhere")]})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_stopped_leaves_saved_runs_and_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "topograd", "demo", "--preset", "tiny", "--out", str(folder)]
    process = subprocess.Popen([*command, "--steps", "100000"], start_new_session=True)
    logs = [folder / name / "metrics.jsonl" for name in ("backprop", "staged")]
    deadline = time.monotonic() + 60
    while not all(log.exists() and log.stat().st_size for log in logs) and time.monotonic() < deadline:
        time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        process.send_signal(number)
    assert process.wait(60) == code
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left in its group
    assert all(any((log.parent / "checkpoints").glob("step-*")) for log in logs)
