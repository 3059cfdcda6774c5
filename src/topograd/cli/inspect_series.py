"""`topograd inspect --series`: the checkpoints of a run read on one probe, on one axis of steps."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.cli.console import DASH, note, number, out, print_json
from topograd.cli.progress import work_progress
from topograd.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.cli.inspect import Inspect

MAX_BATCHES = 6
"""Of the probe: each checkpoint is read on the same."""


def run_series(args: Inspect) -> int:
    """Read every checkpoint, write the page, print, return the exit code."""
    assert args.series is not None, "the settings were checked"
    began = time.perf_counter()
    if not (args.series / "config.toml").is_file():
        raise RunError(
            f"{args.series} is not a run (config.toml)", remedy="give the folder of one to --series"
        )
    results = read_series(args, args.series)
    results["seconds"] = time.perf_counter() - began
    from topograd.report.geometry_series import write_series  # matplotlib

    results["page"] = str(write_series(args.out or args.series / "geometry-series.html", results))
    if args.json:
        print_json(results)
    else:
        _show(results)
    return 0


def read_series(args: Inspect, folder: Path) -> dict[str, Any]:
    """All that a series says, as JSON holds it."""
    import torch

    from topograd.cli.inspect import moved, probe_batches
    from topograd.exec.forward import stage_logits
    from topograd.geometry.monitors.phase import READINGS, read_phase
    from topograd.geometry.series import SAMPLING, SeriesReader, events
    from topograd.runs.folder import Run
    from topograd.runs.session import build_stack, open_session

    names = Run.open(folder).store.names()
    points, reader, random = [], None, None
    with work_progress(f"reading {folder}: checkpoints") as on_more:
        for done, name in enumerate(names):
            on_more(done, len(names))
            session = open_session(folder, name)
            plan, last = session.plan, session.plan.predicting()[-1]

            def outputs(model: Any, inputs: Tensor, plan: Any = plan, last: int = last) -> Tensor:
                return stage_logits(model, plan, last, inputs)

            stack = moved(session.stack, args.device, args.dtype)
            if reader is None:
                reader = SeriesReader(probe_batches(session, args.text)[:MAX_BATCHES], outputs, SAMPLING)
                torch.manual_seed(session.config.seed)
                fresh = moved(build_stack(session.config)[0].eval(), args.device, args.dtype)
                random = SeriesReader(reader.batches, outputs, None).read(fresh, 0)
            points.append(reader.read(stack, session.step))
        on_more(len(names), len(names))
    if reader is None or random is None:
        raise RunError(
            f"{folder} has no checkpoints", remedy="train it, with keep and checkpoint_every for a series"
        )
    found = events(points)
    sigmas = [point.sigma or 0.0 for point in points]
    known = len(points) >= READINGS and min(sigmas) > 0
    phase = read_phase([point.norm for point in points], sigmas).phase if known else "undecided"
    return {
        "run": str(folder),
        "text": "the run's held-out text" if args.text is None else str(args.text),
        "rank": reader.rank,
        "points": [asdict(point) for point in points],
        "random": asdict(random),
        "alarms": [asdict(event) for event in found["alarms"]],
        "change_points": [asdict(event) for event in found["change_points"]],
        "phase": phase,
        "refused": _refused(points, READINGS),
    }


def _refused(points: list[Any], readings: int) -> list[str]:
    """What the series cannot say, and why."""
    said = [f"λ̂ at step {point.step}: {point.reason}" for point in points if not point.calibrated]
    if len(points) < readings:
        said.append(
            f"{len(points)} checkpoints: a phase needs {readings}, a change point 6; train with a larger keep"
        )
    return said


def _show(results: dict[str, Any]) -> None:
    """One table for a person."""
    from rich.table import Table

    title = f"{Path(results['run']).name}: σ_{results['rank']} and others by step, phase {results['phase']}"
    table = Table(title=title, title_justify="left")
    for column in ("step", "loss", "σ_r", "rank", "Schur", "‖w‖", "λ̂", "interval"):
        table.add_column(column, justify="right")
    for name, point in (("random", results["random"]), *((p["step"], p) for p in results["points"])):
        interval = point["interval"]
        table.add_row(
            str(name),
            number(point["loss"], 3),
            DASH if point["sigma"] is None else f"{point['sigma']:.3g}",
            number(point["effective_rank"], 1),
            number(point["schur"], 3),
            number(point["norm"], 2),
            number(point["coefficient"], 1) + ("" if point["calibrated"] else " ?"),
            DASH if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}",
        )
    out().print(table)
    for kind in ("alarms", "change_points"):
        for event in results[kind]:
            words = f"{event['signal']} from {event['before']:.3g} to {event['after']:.3g}"
            out().print(f"{kind.replace('_', ' ').rstrip('s')} at step {event['step']}: {words}")
    for words in results["refused"]:
        note(words)
    out().print(results["page"], soft_wrap=True)
