"""The figures of the study of bounded interfaces: training curves, sizes of regions, norms of Jacobians.

They are Figures 1 to 3 of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" with our models.
The record says which rows a figure draws (`drawn`: names of models by their label). Bands are one standard
deviation over seeds, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from topograd.report.drawing import legend_below, look, new_figure, panels, whole_steps
from topograd.report.figures import Panel
from topograd.report.tables import Table, fixed, read_row

Record = Mapping[str, Any]
Points = list[tuple[int, float]]
"""(step, value) along one training."""
BANDS = "Lines are means over seeds, bands one standard deviation."


def interface_panels(record: Record) -> tuple[Panel, ...]:
    """Figures 1 to 3; a short run has the first alone."""
    drawn = record["drawn"]
    kinds = list(dict.fromkeys(row["architecture"] for row in record["rows"]))
    first = _panel(record, "curves", "Training curves by architecture", drawn["models"], kinds, _losses)
    if not drawn["sizes"]:
        return (first,)
    words = "Training curves by the layers of a region, published interface"
    sizes = _panel(record, "regions", words, drawn["sizes"], drawn["ranked"], _losses)
    return first, sizes, _norms(record)


def _panel(
    record: Record,
    name: str,
    title: str,
    models: Mapping[str, str],
    kinds: Sequence[str],
    read: Callable[[Record], Points],
) -> Panel:
    """One field for each architecture, a curve for each model."""
    figure = new_figure(2.9 * (1 + (len(kinds) - 1) // 2))
    fields = list(figure.subplots((len(kinds) + 1) // 2, min(2, len(kinds)), squeeze=False).flat)
    cells: list[tuple[str, ...]] = []
    for axes, kind in zip(fields, kinds, strict=False):
        for i, (label, model) in enumerate(models.items()):
            points = [read(row) for row in _rows(record, kind, model)]
            cells += _draw(axes, points, label, i, len(models), kind)
        axes.set(title=kind, xlabel="step", ylabel="nats per byte")
        whole_steps(axes)
    for axes in fields[len(kinds) :]:
        axes.set_visible(False)
    legend_below(figure, fields[0])
    table = Table(title, ("architecture", "model", "at the end", "± over seeds"), tuple(cells))
    caption = f"Mean training loss of a twentieth of the steps, from a fifth of them on. {BANDS}"
    return Panel(name, title, caption, figure, f"{title}. {read_row(table, 0)}", table)


def _norms(record: Record) -> Panel:
    """Figure 3: norms of single Jacobians and of suffix products; the first look is left out, as there."""
    title = "Norms of interface Jacobians in training"
    figure = new_figure(3.2)
    cells: list[tuple[str, ...]] = []
    kind, ranks = record["drawn"]["spectral"], record["drawn"]["ranks"]
    words = {"local_norm": "one region, ‖J‖", "suffix_norm": "all behind, ‖P‖"}
    fields = panels(figure, 2)
    for axes, (key, message) in zip(fields, words.items(), strict=True):
        for i, (label, model) in enumerate(ranks.items()):
            points = [_looks(row, key) for row in _rows(record, kind, model)]
            cells += _draw(axes, points, label, i, len(ranks), message)
        axes.set(title=message, xlabel="step")
        axes.axhline(1.0, color="#b9c0cc", linewidth=0.8)
        whole_steps(axes)
    legend_below(figure, fields[0])
    table = Table(title, ("norm", "rank", "at the end", "± over seeds"), tuple(cells))
    caption = f"Of {kind} with the published interface, means over regions. {BANDS}"
    return Panel("jacobians", title, caption, figure, f"{title}. {read_row(table, 0)}", table)


def _rows(record: Record, kind: str, model: str) -> list[Record]:
    return [row for row in record["rows"] if row["architecture"] == kind and row["name"] == model]


def _losses(row: Record) -> Points:
    """The loss of the last stage, the one that regions have, without the fall of the first fifth."""
    points = row["trajectory"]
    return [(point["step"], point["losses"][-1]) for point in points[len(points) // 5 :]]


def _looks(row: Record, key: str) -> Points:
    return [(look["step"], float(np.mean(look[key]))) for look in row["looks"][1:]]


def _draw(
    axes: Axes, seeds: Sequence[Points], label: str, place: int, places: int, kind: str
) -> list[tuple[str, ...]]:
    """A curve with its band; its row of the table, none where there is nothing to draw."""
    if not seeds or not seeds[0]:
        return []
    drawn = look(place, places)
    steps = [step for step, _ in seeds[0]]
    values = np.array([[value for _, value in points] for points in seeds])
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(seeds) > 1 else np.zeros(len(steps))
    axes.plot(steps, mean, color=drawn.colour, linestyle=drawn.dash, label=label, linewidth=1.4)
    axes.fill_between(steps, mean - spread, mean + spread, color=drawn.colour, alpha=0.15, linewidth=0)
    return [(kind, label, fixed(float(mean[-1]), 4), fixed(float(spread[-1]), 4))]
