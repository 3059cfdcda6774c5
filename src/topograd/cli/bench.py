"""`topograd bench`: ways of decoding, and of spreading a training over processes, against the plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import (
    DASH,
    Json,
    RuntimeFlag,
    WeightsFlag,
    note,
    number,
    out,
    parse_one_of,
    print_json,
)
from topograd.decode.settings import DecodeSettings
from topograd.parallel.settings import PipelineSettings
from topograd.pretrained import REFERENCE


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Measure full depth, prefixes, early exits and speculation on held-out prompts of a run."""

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="DIR")] = None
    """The run's folder; by default the reference model that comes with the package."""
    settings: Annotated[DecodeSettings, tyro.conf.arg(name="")] = field(default_factory=DecodeSettings)
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Measure stages over processes against one process and against backprop over the same processes."""

    settings: Annotated[PipelineSettings, tyro.conf.arg(name="")] = field(default_factory=PipelineSettings)
    json: Json = False


_KINDS: dict[str, type[Decode | Pipeline]] = {"decode": Decode, "pipeline": Pipeline}


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    asked = parse_one_of(_KINDS, argv, "bench")
    match asked:
        case Decode():
            from topograd.decode.benchmark import bench_decode
            from topograd.runs.session import open_session

            session = open_session(asked.folder or REFERENCE)
            note(f"measuring {session.run.folder}: some minutes, on a quiet machine if you can")
            results = bench_decode(session, asked.settings, asked.runtime, asked.weights)
            tables = [decode_table(results), curve_table(results["wand"])]
        case Pipeline():
            note(
                f"measuring {asked.settings.ranks} processes: a minute or two, on a quiet machine if you can"
            )
            from topograd.parallel.benchmark import bench_pipeline

            results = bench_pipeline(asked.settings)
            tables = [pipeline_table(results)]
    if asked.json:
        print_json(results)
    else:
        console = out()
        for table in tables:
            console.print(table)
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


def pipeline_table(results: Mapping[str, Any]) -> Table:
    """Every way over the ranks: throughput over one process, bubble, bytes, and what the simulator says."""
    settings = results["settings"]
    wire = "loopback" if settings["mbit"] is None else f"{settings['mbit']:g} Mbit/s"
    title = f"{settings['ranks']} ranks of one thread, {settings['microbatches']} micro-batches, {wire}"
    table = Table(title=title, title_justify="left")
    for column in ("way", "over one", "quartiles", "bubble", "MB a step", "s", "simulated"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for name, row in results["ways"].items():
        spread, said = row["spread"], results["simulated"].get(name)
        table.add_row(
            name,
            number(row["throughput_ratio_vs_single"], 2),
            f"{number(spread['low'], 2)}–{number(spread['high'], 2)}",
            number(row["bubble"], 2),
            number(row["bytes"] / 1e6, 2),
            number(row["seconds"]["median"], 2),
            DASH if said is None else number(said["seconds"], 2),
        )
    ratios = results["ratios"]
    gains = (f"{name} {number(ratios[f'{name} over 1f1b']['median'], 2)}" for name in ("staged", "free-int8"))
    table.caption = f"throughput over 1F1B: {', '.join(gains)}; over one: goal {results['goals']['single']}"
    return table
