"""The figures of the study of fields in training, each with its words and its numbers, from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topograd.report.drawing import INK, legend_below, look, new_figure, panels, powers
from topograd.report.figures import Panel
from topograd.report.tables import Table, fixed, read_row, spread, whole

Record = Mapping[str, Any]
CAPTIONS = {
    "layers": (
        "K is a sum of one part for each layer. Left: each layer's share of the speed at which the loss "
        "falls at that moment. Right: the size of the parts."
    ),
    "alignment": (
        "Left: rᵀKr/rᵀr over K's mean eigenvalue, which is 1 for a residual without preference, and the "
        "part of the residual in the eight leading eigenvectors. Right: |K(t) - K(0)| over |K(0)|, by "
        "layer."
    ),
    "drift": (
        "How far the run that K(0) predicts is from the true one, at its worst. Points are seeds, lines "
        "their means. The second line has the distance of the targets from Y(0) shrunk by 1/√N."
    ),
    "projectors": (
        "The share of neurons that are active for both inputs of a pair, by layer, over pairs of one class "
        "and of two. Means over {seeds} seeds, targets up to {top:g}."
    ),
    "tails": (
        "Each point is a layer of a run. Across: how much more inputs of one class share their neurons than"
        " inputs of two, at the end over the start. Up: the change of the spectrum of WᵀW. The conjecture "
        "expects exponents to fall to the right. ρ is the rank correlation after each layer's mean is taken"
        " off."
    ),
    "staged": (
        "Right: the length of predicted minus measured change of a stage's residual in one step, over that "
        "of the measured change. With all blocks of K the stages below count; with its own block alone a "
        "stage is taken to learn on inputs that stand still. For the first stage the two are the same."
    ),
}
ROWS = 12  # of a table over time


def field_panels(record: Record) -> tuple[Panel, ...]:
    """Every figure, in the order of the findings."""
    return (
        layers_panel(record),
        alignment_panel(record),
        drift_panel(record),
        projectors_panel(record),
        tails_panel(record),
        staged_panel(record),
    )


def layers_panel(record: Record) -> Panel:
    """K by layer: what carries the decay, and the trace."""
    rows, depth = record["layers"]["rows"], record["sizes"]["depth"]
    steps = _steps(rows)
    figure = new_figure(3.8)
    left, right = panels(figure, 2)
    colours = [look(layer, depth).colour for layer in range(depth)]
    names = [f"layer {layer + 1}" for layer in range(depth)]
    for axes, key in ((left, "decay_shares"), (right, "traces")):
        parts = np.array([row[key] for row in rows]).T
        axes.stackplot(steps, parts, colors=colours, labels=names, alpha=0.85, linewidth=0)
        _over_steps(axes, steps)
    left.set_ylim(0, 1)
    left.set_title("Who carries the decay: share of rᵀKr")
    right.set_title("K's trace, over the examples")
    legend_below(figure, left)
    header = ("step", "loss", *(f"{name}: {what}" for what in ("decay", "trace") for name in names))
    cells = [
        (
            whole(row["step"]),
            fixed(row["loss"], 4),
            *(fixed(x, 2) for x in (*row["decay_shares"], *row["traces"])),
        )
        for row in _some(rows)
    ]
    return _panel("layers", "K by layer", figure, Table("K during training", header, tuple(cells)))


def alignment_panel(record: Record) -> Panel:
    """The residual and K's eigenvectors; how far the parts have moved."""
    rows, depth = record["layers"]["rows"], record["sizes"]["depth"]
    steps = _steps(rows)
    figure = new_figure(3.6)
    left, right = panels(figure, 2)
    left.plot(steps, [row["speed"] for row in rows], color=look(0, 2).colour, label="speed over the mean's")
    left.plot(
        steps,
        [row["leading_share"] for row in rows],
        color=look(1, 2).colour,
        linestyle=look(1, 2).dash,
        label="share in the 8 leading eigenvectors",
    )
    left.set_title("The residual and K's eigenvectors")
    left.legend(loc="upper right")
    for layer in range(depth):
        drawn = look(layer, depth)
        moved = [row["moved"][layer] for row in rows]
        right.plot(steps, moved, color=drawn.colour, linestyle=drawn.dash, label=f"layer {layer + 1}")
    right.set_title("How far K's parts have moved")
    right.legend()
    for axes in (left, right):
        _over_steps(axes, steps)
        axes.set_ylim(0, None)
    header = ("step", "speed", "leading share", *(f"layer {layer + 1} moved" for layer in range(depth)))
    cells = [
        (whole(row["step"]), *(fixed(x, 2) for x in (row["speed"], row["leading_share"], *row["moved"])))
        for row in _some(rows)
    ]
    table = Table("Alignment and movement", header, tuple(cells))
    return _panel("alignment", "The residual and K", figure, table)


def drift_panel(record: Record) -> Panel:
    """The frozen kernel's error against width."""
    rows, slopes = record["drift"]["rows"], record["drift"]["slopes"]
    widths = sorted({row["width"] for row in rows})
    figure = new_figure(3.6)
    (axes,) = panels(figure, 1)
    means = {}
    for place, (kind, words) in enumerate(
        (("plain", "targets as they are"), ("control", "targets nearer by 1/√N"))
    ):
        drawn = look(place, 2)
        axes.plot(
            [row["width"] for row in rows],
            [row[kind] for row in rows],
            linestyle="",
            marker=drawn.marker,
            markersize=4,
            color=drawn.colour,
            alpha=0.5,
        )
        means[kind] = [float(np.mean([r[kind] for r in rows if r["width"] == width])) for width in widths]
        label = f"{words}: width to the power {slopes[kind]:.2f}"
        axes.plot(widths, means[kind], color=drawn.colour, linestyle=drawn.dash, label=label)
    powers(axes, "x")
    powers(axes, "y")
    axes.set_xticks(widths, [str(width) for width in widths])
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if low <= tick <= high])
    axes.minorticks_off()
    axes.set(xlabel="width", ylabel="largest error over |r(0)|")
    axes.legend()
    cells = [
        (whole(width), fixed(plain), fixed(control))
        for width, plain, control in zip(widths, means["plain"], means["control"], strict=True)
    ]
    table = Table("Means over seeds", ("width", "targets as they are", "targets nearer"), tuple(cells))
    return _panel("drift", "Frozen kernels and width", figure, table)


def projectors_panel(record: Record) -> Panel:
    """Rank shares of the projectors during the runs with the furthest targets."""
    top = max(run["high"] for run in record["geometry"]["runs"])
    runs = [run for run in record["geometry"]["runs"] if run["high"] == top]
    steps = _steps(runs[0]["times"])
    layers = len(runs[0]["layers"])
    figure = new_figure(3.4)
    every = panels(figure, layers, sharey=True)
    columns: list[list[float]] = []
    for layer, axes in enumerate(every):
        for place, kind in enumerate(("within", "across")):
            drawn = look(place, 2)
            shares = [
                float(np.mean([run["times"][i]["layers"][layer][kind] for run in runs]))
                for i in range(len(steps))
            ]
            words = "one class" if kind == "within" else "two classes"
            axes.plot(steps, shares, color=drawn.colour, linestyle=drawn.dash, label=words)
            columns.append(shares)
        axes.set_title(f"D_{layer + 1}")
        _over_steps(axes, steps)
    every[0].set_ylabel("rank share")
    legend_below(figure, every[0])
    header = ("step", *(f"D_{layer + 1}, {kind}" for layer in range(layers) for kind in ("one class", "two")))
    cells = [
        (whole(steps[i] - 1), *(fixed(column[i]) for column in columns)) for i in spread(len(steps), ROWS)
    ]
    table = Table("Rank shares", header, tuple(cells))
    return _panel("projectors", "Projectors by class", figure, table, seeds=len(runs), top=top)


def tails_panel(record: Record) -> Panel:
    """Growth of the contrast against the changes of the spectrum's end."""
    runs, links = record["geometry"]["runs"], record["geometry"]["links"]
    highs = sorted({run["high"] for run in runs})
    figure = new_figure(3.8)
    every = panels(figure, 3)
    words = {
        "alpha": "exponent, fitted",
        "alpha_quarter": "exponent of the largest quarter",
        "outlier": "largest eigenvalue",
    }
    for axes, (measure, title) in zip(every, words.items(), strict=True):
        for place, high in enumerate(highs):
            drawn = look(place, len(highs))
            changes = [layer["changes"] for run in runs if run["high"] == high for layer in run["layers"]]
            axes.plot(
                [change["contrast"] for change in changes],
                [change[measure] for change in changes],
                linestyle="",
                marker=drawn.marker,
                markersize=4.5,
                color=drawn.colour,
                alpha=0.75,
                label=f"targets up to {high:g}",
            )
        axes.axhline(0, color=INK, linewidth=0.7)
        axes.set_title(f"{title}\nρ = {links[measure]['all_runs']['rho']:+.2f}", fontsize=9.5)
        axes.set_xlabel("growth of the contrast")
    every[0].set_ylabel("change")
    legend_below(figure, every[0])
    names = {"all_runs": "all runs", "same_targets": "same targets"}
    cells = [
        (f"{title}, {names[kind]}", *(fixed(links[measure][kind][key], 2) for key in ("rho", "low", "high")))
        for measure, title in words.items()
        for kind in names
    ]
    table = Table("Rank correlations with the contrast", ("change of", "ρ", "from", "to"), tuple(cells))
    return _panel("tails", "Concentration and tails", figure, table)


def staged_panel(record: Record) -> Panel:
    """The error of both predictions for each stage, during training."""
    staged = record["staged"]
    rows, stages = staged["rows"], len(staged["stages"])
    steps = _steps(rows)
    figure = new_figure(3.6)
    left, right = panels(figure, 2)
    for stage in range(stages):
        drawn = look(stage, stages)
        name = f"stage {stage + 1}"
        left.plot(
            steps,
            [row["losses"][stage] for row in rows],
            color=drawn.colour,
            linestyle=drawn.dash,
            label=name,
        )
        for key, marker, words in (("missed_together", "", "all blocks"), ("missed_own", "o", "own block")):
            right.plot(
                steps,
                [row[key][stage] for row in rows],
                color=drawn.colour,
                marker=marker,
                markersize=4,
                label=f"{name}, {words}",
            )
    for axes in (left, right):
        powers(axes, "y")
        _over_steps(axes, steps)
    left.set_title("Loss of each stage")
    right.set_title("What a prediction of a step misses")
    right.legend(fontsize=8)
    left.legend()
    header = (
        "step",
        *(f"stage {k + 1}: {what}" for k in range(stages) for what in ("loss", "all blocks", "own")),
    )
    cells = [
        (
            whole(row["step"]),
            *(
                fixed(row[key][k])
                for k in range(stages)
                for key in ("losses", "missed_together", "missed_own")
            ),
        )
        for row in _some(rows)
    ]
    table = Table("Stages", header, tuple(cells))
    return _panel("staged", "A network in stages", figure, table)


def _panel(name: str, title: str, figure: Figure, table: Table, **numbers: float) -> Panel:
    caption = CAPTIONS[name].format(**numbers)
    return Panel(name, title, caption, figure, f"{title}. {read_row(table, -1)}", table)


def _steps(rows: Sequence[Record]) -> list[int]:
    """Steps counted from 1, so that the start has a place on a logarithmic axis."""
    return [row["step"] + 1 for row in rows]


def _some(rows: Sequence[Record]) -> list[Record]:
    return [rows[i] for i in spread(len(rows), ROWS)]


def _over_steps(axes: Axes, steps: Sequence[int]) -> None:
    powers(axes, "x")
    axes.set_xlim(1, steps[-1])
    axes.set_xlabel("step, counted from 1")
