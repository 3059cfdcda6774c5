"""The figures that look at the stages one by one: calibration, memory, rank and usefulness (4 to 6).

As in `figures`: a panel without a figure says why, and all is called inside `drawing.style()`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from topograd.report.data import Array, RunData, entry, number, numbers, stage_count
from topograd.report.drawing import BACKPROP, MUTED, bars, look, new_figure, panels
from topograd.report.figures import Panel
from topograd.report.tables import DASH, Table, byte_unit, fixed, size, whole

_COLUMNS = 4  # reliability diagrams in a row


@dataclass(frozen=True)
class _Diagram:
    """A reliability diagram: the bins that hold tokens, as mean confidence, accuracy and share of tokens."""

    label: str
    colour: str
    marker: str
    confidence: Array
    accuracy: Array
    share: Array
    ece: float


def reliability_panel(staged: RunData, backprop: RunData | None) -> Panel:
    """Figure 4: for each stage, how often it is right when it says how sure it is."""
    name, title = "reliability", "Calibration of each stage"
    diagrams = _diagrams(staged, stage_count(staged))
    if not diagrams:
        return Panel(name, title, "Left out: the evaluation holds no reliability bins with tokens in them.")
    if backprop:
        diagrams += [_as_backprop(diagram) for diagram in _diagrams(backprop, stage_count(backprop))[-1:]]
    columns = min(len(diagrams), _COLUMNS)
    lines = -(-len(diagrams) // columns)
    figure = new_figure(0.55 + lines * (2.45 if columns == _COLUMNS else 3.0))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for place, axes in enumerate(grid.flat):
        if place < len(diagrams):
            _draw_diagram(axes, diagrams[place])
            below = place + columns >= len(diagrams)
            axes.tick_params(labelbottom=below)
            axes.set_xlabel("confidence" if below else "")
        else:
            axes.set_visible(False)
    figure.supylabel("accuracy (dots), share of tokens (bars)", fontsize=9.5, color=MUTED)
    caption = (
        "Tokens are grouped by how sure the model was of its first choice (confidence); a dot shows how often "
        "it was right (accuracy). On the dashed diagonal it is as good as it says; below, it is too sure; "
        "above, not sure enough. Bars show the share of tokens in each group: dots over tall bars count most. "
        "ECE, the expected calibration error, is the mean distance from the diagonal; lower is better."
    )
    rows = tuple((diagram.label, fixed(diagram.ece, 4), _surest(diagram)) for diagram in diagrams)
    header = ("stage", "expected calibration error", "surest group: confidence, accuracy")
    alt = "Reliability diagrams. " + "; ".join(f"{label}: ECE {ece}" for label, ece, _ in rows) + "."
    return Panel(name, title, caption, figure, alt, Table("Calibration", header, rows))


def _diagrams(run: RunData, stages: int) -> list[_Diagram]:
    """The diagrams of the stages that have one. A bin counts if its numbers are known and it has tokens."""
    recorded = run.evaluation.get("reliability")
    errors = numbers(run.evaluation.get("ece"))
    found = []
    for k, bins in enumerate(recorded if isinstance(recorded, list | tuple) else ()):
        columns = [numbers(entry(bins, key)) for key in ("confidence", "accuracy", "count")]
        length = min(map(len, columns))
        table = np.array([column[:length] for column in columns])
        table = table[:, np.isfinite(table).all(axis=0) & (table[2] > 0)]
        if table.size:
            stage = look(k, max(stages, len(recorded)))
            ece = errors[k] if k < len(errors) else math.nan
            share = table[2] / table[2].sum()
            label = f"stage {k + 1}"
            found.append(_Diagram(label, stage.colour, stage.marker, table[0], table[1], share, ece))
    return found


def _as_backprop(diagram: _Diagram) -> _Diagram:
    bins = (diagram.confidence, diagram.accuracy, diagram.share)
    return _Diagram("backprop", BACKPROP, "D", *bins, diagram.ece)


def _draw_diagram(axes: Axes, diagram: _Diagram) -> None:
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.bar(diagram.confidence, diagram.share, width=0.05, color=diagram.colour, alpha=0.25)
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


def _surest(diagram: _Diagram) -> str:
    place = int(np.argmax(diagram.confidence))
    return f"{fixed(diagram.confidence[place])}, {fixed(diagram.accuracy[place])}"


def memory_panel(comparison: Mapping[str, Any] | None, stages: int) -> Panel:
    """Figure 5: peak activation memory of a step, against backprop and by number of stages."""
    name, title = "memory", "Peak activation memory"
    memory = entry(comparison, "memory")
    pair = [number(entry(memory, key)) for key in ("backprop", "staged")]
    by_stages = _by_stages(entry(memory, "by_stages"))
    if not (all(map(math.isfinite, pair)) or by_stages):
        return Panel(name, title, "Left out: no comparison of memory was measured.")
    scale, unit = byte_unit(max([value for value in (*pair, *by_stages.values()) if math.isfinite(value)]))
    sides: list[tuple[str, list[str], list[float], list[str]]] = []
    colour = look(max(stages, 1) - 1, max(stages, 1)).colour
    if all(map(math.isfinite, pair)):
        sides.append(("These two runs", ["backprop", "staged"], pair, [BACKPROP, colour]))
    if by_stages:
        labels = list(map(str, by_stages))
        sides.append(
            ("By number of stages", labels, list(by_stages.values()), [MUTED] * len(by_stages))
        )
    figure = new_figure(3.3)
    ratios = [len(values) + 1 for _, _, values, _ in sides]
    axes = panels(figure, len(sides), sharey=True, width_ratios=ratios)
    top = max(max(values) for _, _, values, _ in sides) / scale
    for place, (head, labels, values, colours) in enumerate(sides):
        scaled = [value / scale for value in values]
        bars(axes[place], labels, scaled, colours, [f"{value:.3g}" for value in scaled])
        axes[place].set(title=head, ylim=(0, 1.16 * top))
    axes[0].set_ylabel(unit)
    if by_stages:
        axes[-1].set_xlabel("stages")
    caption = (
        "The most memory that a training step holds for its backward pass. A stage's backward runs as soon as "
        "its forward is done, so one stage's activations are alive at a time; backprop keeps those of all "
        "layers. Shorter bars are better, and the axis starts at zero."
    )
    if by_stages:
        caption += " On the right, the same model cut into more and more stages; one stage is backprop."
    rows = [(head, size(value)) for head, value in zip(("backprop", "staged"), pair, strict=True)]
    ratio = number(entry(memory, "ratio"))
    rows.append(("staged over backprop", fixed(ratio)))
    rows += [(f"{count} {'stage' if count == 1 else 'stages'}", size(v)) for count, v in by_stages.items()]
    rows = [row for row in rows if row[1] != DASH]
    alt = "Peak activation memory: " + "; ".join(f"{head} {value}" for head, value in rows) + "."
    return Panel(name, title, caption, figure, alt, Table("Peak activation memory", ("", "peak"), tuple(rows)))


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
    has_rank, has_use = (any(map(math.isfinite, values)) for values in (ranks, useful))
    if not (has_rank or has_use):
        return Panel(name, title, "Left out: the evaluation holds no effective rank and no usefulness.")
    figure = new_figure(3.3)
    axes = panels(figure, has_rank + has_use)
    rows = []
    if has_rank:
        labels, heights, colours = _by_stage(ranks)
        other = numbers(backprop.evaluation.get("effective_rank")) if backprop else []
        if other and math.isfinite(other[-1]):
            labels, heights, colours = [*labels, "backprop"], [*heights, other[-1]], [*colours, BACKPROP]
        bars(axes[0], labels, heights, colours, [fixed(value, 1) for value in heights])
        axes[0].set(title="Effective rank", ylabel="directions")
        rows += [(f"effective rank, {_stage(label)}", fixed(v, 1)) for label, v in zip(labels, heights)]
    if has_use:
        labels, heights, colours = _by_stage(useful)
        places = [k for k, value in enumerate(heights) if math.isfinite(value)]
        labels, heights, colours = ([column[k] for k in places] for column in (labels, heights, colours))
        bars(axes[-1], labels, heights, colours, [fixed(value, 4) for value in heights])
        axes[-1].set(title="Tail usefulness U", ylabel="nats per token")
        rows += [(f"usefulness, {_stage(label)}", fixed(v, 4)) for label, v in zip(labels, heights)]
    return Panel(name, title, _rank_caption(staged, has_rank, has_use), figure, alt, table)
