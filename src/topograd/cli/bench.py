"""`topograd bench`: ways of decoding, of backward, kernels and optimizers, each against the plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.benchmarks.settings import (
    DecodeSettings,
    KernelSettings,
    MonitorSettings,
    OptimizerSettings,
    PipelineSettings,
    PromptSettings,
)
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
from topograd.cli.progress import work_progress
from topograd.interfaces.settings import BenchSettings
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
class Prompts:
    """What each prefix answers, and early exits and drafts on code, chat, lists and prose."""

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="DIR")] = None
    """The run's folder; by default the reference model that comes with the package."""
    settings: Annotated[PromptSettings, tyro.conf.arg(name="")] = field(default_factory=PromptSettings)
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Measure training steps, Jacobians and scans of bounded interfaces against a dense model."""

    settings: Annotated[BenchSettings, tyro.conf.arg(name="")] = field(default_factory=BenchSettings)
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Measure stages over processes against one process and against backprop over the same processes."""

    settings: Annotated[PipelineSettings, tyro.conf.arg(name="")] = field(default_factory=PipelineSettings)
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Measure the tangent kernel from fields against the contraction of Jacobians: time and memory."""

    settings: Annotated[KernelSettings, tyro.conf.arg(name="")] = field(default_factory=KernelSettings)
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Measure a step of DDCAdam, and what it keeps, against AdamW on the tensors of a GPT."""

    settings: Annotated[OptimizerSettings, tyro.conf.arg(name="")] = field(default_factory=OptimizerSettings)
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Monitors:
    """Break small trainings in six ways: how early each signal warns, and how often for nothing."""

    settings: Annotated[MonitorSettings, tyro.conf.arg(name="")] = field(default_factory=MonitorSettings)
    json: Json = False


_KINDS: dict[str, type[Decode | Prompts | Scan | Pipeline | Kernel | Optim | Monitors]] = {
    "decode": Decode,
    "prompts": Prompts,
    "scan": Scan,
    "pipeline": Pipeline,
    "kernel": Kernel,
    "optim": Optim,
    "monitors": Monitors,
}


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    asked = parse_one_of(_KINDS, argv, "bench")
    match asked:
        case Decode():
            from topograd.benchmarks.decode import bench_decode
            from topograd.runs.session import open_session

            session = open_session(asked.folder or REFERENCE)
            note(f"measuring {session.run.folder}: some minutes, on a quiet machine if you can")
            results = bench_decode(session, asked.settings, asked.runtime, asked.weights)
            tables = [decode_table(results), curve_table(results["wand"])]
        case Prompts():
            from topograd.benchmarks.prompts import bench_prompts
            from topograd.cli.prompt_tables import prompt_tables
            from topograd.depth.model import load

            model = load(asked.folder or REFERENCE, runtime=asked.runtime, weights=asked.weights)
            note(f"measuring {model.session.run.folder}: some minutes, on a quiet machine if you can")
            results = bench_prompts(model, asked.settings)
            tables = prompt_tables(results)
        case Scan():
            note("measuring bounded interfaces: a minute or two, on a quiet machine if you can")
            from topograd.benchmarks.backward import bench_scan

            results = bench_scan(asked.settings)
            tables = scan_tables(results)
        case Pipeline():
            note(
                f"measuring {asked.settings.ranks} processes: a minute or two, on a quiet machine if you can"
            )
            from topograd.benchmarks.pipeline import bench_pipeline

            results = bench_pipeline(asked.settings)
            tables = [pipeline_table(results)]
        case Kernel():
            note("measuring kernels: a minute or two and 4 GB, on a quiet machine if you can")
            from topograd.benchmarks.kernel import bench_kernel

            results = bench_kernel(asked.settings)
            tables = [kernel_table(results)]
        case Optim():
            note("measuring optimizer steps: some seconds, on a quiet machine if you can")
            from topograd.benchmarks.optimizer_step import bench_optim

            results = bench_optim(asked.settings)
            tables = [optim_table(results)]
        case Monitors():
            with work_progress("breaking small trainings: two minutes or so") as on_more:
                from topograd.benchmarks.monitors import bench_monitors

                results = bench_monitors(asked.settings, on_more)
            tables = [monitors_table(results)]
    if asked.json:
        print_json(results)
    else:
        console = out()
        for table in tables:
            console.print(table)
    return 0


def monitors_table(results: Mapping[str, Any]) -> Table:
    """Each signal: lead over the damage, false alarms, and which faults it saw."""
    table = Table(title="Signals of a broken training", title_justify="left")
    for column in ("signal", "lead", "false /1000", "detected", "by fault"):
        table.add_column(column, justify="left" if column in ("signal", "by fault") else "right")
    for name, row in results["signals"].items():
        seen = (f"{fault} {share:.0%}" for fault, share in row["detected_by_fault"].items() if share)
        cells = (number(row["lead"], 0), number(row["false_alarms"], 2), number(row["detected"], 2))
        table.add_row(name, *cells, ", ".join(seen))
    table.caption = "lead: steps from the alarm to the damage of the held-out loss; negative is after it"
    if (cost := results["cost"]) is not None:
        table.caption += f"; a step with the monitor costs {number(cost['default']['median'], 3)}"
    return table


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


def scan_tables(results: Mapping[str, Any]) -> list[Table]:
    """Steps, Jacobians, trimming and scans; the first says whether the gradients agree."""
    title = f"Training steps over the dense one, {results['threads']} threads"
    steps = _ratio_table(title, results["steps"])
    worst = results["agreement"]["worst"]
    steps.caption = f"gradients differ from autograd's by at most {worst:.1e} of their length"
    return [
        steps,
        _ratio_table("A Jacobian, in forwards of its region", results["jacobians"]),
        _ratio_table("A trimmed Jacobian over a larger one", results["trimming"]),
        _scan_table(results["scans"]),
        _memory_table(results["memory"]),
    ]


def _ratio_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Ratios with their quartiles, and the goals where a row has one."""
    goals = any(row["goal"] is not None for row in rows)
    table = Table(title=title, title_justify="left")
    for column in ("what", "ratio", "quartiles", *(("goal", "met") if goals else ())):
        name = column == "what"
        table.add_column(column, justify="left" if name else "right", no_wrap=not name)
    for row in rows:
        spread = row["spread"]
        cells = [row["name"], number(row["ratio"], 2)]
        cells.append(f"{number(spread['low'], 2)}–{number(spread['high'], 2)}")
        if goals:
            met = {True: "yes", False: "no", None: DASH}[row["met"]]
            cells += [DASH if row["goal"] is None else f"≤ {row['goal']}", met]
        table.add_row(*cells)
    return table


def _memory_table(memory: Mapping[str, float]) -> Table:
    table = Table(title="Peak memory of a step over the dense one's", title_justify="left")
    table.add_column("what")
    table.add_column("ratio", justify="right")
    for name, held in memory.items():
        table.add_row(name, number(held, 2))
    return table


def _scan_table(scans: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Suffix scans, microseconds", title_justify="left")
    methods = list(scans[0]["microseconds"]) if scans else []
    for column in ("maps", "width", *methods):
        table.add_column(column, justify="right")
    for scan in scans:
        times = (number(scan["microseconds"][method]["median"], 0) for method in methods)
        table.add_row(str(scan["maps"]), str(scan["width"]), *times)
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


def kernel_table(results: Mapping[str, Any]) -> Table:
    """Fields against Jacobians: the size with goals first, then as M, N and L double."""
    table = Table(
        title=f"K from fields against Jacobians, {results['threads']} threads", title_justify="left"
    )
    for column in ("M", "N", "L", "ms", "faster", "quartiles", "MiB", "smaller", "differ"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in (results["kernel"], *results["growth"]):
        faster, peak = row["faster"], row["peak_bytes"]["fields"]
        table.add_row(
            *(str(row[key]) for key in ("examples", "width", "depth")),
            number(1e3 * row["seconds"]["fields"]["median"], 1),
            number(faster["median"], 1),
            f"{number(faster['low'], 1)}–{number(faster['high'], 1)}",
            number(peak / 2**20, 1),
            number(row["smaller"]["ratio"], 1),
            f"{row['relative_difference']:.0e}",
        )
    first, change = results["kernel"], results["transport"]
    met = all(part["met"] for part in (first["faster"], first["smaller"], change))
    table.caption = (
        f"first row: goals {first['faster']['goal']:.0f} and {first['smaller']['goal']:.0f}; Δb for "
        f"M = {change['examples']}, N = {change['width']}, L = {change['depth']}: "
        f"{change['peak_bytes'] / 2**20:.1f} MiB, as matrices {change['as_matrices_bytes'] / 2**30:.1f} GiB; "
        f"goals {'met' if met else 'not met'}"
    )
    return table


def optim_table(results: Mapping[str, Any]) -> Table:
    """DDCAdam over AdamW: time of a step with its quartiles, and state."""
    goals, spread, seconds = results["goals"], results["step_spread"], results["step_seconds"]
    step, memory = results["step_ratio_vs_adamw"], results["memory_ratio_vs_adamw"]
    rows = [
        {"name": "step", "ratio": step, "spread": spread, "goal": goals["step"]},
        {
            "name": "state",
            "ratio": memory,
            "spread": {"low": memory, "high": memory},
            "goal": goals["memory"],
        },
    ]
    table = _ratio_table(
        f"DDCAdam over AdamW, {results['threads']} threads",
        [row | {"met": row["ratio"] <= row["goal"]} for row in rows],
    )
    times = " and ".join(f"{1e3 * seconds[name]['median']:.1f} ms" for name in ("ddc_adam", "adamw"))
    covered, parameters = (f"{results[name] / 1e6:.1f}M" for name in ("covered", "parameters"))
    table.caption = f"a step takes {times}; gauges cover {covered} of {parameters} parameters"
    if (fused := results["step_ratio_vs_fused"]) is not None:
        table.caption += f"; both fused, by processor time: {number(fused, 2)}"
    return table
