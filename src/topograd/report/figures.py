"""Figures of a run: loss, bits per byte by prefix, and the gap over training (1 to 3).

Each is a `Panel`: a figure with its caption and its numbers as a table. A function here never fails for
want of data: the caption of a panel without a figure is the reason. Call them inside `drawing.style()`.

The gap is 100 (BPB of the staged model / BPB of backprop - 1), in percent; BPB is bits per byte of text that
was not trained on. Limits: raw curves are thinned to `drawing.MAX_POINTS` points, tables to ten rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topograd.report.data import (
    Array,
    RunData,
    Series,
    bpb_by_prefix,
    bpb_prediction,
    bpb_series,
    entry,
    gap_at_seconds,
    gap_at_steps,
    loss_series,
    number,
    percent_above,
    smooth,
)
from topograd.report.drawing import (
    BACKPROP,
    INK,
    MUTED,
    legend_below,
    look,
    new_figure,
    panels,
    thin,
    whole_steps,
)
from topograd.report.tables import (
    POOLINGS,
    Table,
    fixed,
    percent,
    prefix_name,
    read_row,
    smoothing_window,
    spread,
    whole,
)


@dataclass(frozen=True)
class Panel:
    """A figure with its caption and numbers. Without a figure, the caption is the reason."""

    name: str
    title: str
    caption: str
    figure: Figure | None = None
    alt: str = ""
    table: Table | None = None


def loss_panel(staged: RunData, backprop: RunData | None) -> Panel:
    """Figure 1: the training loss of each stage over steps, and how far it is from the first stage's."""
    name, title = "loss", "Training loss of each stage"
    series = loss_series(staged)
    if series is None:
        return Panel(name, title, "Left out: the metrics hold no finite training loss.")
    other = loss_series(backprop) if backprop else None
    curves = [(f"stage {k + 1}", look(k, series.stages), series.values[:, k]) for k in range(series.stages)]
    shown = [(label, stage.colour, stage.dash, series.steps, values) for label, stage, values in curves]
    if other:
        shown.append(("backprop", BACKPROP, "-", other.steps, other.values[:, -1]))
    figure = new_figure(3.6)
    axes = panels(figure, 2 if len(shown) > 1 else 1)
    for label, colour, dash, steps, values in shown:
        _curve(axes[0], steps, values, label, colour, dash)
    axes[0].set(title="Loss", ylabel="nats per token")
    caption = (
        "The loss on the training batches: thin lines are single records, thick lines a running mean. Lower "
        "is better. A stage is worth its layers when its line ends below that of the stage before it."
    )
    if len(axes) == 2:
        means = []
        for label, colour, dash, steps, values in shown[1:]:
            common, ours, theirs = np.intersect1d(series.steps, steps, return_indices=True)
            difference = values[theirs] - series.values[ours, 0]
            means.append(_curve(axes[1], common, difference, label, colour, dash))
        axes[1].axhline(0, color=look(0, series.stages).colour, linewidth=1.6)
        axes[1].set_title("Loss minus that of stage 1")
        _fit_means(axes[1], means)
        caption += (
            " The curves lie close together, so the right side subtracts the first stage's loss at the same "
            "step: below zero is better than stage 1 alone. Its scale fits the running means after the first "
            "tenth of the run, and what lies beyond it is cut."
        )
    for side in axes:
        whole_steps(side)
    legend_below(figure, axes[0])
    table = _loss_table(series, other)
    alt = f"Training loss over {whole(series.steps[-1])} steps. " + read_row(table, -1)
    return Panel(name, title, caption, figure, alt, table)


def _curve(axes: Axes, steps: Array, values: Array, label: str, colour: str, dash: Any) -> Array:
    """A raw curve, thin and pale, under its running mean, which is returned. Few points get markers."""
    axes.plot(*thin(steps, values), color=colour, linewidth=0.6, alpha=0.28)
    mean = smooth(values, smoothing_window(len(steps)))
    mark = "o" if np.isfinite(values).sum() < 4 else ""
    axes.plot(
        *thin(steps, mean),
        color=colour,
        linestyle=dash,
        linewidth=1.7,
        label=label,
        marker=mark,
        markersize=4,
    )
    return mean


def _fit_means(axes: Axes, means: list[Array]) -> None:
    """Fit the scale to zero and the means after the first tenth of each, with some room."""
    settled = np.concatenate([[0.0], *(mean[len(mean) // 10 :] for mean in means)])
    low, high = np.nanmin(settled), np.nanmax(settled)
    room = 0.2 * (high - low) or 0.01
    axes.set_ylim(low - room, high + room)


def _loss_table(series: Series, other: Series | None) -> Table:
    means = [smooth(series.values, smoothing_window(len(series.steps)))]
    columns = [f"stage {k + 1}" for k in range(series.stages)]
    if other:
        mean = smooth(other.values[:, -1:], smoothing_window(len(other.steps)))
        place = {step: index for index, step in enumerate(other.steps)}
        beside = [mean[place[step]] if step in place else [math.nan] for step in series.steps]
        means.append(np.array(beside))
        columns.append("backprop")
    values = np.concatenate(means, axis=1)
    rows = spread(len(series.steps), 10)
    cells = tuple((whole(series.steps[row]), *(fixed(value) for value in values[row])) for row in rows)
    return Table("Running mean of the training loss, nats per token", ("step", *columns), cells)


def prefix_panel(staged: RunData, backprop: RunData | None) -> Panel:
    """Figure 2: held-out bits per byte of each prefix and each pooling, and of backprop."""
    name, title = "prefixes", "Bits per byte by number of stages"
    bpb = staged.evaluation.get("bpb")
    prefixes = bpb_by_prefix(bpb)
    stages = len(prefixes)
    rows = []
    for k, value in enumerate(prefixes):
        stage = look(k, stages)
        rows.append((prefix_name(k + 1, stages), value, stage.colour, stage.marker, True))
    if stages > 1:
        rows += [(words, number(entry(bpb, key)), MUTED, "o", False) for key, words in POOLINGS.items()]
    base = bpb_prediction(backprop.evaluation.get("bpb")) if backprop else math.nan
    rows.append(("backprop", base, BACKPROP, "D", True))
    rows = [row for row in rows if math.isfinite(row[1])]
    if not any(map(math.isfinite, prefixes)):
        return Panel(name, title, "Left out: the evaluation holds no finite bits per byte.")
    if len(rows) == 1:
        only = f"{fixed(rows[0][1])} bits per byte ({rows[0][0]})"
        return Panel(name, title, f"Left out: there is only one value to show, {only}.")
    figure = new_figure(1.25 + 0.34 * len(rows))
    start = _dots(panels(figure, 1)[0], rows, base)
    caption = (
        "How many bits the model needs for each byte of text that it has not seen; lower is better. The "
        f"first stages are a model on their own. The axis starts at {start}, not at zero, because the "
        "differences are small: compare positions and numbers, not distances from the left edge."
    )
    if stages > 1:
        caption += (
            " Hollow dots are ways to pool the predictions of all stages into one; an arrow at the edge "
            "stands for a value beyond it."
        )
    if math.isfinite(base):
        caption += " The dashed line is backprop; the percentage says how far above it a row is."
    cells = tuple((label, fixed(value, 4), percent(percent_above(value, base))) for label, value, *_ in rows)
    table = Table("Bits per byte on held-out text", ("model", "bits per byte", "above backprop"), cells)
    if not math.isfinite(base):
        table = Table(table.caption, table.header[:2], tuple(row[:2] for row in cells))
    alt = "Bits per byte: " + "; ".join(f"{label} {value}" for label, value, *_ in cells) + "."
    return Panel(name, title, caption, figure, alt, table)


def _dots(axes: Axes, rows: list[tuple[str, float, str, str, bool]], base: float) -> str:
    """One row for each value, its number in a column at the right; returns where the axis starts.

    The axis fits the filled rows. A hollow one far beyond them is an arrow at the edge, or the differences
    between the others could not be seen.
    """
    values = [row[1] for row in rows if row[4]]
    span = max(values) - min(values) or 0.02 * abs(values[0]) or 1.0
    values += [row[1] for row in rows if min(values) - span <= row[1] <= max(values) + span]
    span = max(values) - min(values) or span
    low, high = min(values) - 0.15 * span, max(values) + 0.1 * span
    digits = min(max(3, 2 - math.floor(math.log10(span))), 6)
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    if math.isfinite(base):
        axes.axvline(base, color=BACKPROP, linewidth=1.1, linestyle=(0, (4, 3)))
    for place, (_, value, colour, marker, filled) in enumerate(rows):
        beyond = ">" if value > high else "<" if value < low else None
        axes.plot(
            min(max(value, low), high),
            place,
            marker=beyond or marker,
            clip_on=False,
            markersize=8,
            color=colour,
            markerfacecolor=colour if filled else "white",
            markeredgewidth=1.6,
            linestyle="",
        )
        above = f"  {percent(percent_above(value, base))}" if math.isfinite(base) and value != base else ""
        axes.annotate(
            f"{fixed(value, digits)}{above}", (1.02, place), xycoords=("axes fraction", "data"), va="center"
        )
    start = fixed(low, digits)
    axes.set_xlabel(f"bits per byte, lower is better (axis starts at {start}, not at zero)")
    axes.spines["left"].set_visible(False)
    return start


def gap_panel(staged: RunData, backprop: RunData | None) -> Panel:
    """Figure 3: the gap to backprop over training, at the same step and in the same time."""
    name, title = "gap", "The gap to backprop over training"
    if backprop is None:
        return Panel(name, title, "Left out: there is no backprop run to compare with.")
    ours, theirs = bpb_series(staged), bpb_series(backprop)
    if ours is None or theirs is None:
        which = "staged" if ours is None else "backprop"
        return Panel(name, title, f"Left out: the {which} run recorded no evaluation during training.")
    by_step, by_time = gap_at_steps(ours, theirs), gap_at_seconds(ours, theirs)
    if by_step is None and by_time is None:
        return Panel(name, title, "Left out: the two runs were evaluated at no common step or time.")
    sides = ((by_step, "At the same step"), (by_time, "In the same time"))
    drawn = [(series, head) for series, head in sides if series is not None]
    figure = new_figure(3.5)
    axes = panels(figure, len(drawn), sharey=True)
    for place, (series, head) in enumerate(drawn):
        _gap_lines(axes[place], series, series.steps if series is by_step else series.seconds)
        axes[place].set_title(head)
        if series is by_step:
            whole_steps(axes[place])
        else:
            axes[place].set_xlabel("training seconds of the staged run")
    axes[0].set_ylabel("above backprop, %")
    legend_below(figure, axes[0])
    caption = (
        "How far each prefix of the staged model lies above backprop on held-out text, in percent of "
        "backprop's bits per byte. Zero is as good as backprop; the line of the longest prefix is the gap."
    )
    if by_time is not None:
        caption += (
            " For the same time, backprop is read at the training time that the staged run had used, between "
            "its two nearest evaluations, so a slower step counts. Learning rates follow the steps, so the "
            "run that is further in its schedule has an advantage there."
        )
    else:
        caption += " There is no comparison at the same time: the runs recorded too few times that overlap."
    table = _gap_table(by_step, by_time, ours.stages)
    alt = "Gap to backprop in percent over training. " + read_row(table, -1)
    return Panel(name, title, caption, figure, alt, table)


def _gap_lines(axes: Axes, series: Series, places: Array) -> None:
    for k in range(series.stages):
        stage = look(k, series.stages)
        axes.plot(
            places,
            series.values[:, k],
            color=stage.colour,
            linestyle=stage.dash,
            marker=stage.marker if len(places) <= 40 else "",
            markersize=4.5,
            linewidth=2.2 if k == series.stages - 1 else 1.4,
            label="stage 1" if k == 0 else f"stages 1–{k + 1}",
        )
    axes.axhline(0, color=BACKPROP, linewidth=1.1, linestyle=(0, (4, 3)))


def _gap_table(by_step: Series | None, by_time: Series | None, stages: int) -> Table:
    """The longest prefix's gap at the same step and in the same time, at up to 10 evaluations."""
    gaps: dict[float, list[float]] = {}
    for side, series in enumerate((by_step, by_time)):
        if series is not None:
            for step, value in zip(series.steps, series.values[:, -1], strict=True):
                gaps.setdefault(step, [math.nan, math.nan])[side] = value
    steps = sorted(gaps)
    rows = ((whole(steps[row]), *map(percent, gaps[steps[row]])) for row in spread(len(steps), 10))
    header = ("staged step", "gap at the same step", "gap in the same time")
    return Table(f"Gap of the {prefix_name(stages, stages)}", header, tuple(rows))
