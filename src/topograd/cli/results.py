"""The results of a run: found in its folder, or measured; and shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from topograd.cli.console import DASH, note, number
from topograd.errors import RunError
from topograd.files import read_json
from topograd.runs import checkpoint
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session

POOLINGS = ("sum", "mean", "shrinkage")


def stored_results(run: Run) -> dict[str, Any] | None:
    """What the run's last training found, unless its checkpoints have moved on or back since."""
    try:
        results = read_json(run.results_file) if run.results_file.exists() else None
    except RunError:
        return None
    if not isinstance(results, dict) or not isinstance(results.get("steps"), int) or "bpb" not in results:
        return None
    newest = checkpoint.latest(run.checkpoints)
    if newest is not None and newest.name != f"step-{results['steps']:08d}":
        return None
    return results | {"run": str(run.folder)}  # the folder may have been moved


def results_of(folder: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """A run's settings and its results; the newest checkpoint is measured if they are not there."""
    run = Run.open(folder)
    config = TrainConfig.from_dict(run.read_config())
    results = stored_results(run)
    if results is None:
        note(f"measuring {folder}")
        results = open_session(folder).evaluate()
        results["finished"] = results["steps"] >= config.steps
        results["seconds"] = _seconds(run, results["steps"])
    return config, results


def _seconds(run: Run, step: int) -> float | None:
    """How long the run had trained at `step`, as it logged it."""
    times = [r.get("seconds") for r in run.metrics() if r.get("kind") == "train" and r.get("step") == step]
    return times[-1] if times else None


def readings_table(config: TrainConfig, results: Mapping[str, Any]) -> Table:
    """How well each prefix of stages predicts, and each pooling of all of them."""
    seconds = results.get("seconds")
    took = f", {seconds:.0f} s" if isinstance(seconds, int | float) else ""
    table = Table(title=f"{results['run']}: step {results['steps']} of {config.steps}{took}")
    table.add_column("prediction")
    for name in ("BPB", "ECE", "effective rank", "usefulness"):
        table.add_column(name, justify="right")
    stages = [stage for stage in config.topology().stages if stage.weight > 0]
    alone = "backprop" if config.interface is None else f"regions {config.partition}, {config.interface}"
    for k, bpb in enumerate(results["bpb"]["prefix"]):
        table.add_row(
            f"stages 1..{k + 1}, {stages[k].stop} layers" if len(stages) > 1 else alone,
            number(bpb),
            number(results["ece"][k]),
            number(results["effective_rank"][k], 1),
            number(results["usefulness"][k]),
        )
    if len(stages) > 1:
        for how in POOLINGS:
            table.add_row(f"{how} of all stages", number(results["bpb"].get(how)), DASH, DASH, DASH)
    return table
