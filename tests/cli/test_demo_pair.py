"""Trainings in processes of their own: what they say when they fail, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from topograd.cli.demo_pair import side_by_side
from topograd.cli.results import stored_results
from topograd.errors import RunError
from topograd.runs.folder import Run
from waiting import LIMIT, wait_until

SMALL = "--model.width 16 --model.heads 2 --model.context 16 --batch 2 --eval-bytes 300 --data"
DEMO = """
import sys
from topograd.cli import demo_pair
from topograd.cli.main import main

flags, (out, *small) = demo_pair._flags, sys.argv[1:]
demo_pair._flags = lambda *words: [*flags(*words), *small]
sys.exit(main(["demo", "--preset", "tiny", "--steps", "100000", "--out", out]))
"""
"""The demo with models and data that are small."""


def test_a_training_that_fails_says_why_and_the_other_one_ends(corpus: Path, tmp_path: Path) -> None:
    good = ["--preset", "tiny", *SMALL.split(), str(corpus), "--steps", "3", "--out", str(tmp_path / "good")]
    with pytest.raises(RunError, match=r"failed: topograd: there is no run at .*nowhere"):
        side_by_side(tmp_path, {"lost": ["--resume", str(tmp_path / "nowhere")], "good": good})
    results = stored_results(Run.open(tmp_path / "good"))
    assert results is not None
    assert (results["steps"], results["finished"]) == (3, True)
    assert "step 3/3" in (tmp_path / "good.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_stopped_leaves_saved_runs_and_no_process(
    number: signal.Signals, code: int, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    command = [sys.executable, "-c", DEMO, str(folder), *SMALL.split(), str(corpus)]
    process = subprocess.Popen(command, start_new_session=True)
    logs = [folder / name / "metrics.jsonl" for name in ("backprop", "staged")]
    wait_until(lambda: all(log.exists() and log.stat().st_size for log in logs), "a step of each")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        process.send_signal(number)
    assert process.wait(LIMIT) == code
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left in its group
    assert all(any((log.parent / "checkpoints").glob("step-*")) for log in logs)
