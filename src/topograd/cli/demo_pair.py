"""The demo's first half: one model trained twice, in stages and by backprop, and what the two show.

The two trainings run at the same time, each in a process of its own with half of the cores: small models
use two cores better so than one after the other. Progress is read from the runs' metrics. Ctrl-C reaches the
processes too; each saves and ends. What a first demo makes, a second one reuses: each training is an ordinary
run in the demo's folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from topograd.cli.console import note, number, percent
from topograd.cli.main import INTERRUPTED
from topograd.cli.progress import trainings_progress
from topograd.cli.results import POOLINGS, stored_results
from topograd.decode.depths import engine_of
from topograd.decode.sampling import Sampling
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import RunError
from topograd.files import read_json, write_json
from topograd.report.data import RunData
from topograd.runs.config import TrainConfig, preset
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, load_data, open_session
from topograd.training.gap import gap_percent, measure_step
from topograd.training.trainer import OnStep

if TYPE_CHECKING:
    from topograd.cli.demo import Demo

PROMPT = "def read("
SAMPLE_TOKENS = 120
SECONDS_BETWEEN_LOOKS = 0.5


def wanted(asked: Demo) -> dict[str, TrainConfig]:
    """The two trainings: the same model, data and steps, another partition."""
    config = preset(asked.preset, seed=asked.seed)
    config = config if asked.steps is None else replace(config, steps=asked.steps)
    layers = config.model.layers
    return {
        "backprop": config.changed(partition=str(layers)),
        "staged": config.changed(partition=asked.partition or ",".join(["2"] * (layers // 2))),
    }


def trained(asked: Demo) -> dict[str, dict[str, Any]]:
    """The results of both runs. What is not finished is trained, the two side by side."""
    missing: dict[str, list[str]] = {}
    for name, config in wanted(asked).items():
        folder = asked.out / name
        if not (folder / "config.toml").exists():
            missing[name] = _flags(asked, config, folder)
            continue
        existing = Run.open(folder)
        found = TrainConfig.from_dict(existing.read_config())
        if replace(found, model=config.model) != config:
            raise RunError(
                f"{folder} holds a run with other settings", remedy="pass another --out, or delete it"
            )
        if (stored_results(existing) or {}).get("finished"):
            note(f"{folder} is trained already")
        else:
            missing[name] = ["--resume", str(folder)]
    if missing:
        load_data(preset(asked.preset))  # once, before two processes would do the same
        side_by_side(asked.out, missing)
    results = {name: stored_results(Run.open(asked.out / name)) for name in wanted(asked)}
    return {name: found for name, found in results.items() if found is not None}


def _flags(asked: Demo, config: TrainConfig, folder: Path) -> list[str]:
    changes = {"partition": config.topology.partition, "steps": config.steps, "seed": config.seed}
    changes |= {"out": folder}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    return ["--preset", asked.preset, *words]


def side_by_side(folder: Path, flags: Mapping[str, list[str]]) -> None:
    """Run `topograd train` with these flags for each run `folder`/name, and wait for the end of all."""
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // len(flags))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with ExitStack() as opened:
        before = signal.getsignal(signal.SIGTERM)
        if before != signal.SIG_IGN:  # what is ignored stays ignored
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
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


def compared(folder: Path, session: LoadedTextRun, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gap, step time, memory and samples; measured once and kept in comparison.json."""
    kept = folder / "comparison.json"
    gap = gap_percent(*(results[name]["bpb"]["prediction"] for name in ("staged", "backprop")))
    if kept.exists():
        found = read_json(kept)
        if isinstance(found, dict) and found.get("gap") == gap:
            return found
    note("measuring step time and memory")
    comparison = {"gap": gap, **measure_step(session), "samples": _samples(session)}
    backprop = open_session(folder / "backprop")
    comparison["samples"] += [_sample(backprop, 0, f"backprop, {backprop.config.model.layers} layers")]
    write_json(kept, comparison)
    return comparison


def _samples(session: LoadedTextRun) -> list[dict[str, str]]:
    stages = session.plan.stages
    return [
        _sample(session, p.index, f"first {p.index + 1} of {len(stages)} stages, {p.stage.stop} layers")
        for p in stages
    ]


def _sample(session: LoadedTextRun, stage: int, title: str) -> dict[str, str]:
    prompt = [session.tokenizer.separator, *session.tokenizer.encode(PROMPT)]
    sampling = Sampling(temperature=0.7, top_k=50)
    [written] = generate_batch(FixedDepth(engine_of(session), stage), [prompt], SAMPLE_TOKENS, sampling)
    text = session.tokenizer.decode([emitted.token for emitted in written])
    return {"title": title, "prompt": PROMPT, "text": text}


def run_data(folder: Path, results: dict[str, Any]) -> RunData:
    """What a report reads of a run."""
    found = Run.open(folder)
    return RunData(folder.name, found.read_config(), found.metrics(), results)


def summary_table(results: dict[str, dict[str, Any]], comparison: dict[str, Any]) -> Table:
    """Everything that was measured, in one table."""
    reference = results["backprop"]["bpb"]["prediction"]
    table = Table(title="Bits per byte of held-out text: lower is better")
    table.add_column("prediction")
    table.add_column("BPB", justify="right")
    table.add_column("against backprop", justify="right")
    table.add_row("backprop", number(reference), "")
    staged = results["staged"]["bpb"]
    for k, bpb in enumerate(staged["prefix"]):
        table.add_row(f"stages 1 to {k + 1}", number(bpb), percent(gap_percent(bpb, reference)))
    for how in POOLINGS:
        bpb = staged[how]
        table.add_row(f"{how} of all stages", number(bpb), percent(gap_percent(bpb, reference)))
    table.add_section()
    step, memory = comparison["step_time_ratio"], comparison["memory"]
    spread = f"{number(step['low'], 2)} to {number(step['high'], 2)}"
    table.add_row("time of a step, staged / backprop", number(step["median"], 2), spread)
    sizes = f"{memory['staged'] / 2**20:.0f} / {memory['backprop'] / 2**20:.0f} MiB"
    table.add_row("peak activation memory, staged / backprop", number(memory["ratio"], 2), sizes)
    return table
