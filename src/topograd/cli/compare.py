"""`topograd compare`: runs side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, grid, note, number, parse, percent, show
from topograd.cli.results import POOLINGS, accuracy_text, measure_of, note_other_data, plan_of, results_of
from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Put runs side by side; the gap is to the first backprop run, or to the first run if there is none."""

    models: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="MODEL [MODEL ...]")]]
    """Runs' folders, Hugging Face folders, GGUF files, hf:ORG/NAME."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Compare, argv, "compare")
    if not args.models:
        raise ConfigError("there is no run to compare", remedy="give some: topograd compare MODEL MODEL")
    from topograd.convert.model_argument import resolve_model

    runs = [results_of(resolve_model(model)) for model in args.models]
    tasks = sorted({config.model.task for config, _ in runs})
    if len(tasks) > 1:
        raise ConfigError(
            f"some of these runs are on {', some on '.join(tasks)}", remedy="compare runs of one kind"
        )
    comparison = compare(runs)
    note_other_data([config for config, _ in runs], "bits per byte" if tasks == ["text"] else "accuracies")
    steps = [row["steps"] for row in comparison["runs"]]
    if len(set(steps)) > 1:
        note(
            f"these runs were trained for {', '.join(map(str, steps))} steps: a gap between them is of the "
            "training's length too"
        )
    show(args.json, comparison, _table)
    return 0


def compare(runs: list[tuple[TrainConfig, dict[str, Any]]]) -> dict[str, Any]:
    """One row for each run, and the run that the gaps are against."""
    stages = [len(plan_of(config).stages) for config, _ in runs]
    reference = stages.index(1) if 1 in stages else 0
    measure = measure_of(runs[reference][1])
    base = runs[reference][1][measure]["prediction"]
    rows = [_row(config, results, measure, base) for config, results in runs]
    return {"against": rows[reference]["run"], "runs": rows}


def _row(config: TrainConfig, results: dict[str, Any], measure: str, base: float) -> dict[str, Any]:
    """A gap of bits per byte is in %; of accuracy, in points of a hundred, and what is above 0 is better."""
    from topograd.training.gap import gap_percent  # brings torch

    images, values, plan = measure == "accuracy", results[measure], plan_of(config)
    named = {f"prefix {k + 1}": value for k, value in enumerate(values["prefix"])}
    if len(named) > 1:
        named |= {how: values[how] for how in ("prediction", *POOLINGS)}
    best = (max if images else min)(named, key=lambda name: named[name])
    compared = {"prediction": values["prediction"], "last": values["last"], "best": named[best]}
    return {
        "run": results["run"],
        **({"model": getattr(config.model, "network", config.model.kind)} if images else {}),
        "partition": [len(planned.layers) for planned in plan.stages],
        "graph": config.topology.graph,
        "heads": config.topology.heads,
        "predicts_by": plan.prediction.kind,
        "steps": results["steps"],
        "finished": results.get("finished"),
        "seconds": results.get("seconds"),
        measure: values,
        "best": {"prediction": best, measure: named[best]},
        "gap": {
            name: 100 * (value - base) if images else gap_percent(value, base)
            for name, value in compared.items()
        },
    }


def _table(comparison: dict[str, Any]) -> Table:
    """One column for each run: names are long, and there are more readings than runs."""
    rows = comparison["runs"]
    measure = measure_of(rows[0])
    shown = accuracy_text if measure == "accuracy" else number
    best = max if measure == "accuracy" else min
    gap = points if measure == "accuracy" else percent
    title = "accuracy" if measure == "accuracy" else "bits per byte"
    names = [Path(row["run"]).name for row in rows]
    table = grid(f"{title}; the gap is to {comparison['against']}", "", *names, overflow="fold")
    cells = {
        "partition": [",".join(map(str, row["partition"])) for row in rows],
        "steps": [f"{row['steps']}{'' if row['finished'] else ', unfinished'}" for row in rows],
        "seconds": [number(row["seconds"], 1) for row in rows],
        "predicts by": [row["predicts_by"] for row in rows],
        "what it predicts": [shown(row[measure]["prediction"]) for row in rows],
        "last stage": [shown(row[measure]["last"]) for row in rows],
        "best prefix": [shown(best(row[measure]["prefix"])) for row in rows],
        **{how: [shown(row[measure][how]) for row in rows] for how in POOLINGS},
        "gap of what it predicts": [gap(row["gap"]["prediction"]) for row in rows],
        "gap of the best": [f"{gap(row['gap']['best'])} ({row['best']['prediction']})" for row in rows],
    }
    for name, values in cells.items():
        table.add_row(name, *values)
    return table


def points(value: object) -> str:
    """A signed difference of accuracies in points of a hundred, or a dash."""
    return percent(value).replace("%", "points")
