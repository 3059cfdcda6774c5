"""Several trainings at the same time: each a `topograd train` of its own, all shown together.

Every process gets an equal share of the cores. Progress is read from the runs' metrics. Ctrl-C reaches the
processes too; each saves and ends, and the caller sees which runs are finished.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from topograd.cli.main import INTERRUPTED
from topograd.cli.progress import trainings_progress
from topograd.errors import RunError
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.training.trainer import OnStep

SECONDS_BETWEEN_LOOKS = 0.5


def side_by_side(folder: Path, flags: Mapping[str, list[str]]) -> None:
    """Run `topograd train` with these flags for each run `folder`/name, and wait for the end of all."""
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // len(flags))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with ExitStack() as opened:
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        opened.callback(signal.signal, signal.SIGTERM, before)
        processes = {}
        for name, words in flags.items():
            log = opened.enter_context(open(folder / f"{name}.log", "w+", encoding="utf-8"))
            command = [sys.executable, "-m", "topograd", "train", *words, "--json"]
            processes[name] = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log, env=environment
            )
            opened.callback(_end, processes[name])
        _watch(folder, processes)
    for name, process in processes.items():
        if process.returncode not in (0, INTERRUPTED):
            said = (folder / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
            raise RunError(f"training {folder / name} failed: {said[-1] if said else 'it said nothing'}")


def _watch(folder: Path, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Show the runs until every process has ended; Ctrl-C only waits, the processes know it themselves."""
    with trainings_progress(list(processes)) as bars:
        seen = dict.fromkeys(processes, 0)
        running = True
        while running:
            running = any(process.poll() is None for process in processes.values())
            try:
                time.sleep(SECONDS_BETWEEN_LOOKS if running else 0)
                for name in processes:
                    seen[name] = _show(folder / name, bars[name], seen[name])
            except KeyboardInterrupt:
                continue


def _show(folder: Path, on_step: OnStep, seen: int) -> int:
    """Tell the bar the newest step of a run, if it is new; returns that step."""
    if not (folder / "config.toml").exists():
        return seen
    run = Run.open(folder)
    records = [record for record in run.metrics() if record.get("kind") == "train"]
    if not records or records[-1]["step"] == seen:
        return seen
    newest = records[-1]
    steps = TrainConfig.from_dict(run.read_config()).steps
    on_step(newest["step"], steps, newest["loss"], None)
    return int(newest["step"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """No training goes on unseen when this process ends; ended this way it saves, as with Ctrl-C."""
    if process.poll() is None:
        process.terminate()
        process.wait()
