"""The figure of CORE by prefix: the centred mean of each exit with its interval, and backprop's beside it.

It reads what `topograd eval core` left in the run's folder (`evaluation/core.json`), as JSON holds it.
"""

import math
from collections.abc import Mapping
from typing import Any

from topograd.report.data import RunData, entry, number
from topograd.report.drawing import BACKPROP, look, new_figure, panels
from topograd.report.figures import Panel
from topograd.report.tables import Table, fixed

_CAPTION = (
    "The mean over tasks of (accuracy - chance) / (1 - chance), for each exit: 0 is chance, 1 is perfect. "
    "Bars are the middle 95 % of a bootstrap over items. They say how far other items would move a value, "
    "and not how far another training would."
)


def core_panel(staged: RunData, backprop: RunData | None) -> Panel | None:
    """The figure, if the run was evaluated on CORE."""
    found = _rows(staged.evaluation.get("core"))
    if not found:
        return None
    name = str(entry(staged.evaluation.get("core"), "name"))
    rows = [(f"stages 1..{k}" if len(found) > 1 else "all stages", *row) for k, row in enumerate(found, 1)]
    other = _rows(backprop.evaluation.get("core")) if backprop else []
    same = _asked(staged.evaluation.get("core")) == _asked(
        backprop.evaluation.get("core") if backprop else None
    )
    caption = _CAPTION
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


def _asked(core: Mapping[str, Any] | None) -> object:
    """What was asked: the name of the mean, and how many items of each task."""
    tasks = entry(core, "tasks")
    counts = {label: entry(task, "items") for label, task in tasks.items()} if isinstance(tasks, dict) else {}
    return entry(core, "name"), entry(core, "baselines"), counts


def _rows(core: Mapping[str, Any] | None) -> list[tuple[float, float, float]]:
    """Value and interval of each exit; nothing where the record is not whole."""
    values, spans = entry(core, "core"), entry(core, "interval")
    if not isinstance(values, list) or not isinstance(spans, list) or len(values) != len(spans):
        return []
    rows = []
    for value, span in zip(values, spans, strict=True):
        ends = span if isinstance(span, list) and len(span) == 2 else [math.nan, math.nan]
        rows.append((number(value), number(ends[0]), number(ends[1])))
    return rows if all(map(math.isfinite, (x for row in rows for x in row))) else []
