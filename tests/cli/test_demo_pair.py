"""Trainings in processes of their own: what they say when they fail, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from topograd.cli.demo_pair import side_by_side
from topograd.errors import RunError
from waiting import LIMIT, wait_until


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
    wait_until(lambda: all(log.exists() and log.stat().st_size for log in logs), "a step of each")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        process.send_signal(number)
    assert process.wait(LIMIT) == code
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left in its group
    assert all(any((log.parent / "checkpoints").glob("step-*")) for log in logs)
