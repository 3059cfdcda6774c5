"""Figures by stage: calibration, memory, rank and usefulness (4 to 6), CORE and quantized weights.

The last two need what `topograd eval` stored. As in `figures`: the caption of a panel without a figure is the
reason, and all is called inside `drawing.style()`.

The numbers come from the evaluation as they are: expected calibration error and reliability bins, effective
rank, and tail usefulness U_k = CE(A_{k-1}, y) - CE(A_{k-1} + z_k, y) in nats per token, A_k the sum of the
first k stages' logits z ("Stage-Partitioned Learning" §10.2.2, eq. 35).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from topograd.report.data import Array, RunData, entry, number, numbers, percent_above, stage_count
from topograd.report.drawing import BACKPROP, MUTED, Bar, bars, look, new_figure, panels
from topograd.report.figures import Panel
from topograd.report.tables import DASH, Table, byte_unit, fixed, size, whole

_COLUMNS = 4  # reliability diagrams in a row
_BESIDE = 5  # stages whose bars fit half the width
_OTHER = "#b4bccb"
PRECISIONS = ("int8", "int4")
_PRECISION_CAPTION = (
    "Weights in blocks of 32 small integers; activations are rounded to 8 bits too. Left: bits per byte "
    "above those of the float32 model on the same held-out text. Right: the share of tokens where both have "
    "the same likeliest token. A model of fewer bits is another model: what is exact is exact for that one."
)
_CORE_CAPTION = (
    "The mean over tasks of (accuracy - chance) / (1 - chance), for each exit: 0 is chance, 1 is perfect. "
    "Bars are the middle 95 % of a bootstrap over items. They say how far other items would move a value, "
    "and not how far another training would."
)


@dataclass(frozen=True)
class _Diagram:
    """A reliability diagram: the bins that hold tokens, as mean confidence, accuracy and share of tokens."""

    label: str
    colour: str
    marker: str
    confidence: Array
    accuracy: Array
    share: Array
    bins: int
    ece: float


def reliability_panel(staged: RunData, backprop: RunData | None) -> Panel:
    """Figure 4: for each stage, how often it is right when it says how sure it is."""
    name, title = "reliability", "Calibration of each stage"
    diagrams = _diagrams(staged, stage_count(staged))
    if not diagrams:
        return Panel(name, title, "Left out: the evaluation holds no reliability bins with tokens in them.")
    if backprop:
        theirs = _diagrams(backprop, stage_count(backprop))[-1:]
        diagrams += [replace(each, label="backprop", colour=BACKPROP, marker="D") for each in theirs]
    columns = min(len(diagrams), _COLUMNS)
    lines = -(-len(diagrams) // columns)
    figure = new_figure(0.1 + lines * (2.4 if columns == _COLUMNS else 3.0))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for place, axes in enumerate(grid.flat):
        if place < len(diagrams):
            _draw_diagram(axes, diagrams[place])
            below = place + columns >= len(diagrams)
            axes.tick_params(labelbottom=below)
            axes.set_xlabel("confidence" if below else "")
        else:
            axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy")
    caption = (
        "Tokens are grouped by how sure the model was of its first choice (confidence); a dot shows how "
        "often it was right (accuracy). On the dashed diagonal it is as good as it says; below, it is too "
        "sure; above, not sure enough. Bars show the share of tokens in each group, on the same axis from 0 "
        "to 1: dots over tall bars count most. ECE, the expected calibration error, is the mean distance "
        "from the diagonal, weighted by tokens; lower is better."
    )
    surest = [int(np.argmax(diagram.confidence)) for diagram in diagrams]
    rows = tuple(
        (each.label, fixed(each.ece, 4), f"{fixed(each.confidence[i])}, {fixed(each.accuracy[i])}")
        for each, i in zip(diagrams, surest, strict=True)
    )
    header = ("stage", "expected calibration error", "surest group: confidence, accuracy")
    alt = "Reliability diagrams. " + "; ".join(f"{label}: ECE {ece}" for label, ece, _ in rows) + "."
    return Panel(name, title, caption, figure, alt, Table("Calibration", header, rows))


def _diagrams(run: RunData, stages: int) -> list[_Diagram]:
    """The diagrams of the stages that have one. A bin counts if its numbers are known and it has tokens."""
    recorded = run.evaluation.get("reliability")
    recorded = recorded if isinstance(recorded, list | tuple) else []
    errors = numbers(run.evaluation.get("ece"))
    diagrams = []
    for k, bins in enumerate(recorded):
        columns = [numbers(entry(bins, key)) for key in ("confidence", "accuracy", "count")]
        length = min(map(len, columns))
        table = np.array([column[:length] for column in columns])
        table = table[:, np.isfinite(table).all(axis=0) & (table[2] > 0)]
        if table.size:
            stage = look(k, max(stages, len(recorded)))
            ece = errors[k] if k < len(errors) else math.nan
            share = table[2] / table[2].sum()
            words = (f"stage {k + 1}", stage.colour, stage.marker)
            diagrams.append(_Diagram(*words, table[0], table[1], share, length, ece))
    return diagrams


def _draw_diagram(axes: Axes, diagram: _Diagram) -> None:
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.bar(diagram.confidence, diagram.share, width=0.8 / diagram.bins, color=diagram.colour, alpha=0.25)
    axes.plot(
        diagram.confidence,
        diagram.accuracy,
        color=diagram.colour,
        marker=diagram.marker,
        markersize=4.5,
        linewidth=1.4,
    )
    axes.set(xlim=(0, 1), ylim=(0, 1.03), xticks=(0, 0.5, 1), yticks=(0, 0.25, 0.5, 0.75, 1))
    axes.set_xticklabels(["0", "0.5", "1"])
    axes.set_box_aspect(1)
    axes.set_title(f"{diagram.label}, ECE {fixed(diagram.ece)}", fontsize=9.5)


def memory_panel(comparison: Mapping[str, Any] | None, stages: int) -> Panel:
    """Figure 5: peak activation memory of a step, against backprop and by number of stages."""
    name, title = "memory", "Peak activation memory"
    memory = entry(comparison, "memory")
    pair = {key: number(entry(memory, key)) for key in ("backprop", "staged")}
    by_stages = _by_stages(entry(memory, "by_stages"))
    if not all(map(math.isfinite, pair.values())):
        pair = {}
    if not (pair or by_stages):
        return Panel(name, title, "Left out: no comparison of memory was measured.")
    figure = _draw_memory(pair, by_stages, stages, number(entry(memory, "ratio")))
    caption = (
        "The most memory that a training step holds for its backward pass. A stage's backward runs as soon "
        "as its forward is done, so one stage's activations are alive at a time; backprop keeps those of all "
        "layers. Shorter bars are better, and the axis starts at zero."
    )
    if by_stages:
        caption += " The same model cut into more and more stages is shown too; one stage is backprop."
    rows = [(key, size(value)) for key, value in pair.items()]
    rows.append(("staged over backprop", fixed(number(entry(memory, "ratio")))))
    rows += [(f"{count} {'stage' if count == 1 else 'stages'}", size(v)) for count, v in by_stages.items()]
    cells = tuple(row for row in rows if row[1] != DASH)
    alt = "Peak activation memory: " + "; ".join(f"{head} {value}" for head, value in cells) + "."
    return Panel(name, title, caption, figure, alt, Table("Peak activation memory", ("model", "peak"), cells))


def _draw_memory(pair: dict[str, float], by_stages: dict[int, float], stages: int, ratio: float) -> Figure:
    """The two runs side by side, and beside them the same model in 1, 2, ... stages; one scale for all."""
    largest = max((*pair.values(), *by_stages.values()))
    scale, unit = byte_unit(largest)
    ours = look(max(stages, 1) - 1, max(stages, 1)).colour
    share = f" (×{fixed(ratio, 2)})" if math.isfinite(ratio) else ""
    sides: list[tuple[str, list[Bar]]] = []
    if pair:
        looks = {"backprop": (BACKPROP, ""), "staged": (ours, share)}
        drawn = [
            Bar(key, value / scale, looks[key][0], f"{_short(value / scale)}{looks[key][1]}")
            for key, value in pair.items()
        ]
        sides.append(("These two runs", drawn))
    if by_stages:
        colours = {1: BACKPROP, stages: ours} if stages > 1 else {1: BACKPROP}
        drawn = [
            Bar(str(count), value / scale, colours.get(count, _OTHER), _short(value / scale))
            for count, value in by_stages.items()
        ]
        sides.append(("By number of stages", drawn))
    figure = new_figure(3.2)
    slots = 3 if len(sides) == 2 else 6
    axes = panels(figure, len(sides), sharey=True, width_ratios=[max(len(d), slots) for _, d in sides])
    for place, (head, drawn) in enumerate(sides):
        bars(axes[place], drawn, slots)
        axes[place].set_title(head)
    axes[0].set(ylim=(0, 1.16 * largest / scale or 1.0), ylabel=unit)
    if by_stages:
        axes[-1].set_xlabel("stages")
    return figure


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _by_stages(recorded: object) -> dict[int, float]:
    """Bytes by number of stages, in order. JSON's keys are text; what is no number is skipped."""
    if not isinstance(recorded, Mapping):
        return {}
    pairs = {int(key): number(value) for key, value in recorded.items() if str(key).isdecimal()}
    return {count: pairs[count] for count in sorted(pairs) if math.isfinite(pairs[count])}


def rank_panel(staged: RunData, backprop: RunData | None) -> Panel:
    """Figure 6: the effective rank at the end of each stage, and what each stage adds to those before."""
    name, title = "rank", "What each stage holds, and what it adds"
    ranks, useful = (numbers(staged.evaluation.get(key)) for key in ("effective_rank", "usefulness"))
    stages = max(len(ranks), len(useful))
    if not any(map(math.isfinite, (*ranks, *useful))):
        return Panel(name, title, "Left out: the evaluation holds no effective rank and no usefulness.")
    captions, sides = [], []
    rank_bars, useful_bars = _stage_bars(ranks, stages, 1), _stage_bars(useful, stages, 4)
    if rank_bars:
        theirs = numbers(backprop.evaluation.get("effective_rank")) if backprop else []
        if theirs and math.isfinite(theirs[-1]):
            rank_bars.append(Bar("backprop", theirs[-1], BACKPROP, fixed(theirs[-1], 1)))
        sides.append(("Effective rank", "directions", rank_bars))
        width = number(entry(staged.config, "model", "width"))
        limit = f", which cannot exceed the width of {whole(width)}" if math.isfinite(width) else ""
        captions.append(
            "Effective rank counts the directions that the hidden states at the end of a stage really use"
            f"{limit}. Where it falls from one stage to the next, the later stage may be a bottleneck."
        )
    if useful_bars:
        sides.append(("Tail usefulness U", "nats per token", useful_bars))
        captions.append(
            "Tail usefulness is how much the loss falls when a stage's logits are added to those of the "
            "stages before it. Near zero, the stage repeats what is known; below zero, adding it hurts."
        )
    if sum(len(drawn) for _, _, drawn in sides) == 1:
        head, _, (only,) = sides[0]
        return Panel(name, title, f"Left out: there is only one value to show, {head.lower()} {only.text}.")
    figure = _draw_sides(sides, stacked=stages > _BESIDE)
    rows = tuple(
        (f"{head.lower()}, {bar.label if bar.label == 'backprop' else f'stage {bar.label}'}", bar.text)
        for head, _, drawn in sides
        for bar in drawn
    )
    alt = "; ".join(f"{label} {text}" for label, text in rows) + "."
    return Panel(name, title, " ".join(captions), figure, alt, Table(title, ("number", "value"), rows))


def _stage_bars(values: list[float], stages: int, digits: int) -> list[Bar]:
    """A bar for each stage whose value is known, named by the number of the stage."""
    return [
        Bar(str(k + 1), value, look(k, stages).colour, fixed(value, digits))
        for k, value in enumerate(values)
        if math.isfinite(value)
    ]


def _draw_sides(sides: list[tuple[str, str, list[Bar]]], *, stacked: bool) -> Figure:
    figure = new_figure(2.6 * len(sides) if stacked else 3.2)
    slots = 4 if len(sides) == 2 and not stacked else 8
    for axes, (head, unit, drawn) in zip(panels(figure, len(sides), stacked=stacked), sides, strict=True):
        bars(axes, drawn, slots)
        axes.set(title=head, ylabel=unit, xlabel="stage")
    return figure


def core_panel(staged: RunData, backprop: RunData | None) -> Panel | None:
    """The figure, if the run was evaluated on CORE."""
    exits = _core_rows(staged.evaluation.get("core"))
    if not exits:
        return None
    name = str(entry(staged.evaluation.get("core"), "name"))
    rows = [(f"stages 1..{k}" if len(exits) > 1 else "all stages", *row) for k, row in enumerate(exits, 1)]
    other = _core_rows(backprop.evaluation.get("core")) if backprop else []
    same = _core_asked(staged.evaluation.get("core")) == _core_asked(
        backprop.evaluation.get("core") if backprop else None
    )
    caption = _CORE_CAPTION
    if other and same:
        rows.append(("backprop", *other[-1]))
    elif other:
        caption += " The backprop run was evaluated on other tasks or items, so it is left out."
    figure = new_figure(1.3 + 0.34 * len(rows))
    (axes,) = panels(figure, 1)
    for place, (label, value, low, high) in enumerate(rows):
        colour = BACKPROP if label == "backprop" else look(place, len(rows)).colour
        axes.errorbar(
            [value], [place], xerr=[[value - low], [high - value]], fmt="o", color=colour, capsize=3
        )
    axes.axvline(0.0, color=BACKPROP, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(name)
    cells = tuple(
        (label, fixed(value, 4), f"{fixed(low, 4)} to {fixed(high, 4)}") for label, value, low, high in rows
    )
    alt = f"{name}: " + "; ".join(f"{label} {value}, {span}" for label, value, span in cells) + "."
    table = Table(f"{name} by prefix", ("model", name, "95 % of resampled items"), cells)
    return Panel("core", f"{name} by number of stages", caption, figure, alt, table)


def _core_asked(core: Mapping[str, Any] | None) -> object:
    """The settings of an evaluation: the name of the mean, and the number of items of each task."""
    tasks = entry(core, "tasks")
    counts = {label: entry(task, "items") for label, task in tasks.items()} if isinstance(tasks, dict) else {}
    return entry(core, "name"), entry(core, "baselines"), counts


def _core_rows(core: Mapping[str, Any] | None) -> list[tuple[float, float, float]]:
    """Value and interval of each exit; nothing where the record is not whole."""
    values, spans = entry(core, "core"), entry(core, "interval")
    if not isinstance(values, list) or not isinstance(spans, list) or len(values) != len(spans):
        return []
    rows = []
    for value, span in zip(values, spans, strict=True):
        ends = span if isinstance(span, list) and len(span) == 2 else [math.nan, math.nan]
        rows.append((number(value), number(ends[0]), number(ends[1])))
    return rows if all(map(math.isfinite, (x for row in rows for x in row))) else []


def precision_panel(run: RunData) -> Panel | None:
    """The figure, if the run was evaluated with such weights."""
    by_precision = {
        name: rows
        for name in PRECISIONS
        if (rows := _precision_rows(entry(run.evaluation.get("precision"), name)))
    }
    if not by_precision:
        return None
    figure = new_figure(3.0)
    cost, agreement = panels(figure, 2)
    cells = []
    for place, (name, rows) in enumerate(by_precision.items()):
        exits = range(1, len(rows) + 1)
        style = look(place, len(by_precision))
        above = [percent_above(bpb, own) for bpb, own, _ in rows]
        cost.plot(exits, above, marker="o", color=style.colour, label=name)
        agreement.plot(
            exits, [100 * agreed for *_, agreed in rows], marker="o", color=style.colour, label=name
        )
        for k, (extra, (bpb, own, agreed)) in enumerate(zip(above, rows, strict=True), 1):
            cells.append(
                (name, str(k), fixed(bpb, 4), fixed(own, 4), fixed(extra, 2), fixed(100 * agreed, 2))
            )
    for axes, label in ((cost, "BPB above float32, %"), (agreement, "same likeliest token, %")):
        axes.set_xlabel("stages")
        axes.set_ylabel(label)
        axes.set_xticks(range(1, max(map(len, by_precision.values())) + 1))
        axes.legend()
    columns = ("weights", "stages", "BPB", "float32", "above, %", "same token, %")
    alt = (
        "; ".join(f"{row[0]}, {row[1]} stages: {row[4]} % above, {row[5]} % the same" for row in cells) + "."
    )
    table = Table("Weights in fewer bits", columns, tuple(cells))
    return Panel("precision", "Weights in fewer bits", _PRECISION_CAPTION, figure, alt, table)


def _precision_rows(cost: Mapping[str, Any] | None) -> list[tuple[float, float, float]]:
    """BPB, float32's and agreement of each exit; nothing where the record is not whole."""
    lists = [list(numbers(entry(cost, key))) for key in ("bpb", "float32_bpb", "agreement")]
    if not lists[0] or len({len(values) for values in lists}) > 1:
        return []
    rows = [(float(a), float(b), float(c)) for a, b, c in zip(*lists, strict=True)]
    return rows if all(map(math.isfinite, (x for row in rows for x in row))) else []
