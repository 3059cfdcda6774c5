"""Figures of training on many ranks: what the simulator says, and how throughput falls as the wire slows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topograd.files import write_atomic
from topograd.report.drawing import legend_below, look, new_figure, panels, powers, render, style


def scaling_figure(results: Mapping[str, Any], file: Path) -> None:
    """Speedup, bubbles and goodput against the number of ranks, from `simulate`."""
    with style():
        figure = new_figure(3.4)
        speed, bubble, left = panels(figure, 3)
        methods = results["methods"]
        for i, (name, rows) in enumerate(methods.items()):
            ranks = [row["ranks"] for row in rows]
            _line(speed, i, len(methods), name, ranks, [row["speedup"] for row in rows])
            _line(bubble, i, len(methods), name, ranks, [row["bubble"] for row in rows])
            _line(left, i, len(methods), name, ranks, [max(row["goodput"].values()) for row in rows])
        speed.set(title="Speedup over one rank", xlabel="ranks")
        bubble.set(title="Bubble", xlabel="ranks", ylim=(-0.02, 1.02))
        left.set(title="Goodput", xlabel="ranks", ylim=(-0.02, 1.02))
        for axes in (speed, bubble, left):
            powers(axes, "x")
        powers(speed, "y")
        legend_below(figure, speed)
        _write(figure, file)


def wire_figure(results: Sequence[Mapping[str, Any]], ways: Sequence[str], file: Path) -> None:
    """Throughput over one process as the wire slows, from several `bench pipeline`."""
    with style():
        figure = new_figure(3.4)
        (axes,) = panels(figure, 1)
        rates = [found["settings"]["mbit"] for found in results]
        for i, way in enumerate(ways):
            gains = [found["ways"][way]["throughput_ratio_vs_single"] for found in results]
            _line(axes, i, len(ways), way, rates, gains)
        powers(axes, "x")
        axes.set(xlabel="Mbit/s, each way", ylabel="throughput over one process", ylim=(0, None))
        legend_below(figure, axes)
        _write(figure, file)


def _line(
    axes: Axes, i: int, count: int, label: str, places: Sequence[float], values: Sequence[float]
) -> None:
    drawn = look(i, count)
    axes.plot(
        places, values, color=drawn.colour, linestyle=drawn.dash, marker=drawn.marker, label=label, ms=4
    )


def _write(figure: Figure, file: Path) -> None:
    drawing = render(figure)
    write_atomic(file, drawing.png if file.suffix == ".png" else drawing.svg)
