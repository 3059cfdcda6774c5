"""The figures of the comparison of optimizers, each with its words and its numbers, from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topograd.report.drawing import MUTED, legend_below, look, new_figure, panels, powers
from topograd.report.figures import Panel
from topograd.report.tables import Table, fixed, read_row

Record = Mapping[str, Any]
SMALLEST = 1e-18
"""Zeros are drawn here."""
WIDE = 20
"""Curves that span more than this factor have a logarithmic axis."""


def optimizer_panels(record: Record) -> tuple[Panel, ...]:
    """Equivariance, drift on the first task, and the loss on unseen examples of every task."""
    return (
        equivariance_panel(record["equivariance"]),
        drift_panel(record["by_task"][0], record["arms"]),
        unseen_panel(record["by_task"], record["arms"]),
    )


def equivariance_panel(result: Record) -> Panel:
    """For each gauge, how far two runs from one orbit part."""
    figure = new_figure(3.4)
    (axes,) = panels(figure, 1)
    rows = result["gauges"][::-1]
    shown = {"frozen64": "DDCAdam, float64", "frozen32": "DDCAdam, float32", "adamw64": "AdamW, float64"}
    for i, (key, label) in enumerate(shown.items()):
        drawn = look(i, len(shown))
        places = [max(row[key], SMALLEST) for row in rows]
        axes.plot(places, range(len(rows)), drawn.marker, color=drawn.colour, label=label)
    powers(axes, "x")
    axes.axvline(result["goal"], color=MUTED, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set(xlabel=f"distance of two runs from one orbit after {result['steps']} steps, relative")
    legend_below(figure, axes)
    cells = tuple((row["name"], *(fixed(row[key], 3) for key in shown)) for row in result["gauges"])
    table = Table("Two runs from one orbit", ("gauge", *shown.values()), cells)
    caption = "Two runs start from weights that say the same. The line is the goal in float64."
    return _panel("equivariance", "Does a step commute with the symmetry?", caption, figure, table)


def drift_panel(result: Record, arms: Sequence[str]) -> Panel:
    """How far each arm goes along the orbits during training, mean over seeds."""
    figure = new_figure(3.2)
    shift, rescale = panels(figure, 2)
    for axes, key, title in ((shift, "shift", "along shifts"), (rescale, "rescale", "along rescalings")):
        _curves(axes, result, key, arms)
        powers(axes, "y")
        axes.set(title=f"{result['task']}: drift {title}", xlabel="step")
    legend_below(figure, shift)
    cells = tuple((arm, *(fixed(_end(result, arm, key), 3) for key in ("shift", "rescale"))) for arm in arms)
    table = Table("Drift at the end, mean over seeds", ("arm", "along shifts", "along rescalings"), cells)
    caption = "How far the weights went along directions in which the network says the same."
    return _panel("drift", "Drift along the orbits", caption, figure, table)


def unseen_panel(by_task: Sequence[Record], arms: Sequence[str]) -> Panel:
    """The loss on unseen examples during training, mean over seeds, a part for each task."""
    lines = -(-len(by_task) // 2)
    figure = new_figure(2.3 * lines + 0.6)
    grid = figure.subplots(lines, 2, squeeze=False).flatten()
    for axes, result in zip(grid, by_task, strict=False):
        _curves(axes, result, "unseen", arms)
        low, high = axes.get_ylim()
        if high > WIDE * low:
            powers(axes, "y")
        axes.set(title=result["task"], xlabel="step", ylabel="nats, unseen")
    for axes in grid[len(by_task) :]:
        axes.set_axis_off()
    legend_below(figure, grid[0])
    cells = tuple((arm, *(fixed(_end(result, arm, "unseen"), 3) for result in by_task)) for arm in arms)
    table = Table("At the end, mean over seeds", ("arm", *(result["task"] for result in by_task)), cells)
    return _panel("unseen", "Loss on unseen examples", "Means over seeds.", figure, table)


def _curves(axes: Axes, result: Record, key: str, arms: Sequence[str]) -> None:
    """One line for each arm: the mean over seeds of a curve. An arm looks the same in every figure."""
    for i, arm in enumerate(arms):
        runs = [run["curves"] for run in result["runs"] if run["arm"] == arm]
        if runs:
            columns = zip(*(run[key] for run in runs), strict=True)
            means = [max(sum(values) / len(runs), SMALLEST) for values in columns]
            drawn = look(i, len(arms))
            axes.plot(runs[0]["step"], means, color=drawn.colour, linestyle=drawn.dash, label=arm)


def _end(result: Record, arm: str, key: str) -> float:
    """The mean over seeds of what a curve ended at."""
    ends = [run["curves"][key][-1] for run in result["runs"] if run["arm"] == arm]
    return sum(ends) / len(ends)


def _panel(name: str, title: str, caption: str, figure: Figure, table: Table) -> Panel:
    return Panel(name, title, caption, figure, f"{title}. {read_row(table, 0)}", table)
