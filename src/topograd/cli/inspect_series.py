"""`topograd inspect --series`: checkpoints of a run or of transformers on one probe and one axis of steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from topograd.cli.console import note, number, out, printed
from topograd.cli.progress import work_progress
from topograd.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from topograd.cli.inspect import Inspect
    from topograd.cli.probe_model import ProbeModel

Checkpoints = list[tuple[int, Callable[[], "ProbeModel"]]]
"""The step of each checkpoint, where its folder's name has it, and how to open it."""
MAX_BATCHES = 6
"""Of the probe: each checkpoint is read on the same."""


def read_series(args: Inspect, folder: Path) -> dict[str, Any]:
    """All that a series says, as JSON holds it."""
    from topograd.geometry.monitors.phase import READINGS, read_phase
    from topograd.geometry.series import SAMPLING, SeriesReader, events

    own = (folder / "config.toml").is_file()
    checkpoints = _own_checkpoints(args, folder) if own else _hugging_face_checkpoints(args, folder)
    points, reader, random, text = [], None, None, ""
    with work_progress(f"reading {folder}: checkpoints") as on_more:
        for done, (step, opened) in enumerate(checkpoints):
            on_more(done, len(checkpoints))
            probe = opened()
            if reader is None:
                reader = SeriesReader(probe.batches[:MAX_BATCHES], probe.outputs, SAMPLING)
                random = SeriesReader(reader.batches, probe.outputs, None).read(_fresh(args, probe), 0)
                text = probe.text
            points.append(reader.read(probe.model, step if probe.step is None else probe.step))
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


def _own_checkpoints(args: Inspect, folder: Path) -> Checkpoints:
    """How to open each checkpoint of a run, which knows its step."""
    from topograd.cli.probe_model import run_probe
    from topograd.runs.folder import Run

    names = Run.open(folder).store.names()
    if not names:
        raise RunError(
            f"{folder} has no checkpoints", remedy="train it, with --keep and --save-every for a series"
        )
    return [(0, partial(run_probe, folder, args.text, args.device, args.dtype, name)) for name in names]


def _hugging_face_checkpoints(args: Inspect, folder: Path) -> Checkpoints:
    """How to open each folder of transformers below a folder, in the order of their steps."""
    from topograd.cli.probe_model import hugging_face_probe, is_hugging_face

    steps = {_step_of(one): one for one in sorted(folder.glob("*")) if is_hugging_face(one)}
    if not steps:
        raise RunError(
            f"{folder} is not a run (config.toml) and has no checkpoints of transformers",
            setting="series",
            given=str(folder),
            allowed="a run's folder, or one with folders like checkpoint-500, each with a config.json",
        )
    given = args.text, args.device, args.dtype
    return [(step, partial(hugging_face_probe, steps[step], *given)) for step in sorted(steps)]


def _fresh(args: Inspect, probe: ProbeModel) -> nn.Module:
    """A random model of a checkpoint's shape."""
    import torch

    from topograd.cli.probe_model import moved
    from topograd.runs.session import build_stack

    session, model = probe.session, cast(Any, probe.model)
    torch.manual_seed(0 if session is None else session.config.seed)
    made = type(model)(model.config) if session is None else build_stack(session.config)[0]
    found: nn.Module = moved(made.eval(), args.device, args.dtype)
    return found


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
    said = []
    for point in points:
        if not point.calibrated:  # what it advises is no flag here
            reason = (point.reason or "").partition(";")[0]
            said.append(f"λ̂ at step {point.step} is not calibrated: {reason}")
    if len(points) < readings:
        needed = f"a phase needs {readings}, a change point 6"
        said.append(f"{len(points)} checkpoints: {needed}; train with --keep 6 or more")
    return said


def show_series(results: dict[str, Any]) -> None:
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
