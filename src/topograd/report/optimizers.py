"""The pictures of docs/optim.md, from what the studies wrote.

    python -m topograd.report.optimizers FOLDER OUT

FOLDER holds TASK.json of `optimizers.py`; OUT gets optim-equivariance.png, optim-drift.png and
optim-unseen.png. The first is computed anew, which takes seconds. The same numbers give the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topograd.errors import RunError
from topograd.files import write_atomic
from topograd.optim.equivariance import GOAL64, equivariance
from topograd.report.drawing import MUTED, legend_below, look, new_figure, panels, powers, render, style
from topograd.studies.optimizer_tasks import TASKS
from topograd.studies.optimizers import ARMS

SMALLEST = 1e-18
"""Zeros are drawn here."""
WIDE = 20
"""Curves that span more than this factor have a logarithmic axis."""
DPI = 96
"""Enough for a page, and small files."""
Found = Mapping[str, Any]


def equivariance_figure(record: Found) -> Figure:
    """For each gauge, how far two runs from one orbit part."""
    figure = new_figure(3.4)
    (axes,) = panels(figure, 1)
    rows = record["gauges"][::-1]
    shown = (
        ("DDCAdam, float64", "frozen64"),
        ("DDCAdam, float32", "frozen32"),
        ("AdamW, float64", "adamw64"),
    )
    for i, (label, key) in enumerate(shown):
        style_of = look(i, len(shown))
        places = [max(row[key], SMALLEST) for row in rows]
        axes.plot(places, range(len(rows)), style_of.marker, color=style_of.colour, label=label)
    powers(axes, "x")
    axes.axvline(GOAL64, color=MUTED, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set(xlabel=f"distance of two runs from one orbit after {record['steps']} steps, relative")
    legend_below(figure, axes)
    return figure


def drift_figure(found: Found) -> Figure:
    """How far each arm goes along the orbits during training, mean over seeds."""
    figure = new_figure(3.2)
    shift, rescale = panels(figure, 2)
    for axes, key, title in ((shift, "shift", "along shifts"), (rescale, "rescale", "along rescalings")):
        _curves(axes, found, key)
        powers(axes, "y")
        axes.set(title=f"{found['task']}: drift {title}", xlabel="step")
    legend_below(figure, shift)
    return figure


def unseen_figure(every: Sequence[Found]) -> Figure:
    """The loss on unseen examples during training, mean over seeds, a panel for each task."""
    lines = -(-len(every) // 2)
    figure = new_figure(2.3 * lines + 0.6)
    grid = figure.subplots(lines, 2, squeeze=False).flatten()
    for axes, found in zip(grid, every, strict=False):
        _curves(axes, found, "unseen")
        low, high = axes.get_ylim()
        if high > WIDE * low:
            powers(axes, "y")
        axes.set(title=found["task"], xlabel="step", ylabel="nats, unseen")
    for axes in grid[len(every) :]:
        axes.set_axis_off()
    legend_below(figure, grid[0])
    return figure


def _curves(axes: Axes, found: Found, key: str) -> None:
    """One line for each arm: the mean over seeds of a curve. An arm looks the same in every figure."""
    for i, arm in enumerate(ARMS):
        runs = [run["curves"] for run in found["runs"] if run["arm"] == arm.name]
        if runs:
            columns = zip(*(run[key] for run in runs), strict=True)
            means = [max(sum(values) / len(runs), SMALLEST) for values in columns]
            drawn = look(i, len(ARMS))
            axes.plot(runs[0]["step"], means, color=drawn.colour, linestyle=drawn.dash, label=arm.name)


def draw(folder: Path, out: Path) -> None:
    """Every picture that the folder has numbers for."""
    every = [json.loads(file.read_text()) for name in TASKS if (file := folder / f"{name}.json").exists()]
    if not every:
        raise RunError(
            f"{folder} has none of {', '.join(f'{name}.json' for name in TASKS)}; run the study first"
        )
    out.mkdir(parents=True, exist_ok=True)
    with style(), matplotlib.rc_context({"savefig.dpi": DPI}):
        drawn = {"equivariance": equivariance_figure(equivariance())}
        drawn |= {"drift": drift_figure(every[0]), "unseen": unseen_figure(every)}
        for name, figure in drawn.items():
            write_atomic(out / f"optim-{name}.png", render(figure)[1])


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
