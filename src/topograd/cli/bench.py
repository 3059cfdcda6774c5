"""`topograd bench decode`: ways of running a model, measured against full depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import Json, note, number, out, parse, print_json
from topograd.depth.bench import Settings, bench_decode
from topograd.pretrained import REFERENCE
from topograd.training.session import open_session


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure full depth, prefixes, early exits and speculation on held-out prompts of a run."""

    what: Annotated[tyro.conf.Positional[Literal["decode"]], tyro.conf.arg(metavar="decode")]
    """What to measure."""
    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="DIR")] = None
    """The run's folder; by default the reference model that comes with the package."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)
    json: Json = False


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    asked = parse(Bench, argv, "bench")
    session = open_session(asked.folder or REFERENCE)
    note(f"measuring {session.run.folder}: some minutes, on a quiet machine if you can")
    results = bench_decode(session, asked.settings)
    if asked.json:
        print_json(results)
    else:
        console = out()
        console.print(decode_table(results))
        console.print(curve_table(results["wand"]))
    return 0


def decode_table(results: Mapping[str, Any]) -> Table:
    """Each way of running the model: speed, agreement, where tokens leave."""
    name = Path(results["run"]).name
    table = Table(title=f"{name}: ways of running it, {results['threads']} threads", title_justify="left")
    for column in ("way", "tok/s", "speed", "agrees", "same", "stage", "kept"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    table.caption = (
        "tok/s: tokens a second; speed: over full depth; agrees: with full depth, teacher-forced; "
        "same: texts; stage: mean; kept: drafts"
    )
    for way in results["ways"]:
        table.add_row(
            way["way"],
            number(way["tokens_per_second"], 0),
            number(way["speedup"], 2),
            number(way["agreement"]),
            *(number(way[key], 2) for key in ("identical", "mean_stage", "acceptance")),
        )
    return table


def curve_table(wand: Mapping[str, Any]) -> Table:
    """Speed against agreement, for every rule."""
    table = Table(title="Leaving early: speedup against teacher-forced agreement")
    for name in ("rule", "speed", "agrees", "same", "stage", "leave after each stage"):
        table.add_column(name, justify="left" if name == "rule" else "right", no_wrap=name == "rule")
    for point in wand["curve"]:
        table.add_row(
            point["rule"],
            number(point["speedup"], 2),
            number(point["agreement"]),
            number(point["identical"], 2),
            number(point["mean_stage"], 2),
            " ".join(number(share, 2) for share in point["exits"]),
        )
    return table
