"""The results of a run: found in its folder, or measured; and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from topograd.cli.console import DASH, grid, note, number
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.topology.branches import path_name
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from topograd.data import Text
    from topograd.data.images import ImageSet
    from topograd.runs.session import LoadedRun
    from topograd.training.trainer import Reading

POOLINGS = ("sum", "mean", "shrinkage")


def stored_results(run: Run) -> dict[str, Any] | None:
    """What the run's last training found, unless its checkpoints have moved on or back since."""
    results = run.read_results()
    if results is None or not isinstance(results.get("steps"), int):
        return None
    measure = results.get(measure_of(results))
    if not isinstance(measure, dict) or not {"prediction", "prefix"} <= measure.keys():
        return None
    names = run.store.names()
    if names and names[-1] != f"step-{results['steps']:08d}":
        return None
    if "weights" in results and names and results["weights"] != run.store.weights(names[-1]):
        return None
    return results | {"run": str(run.folder)}  # the folder may have been moved


def measure_of(results: Mapping[str, Any]) -> str:
    """What judges a run: bits per byte of text, or accuracy on images or hidden tokens."""
    return "accuracy" if "accuracy" in results else "bpb"


def open_any(folder: Path, name: str | None = None) -> LoadedRun:
    """A run of any task with its newest checkpoint, or the one called `name`."""
    from topograd.runs.session import open_run, open_session, read_settings

    images = read_settings(Run.open(folder)).model.task == "images"
    return open_run(folder, name) if images else open_session(folder, name, masked=True)


def heldout(opened: LoadedRun, data: Path | None = None, most: int | None = None) -> Text | ImageSet:
    """What a run is read on: its own held-out sample or `data`; at most so many bytes of text, or images."""
    from topograd.runs.session import LoadedTextRun, heldout_images, heldout_text

    if isinstance(opened, LoadedTextRun):
        return heldout_text(opened, data, most)
    return heldout_images(opened, data, most)


def measured(opened: LoadedRun, held: Any) -> dict[str, Any]:
    """The readings of a run on what `heldout` gave."""
    from topograd.cli.progress import counted
    from topograd.training.evaluation import evaluate
    from topograd.training.image_evaluation import evaluate_images
    from topograd.training.masked_evaluation import evaluate_masked

    task = opened.config.model.task
    how: Mapping[str, Callable[..., Reading]] = {"images": evaluate_images, "masked": evaluate_masked}
    on_batch = counted("images read" if task == "images" else "windows read")
    reading = how.get(task, evaluate)(opened.stack, opened.plan, held, on_batch=on_batch)
    return {"run": str(opened.run.folder), "steps": opened.step, **reading.as_dict()}


def results_of(folder: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """A run's settings and its results; the newest checkpoint is measured if they are not there."""
    from topograd.runs.session import read_settings, topology_at

    run = Run.open(folder)
    config = read_settings(run)
    names = run.store.names()
    if names:
        config = topology_at(config, run.store.extra(names[-1]))
    results = stored_results(run)
    if results is None:
        note(f"measuring {folder}")
        opened = open_any(folder)
        results = measured(opened, heldout(opened))
        results["finished"] = results["steps"] >= config.steps
        results["seconds"] = _seconds(run, results["steps"])
    return config, results


def _seconds(run: Run, step: int) -> float | None:
    """How long the run had trained at `step`, as it logged it."""
    times = [r.get("seconds") for r in run.metrics() if r.get("kind") == "train" and r.get("step") == step]
    return times[-1] if times else None


def note_other_data(configs: Sequence[TrainConfig], measures: str) -> None:
    """Say where runs were measured on different data."""
    for name in ("data", "tokenizer", "eval_bytes"):
        if len({getattr(config, name) for config in configs}) > 1:
            note(f"these runs differ in {name}: their {measures} were measured on different data")


def plan_of(config: TrainConfig) -> Plan:
    """The plan that the settings name."""
    topology = config.build_topology()
    return Plan.of(topology, topology.layers)


def readings_table(config: TrainConfig, results: Mapping[str, Any]) -> Table:
    """How well each exit predicts, the whole model, and each pooling of all stages."""
    seconds = results.get("seconds")
    took = f", {seconds:.0f} s" if isinstance(seconds, int | float) else ""
    measure = measure_of(results)
    shown, name = (accuracy_text, measure) if measure == "accuracy" else (number, "BPB")
    title = f"{results['run']}: step {results['steps']} of {config.steps}{took}"
    table = grid(title, "prediction", name, "ECE", "effective rank", "usefulness")
    plan = plan_of(config)
    exits = plan.predicting()
    for k, value in enumerate(results[measure]["prefix"]):
        table.add_row(
            _exit_name(config, plan, exits, k),
            shown(value),
            number(results["ece"][k]),
            number(results["effective_rank"][k], 1),
            number(results["usefulness"][k]),
        )
    if len(exits) > 1:
        for how in POOLINGS:
            table.add_row(f"{how} of all stages", shown(results[measure].get(how)), DASH, DASH, DASH)
        name = f"model: {predicts_by(plan)}"
        table.add_row(name, shown(results[measure]["prediction"]), DASH, DASH, DASH)
    return table


def accuracy_text(share: object) -> str:
    """A share of right answers in percent."""
    return DASH if number(share) == DASH else f"{number(100 * share, 2)} %"  # type: ignore[operator]


def predicts_by(plan: Plan) -> str:
    """What the model predicts by, in words."""
    prediction = plan.prediction
    if prediction.path is not None:
        return f"the path {path_name(prediction.path)}"
    if prediction.kind == "last":
        return "its last stage"
    read = path_name([stage for stage, _ in prediction.full])
    return f"the sum of stages {read}" if prediction.kind == "sum" else f"a pool of stages {read}"


def _exit_name(config: TrainConfig, plan: Plan, exits: list[int], k: int) -> str:
    if len(exits) > 1:
        read = [stage for stage, _ in plan.prediction.after(exits[k])]
        run = {needed.index: len(needed.layers) for stage in read for needed in plan.needed(stage)}
        return f"stages 1..{k + 1}, {sum(run.values())} layers"
    if config.topology.interface is not None:
        return f"regions {config.topology.partition}, {config.topology.interface}"
    return "backprop" if len(plan.stages) == 1 else f"stage {exits[0] + 1} of {len(plan.stages)}"
