"""`topograd bench`: strategies of decoding, alone and in a server; in a clone also `bench pipeline`."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import (
    Json,
    OptionalModel,
    RuntimeFlag,
    WeightsFlag,
    grid,
    note,
    number,
    parse_one_of,
    show,
)
from topograd.decode.settings import DecodeSettings
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.serve.settings import ServeSettings


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Measure full depth, prefixes, early exits and speculation on held-out prompts of a run."""

    model: OptionalModel = None
    settings: Annotated[DecodeSettings, tyro.conf.arg(name="")] = field(default_factory=DecodeSettings)
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Measure texts of several clients at once at some depth against full depth, as the server runs them."""

    model: OptionalModel = None
    settings: Annotated[ServeSettings, tyro.conf.arg(name="")] = field(default_factory=ServeSettings)
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False


_KINDS: dict[str, type[Decode] | type[Serve]] = {"decode": Decode, "serve": Serve}
_SCRIPTS = {"pipeline": "pipeline_ways"}
"""Benchmarks beside peers: scripts of a clone, which are not installed."""


def run(argv: list[str]) -> int:
    if argv and argv[0] in _SCRIPTS:
        return _script(_SCRIPTS[argv[0]], argv[1:])
    args = parse_one_of(_KINDS, argv, "bench", others=_SCRIPTS)
    from topograd.convert.model_argument import resolve_model
    from topograd.decode.benchmark import bench_decode
    from topograd.decode.depths import engine_of
    from topograd.runs.session import open_session
    from topograd.serve.benchmark import bench_serve

    session = open_session(resolve_model(args.model or REFERENCE))
    note(f"measuring {session.run.folder}: some minutes, on a quiet machine if you can")
    if isinstance(args, Decode):
        results = bench_decode(session, args.settings, args.runtime, args.weights)
        show(args.json, results, decode_table, curve_table)
    else:
        engine = engine_of(session, args.runtime, args.weights)
        show(args.json, bench_serve(session, engine, args.settings), serve_table)
    return 0


def serve_table(results: Mapping[str, Any]) -> Table:
    """A depth beside full depth."""
    title = f"{Path(results['run']).name}: {results['settings']['clients']} clients"
    table = grid(title, "depth", "tok/s", "speed", "kept", "ties", "mismatches")
    table.add_row("full", number(results["full_tokens_per_second"], 0), "1.00", "", "", "")
    table.add_row(
        results["settings"]["depth"],
        number(results["tokens_per_second"], 0),
        number(results["speedup_over_full"], 2),
        number(results["acceptance"], 2),
        str(results["ties"]),
        str(results["mismatches"]),
    )
    return table


def _script(name: str, argv: list[str]) -> int:
    """Run a script of the clone that the package is installed from; elsewhere say where it is."""
    script = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    if not script.is_file():
        raise ConfigError(
            "this benchmark is not installed", remedy=f"in a clone of topograd run benchmarks/{name}.py"
        )
    return subprocess.run([sys.executable, str(script), *argv]).returncode


def decode_table(results: Mapping[str, Any]) -> Table:
    """Each way of running the model: speed, agreement, where tokens leave."""
    name = Path(results["run"]).name
    columns = ("way", "tok/s", "speed", "agrees", "same", "stage", "kept")
    table = grid(f"{name}: ways of running it, {results['threads']} threads", *columns, no_wrap=True)
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


def curve_table(results: Mapping[str, Any]) -> Table:
    """Speed against agreement, for every rule."""
    columns = ("rule", "speed", "agrees", "same", "stage", "leave after each stage")
    table = grid("Leaving early: speedup against teacher-forced agreement", *columns)
    table.columns[0].no_wrap = True
    for point in results["wand"]["curve"]:
        table.add_row(
            point["rule"],
            number(point["speedup"], 2),
            number(point["agreement"]),
            number(point["identical"], 2),
            number(point["mean_stage"], 2),
            " ".join(number(share, 2) for share in point["exits"]),
        )
    return table
