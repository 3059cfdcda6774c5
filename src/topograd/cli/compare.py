"""`topograd compare`: runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, note, number, out, parse, percent, print_json
from topograd.cli.results import POOLINGS, plan_of, results_of
from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig

_SAME_TEXT = ("data", "tokenizer", "eval_bytes")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Put runs side by side; the gap is to the first backprop run, or to the first run if there is none."""

    folders: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR [DIR ...]")]]
    """The runs' folders."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Compare, print, return the exit code."""
    asked = parse(Compare, argv, "compare")
    if not asked.folders:
        raise ConfigError("there is no run to compare; give the folders of some: topograd compare DIR DIR")
    runs = [results_of(folder) for folder in asked.folders]
    comparison = compare(runs)
    settings = [config for config, _ in runs]
    for name in _SAME_TEXT:
        if len({getattr(config, name) for config in settings}) > 1:
            note(f"these runs differ in {name}: their bits per byte were measured on different text")
    if asked.json:
        print_json(comparison)
    else:
        out().print(_table(comparison))
    return 0


def compare(runs: list[tuple[TrainConfig, dict[str, Any]]]) -> dict[str, Any]:
    """One row for each run, and the run that the gaps are against.

    A gap is of bits per byte of what the models predict, in %.
    """
    stages = [len(plan_of(config).stages) for config, _ in runs]
    reference = stages.index(1) if 1 in stages else 0
    base = runs[reference][1]["bpb"]["prediction"]
    rows = [_row(config, results, base) for config, results in runs]
    return {"against": rows[reference]["run"], "runs": rows}


def _row(config: TrainConfig, results: dict[str, Any], base: float) -> dict[str, Any]:
    from topograd.training.gap import gap_percent  # brings torch

    bpb, plan = results["bpb"], plan_of(config)
    named = {f"prefix {k + 1}": value for k, value in enumerate(bpb["prefix"])}
    if len(named) > 1:
        named |= {how: bpb[how] for how in ("prediction", *POOLINGS)}
    best = min(named, key=lambda name: named[name])
    return {
        "run": results["run"],
        "partition": [len(planned.layers) for planned in plan.stages],
        "graph": config.topology.graph,
        "heads": config.topology.heads,
        "predicts_by": plan.prediction.kind,
        "steps": results["steps"],
        "finished": results.get("finished"),
        "seconds": results.get("seconds"),
        "bpb": bpb,
        "best": {"prediction": best, "bpb": named[best]},
        "gap": {
            "prediction": gap_percent(bpb["prediction"], base),
            "last": gap_percent(bpb["last"], base),
            "best": gap_percent(named[best], base),
        },
    }


def _table(comparison: dict[str, Any]) -> Table:
    """One column for each run: names are long, and there are more readings than runs."""
    rows = comparison["runs"]
    table = Table(title=f"bits per byte; the gap is to {comparison['against']}")
    table.add_column("")
    for row in rows:
        table.add_column(Path(row["run"]).name, justify="right", overflow="fold")
    cells = {
        "partition": [",".join(map(str, row["partition"])) for row in rows],
        "steps": [f"{row['steps']}{'' if row['finished'] else ', unfinished'}" for row in rows],
        "seconds": [number(row["seconds"], 1) for row in rows],
        "predicts by": [row["predicts_by"] for row in rows],
        "what it predicts": [number(row["bpb"]["prediction"]) for row in rows],
        "last stage": [number(row["bpb"]["last"]) for row in rows],
        "best prefix": [number(min(row["bpb"]["prefix"])) for row in rows],
        **{how: [number(row["bpb"][how]) for row in rows] for how in POOLINGS},
        "gap of what it predicts": [percent(row["gap"]["prediction"]) for row in rows],
        "gap of the best": [f"{percent(row['gap']['best'])} ({row['best']['prediction']})" for row in rows],
    }
    for name, values in cells.items():
        table.add_row(name, *values)
    return table
