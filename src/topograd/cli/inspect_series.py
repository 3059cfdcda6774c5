"""`topograd inspect --series`: checkpoints of a run or of transformers on one probe and one axis of steps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.cli.console import note, number, out, printed, show
from topograd.cli.progress import work_progress
from topograd.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from topograd.cli.inspect import Inspect
    from topograd.cli.probe_model import ProbeModel

MAX_BATCHES = 6
"""Of the probe: each checkpoint is read on the same."""


def run_series(args: Inspect) -> int:
    """Read every checkpoint, write the page, print, return the exit code."""
    assert args.series is not None, "the settings were checked"
    began = time.perf_counter()
    results = read_series(args, args.series)
    results["seconds"] = time.perf_counter() - began
    from topograd.report.geometry_series import write_series  # matplotlib

    results["page"] = str(write_series(args.out or args.series / "geometry-series.html", results))
    show(args.json, results, _show)
    return 0


Opened = tuple[int, "ProbeModel", "Callable[[], nn.Module]"]
"""The step of a checkpoint, its model with text, and what makes a random model of its shape."""


def read_series(args: Inspect, folder: Path) -> dict[str, Any]:
    """All that a series says, as JSON holds it."""
    from topograd.geometry.monitors.phase import READINGS, read_phase
    from topograd.geometry.series import SAMPLING, SeriesReader, events

    own = (folder / "config.toml").is_file()
    checkpoints = _own_checkpoints(args, folder) if own else _hugging_face_checkpoints(args, folder)
    points, reader, random, text = [], None, None, ""
    with work_progress(f"reading {folder}: checkpoints") as on_more:
        for done, opened in enumerate(checkpoints):
            on_more(done, len(checkpoints))
            step, probe, fresh = opened()
            if reader is None:
                reader = SeriesReader(probe.batches[:MAX_BATCHES], probe.outputs, SAMPLING)
                random = SeriesReader(reader.batches, probe.outputs, None).read(fresh(), 0)
                text = probe.text
            points.append(reader.read(probe.model, step))
            on_more(done + 1, len(checkpoints))
    assert reader is not None
    assert random is not None
    found = events(points)
    sigmas = [point.sigma or 0.0 for point in points]
    known = len(points) >= READINGS and min(sigmas) > 0
    phase = read_phase([point.norm for point in points], sigmas).phase if known else "undecided"
    return {
        "run": str(folder),
        "text": text,
        "rank": reader.rank,
        "points": [asdict(point) for point in points],
        "random": asdict(random),
        "alarms": [asdict(event) for event in found["alarms"]],
        "change_points": [asdict(event) for event in found["change_points"]],
        "phase": phase,
        "refused": _refused(points, READINGS),
    }


def _own_checkpoints(args: Inspect, folder: Path) -> list[Callable[[], Opened]]:
    """How to open each checkpoint of a run."""
    from topograd.runs.folder import Run

    names = Run.open(folder).store.names()
    if not names:
        raise RunError(
            f"{folder} has no checkpoints", remedy="train it, with keep and checkpoint_every for a series"
        )
    return [partial(_open_own, args, folder, name) for name in names]


def _open_own(args: Inspect, folder: Path, name: str) -> Opened:
    import torch

    from topograd.cli.probe_model import moved, run_probe
    from topograd.runs.session import build_stack

    probe = run_probe(folder, args.text, args.device, args.dtype, name)
    session = probe.session
    assert session is not None, "a run has one"

    def fresh() -> nn.Module:
        torch.manual_seed(session.config.seed)
        made: nn.Module = moved(build_stack(session.config)[0].eval(), args.device, args.dtype)
        return made

    return session.step, probe, fresh


def _hugging_face_checkpoints(args: Inspect, folder: Path) -> list[Callable[[], Opened]]:
    """How to open each folder of transformers below a folder, in the order of their steps."""
    from topograd.cli.probe_model import is_hugging_face

    steps = {_step_of(one): one for one in sorted(folder.glob("*")) if is_hugging_face(one)}
    if not steps:
        raise RunError(
            f"{folder} is not a run (config.toml) and has no checkpoints of transformers",
            setting="series",
            given=str(folder),
            allowed="a run's folder, or one with folders like checkpoint-500, each with a config.json",
        )
    return [partial(_open_hugging_face, args, step, steps[step]) for step in sorted(steps)]


def _open_hugging_face(args: Inspect, step: int, folder: Path) -> Opened:
    import torch

    from topograd.cli.probe_model import hugging_face_probe, moved

    probe = hugging_face_probe(folder, args.text, args.device, args.dtype)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        model: Any = probe.model
        made: nn.Module = moved(type(model)(model.config).eval(), args.device, args.dtype)
        return made

    return step, probe, fresh


def _step_of(folder: Path) -> int:
    """By the trainer's own state, or by the last number in the folder's name."""
    state = folder / "trainer_state.json"
    if state.is_file():
        try:
            return int(json.loads(state.read_text())["global_step"])
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{state} has no global_step", remedy="restore it or take it away") from None
    numbers = re.findall(r"\d+", folder.name)
    if not numbers:
        raise RunError(
            f"{folder} has no step in its name",
            setting="series",
            given=folder.name,
            remedy="call it step-500",
        )
    return int(numbers[-1])


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
    from topograd.report.geometry_series import series_table

    random = results["random"]
    out().print(f"{Path(results['run']).name}: rank {results['rank']}, phase {results['phase']}")
    out().print(printed(series_table(results)))
    out().print(
        f"a random model of this shape: loss {random['loss']:.3f}, Schur {number(random['schur'], 3)}"
    )
    for kind in ("alarms", "change_points"):
        for event in results[kind]:
            words = f"{event['signal']} from {event['before']:.3g} to {event['after']:.3g}"
            out().print(f"{kind.replace('_', ' ').rstrip('s')} at step {event['step']}: {words}")
    for words in results["refused"]:
        note(words)
    out().print(results["page"], soft_wrap=True)
