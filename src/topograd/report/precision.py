"""The figure of what weights in fewer bits cost: BPB above float32's and agreement with it, by prefix.

It reads what `topograd eval --weights int8` and `int4` left in the run's folder, `evaluation/weights-*.json`.
"""

import math
from collections.abc import Mapping
from typing import Any

from topograd.report.data import RunData, entry, numbers, percent_above
from topograd.report.drawing import look, new_figure, panels
from topograd.report.figures import Panel
from topograd.report.tables import Table, fixed

PRECISIONS = ("int8", "int4")
_CAPTION = (
    "Weights in blocks of 32 small integers; activations are rounded to 8 bits too. Left: bits per byte "
    "above those of the float32 model on the same held-out text. Right: the share of tokens where both have "
    "the same likeliest token. A model of fewer bits is another model: what is exact is exact for that one."
)


def precision_panel(run: RunData) -> Panel | None:
    """The figure, if the run was evaluated with such weights."""
    found = {
        name: rows for name in PRECISIONS if (rows := _rows(entry(run.evaluation.get("precision"), name)))
    }
    if not found:
        return None
    figure = new_figure(3.0)
    cost, agreement = panels(figure, 2)
    cells = []
    for place, (name, rows) in enumerate(found.items()):
        exits = range(1, len(rows) + 1)
        style = look(place, len(found))
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
        axes.set_xticks(range(1, max(map(len, found.values())) + 1))
        axes.legend()
    columns = ("weights", "stages", "BPB", "float32", "above, %", "same token, %")
    alt = (
        "; ".join(f"{row[0]}, {row[1]} stages: {row[4]} % above, {row[5]} % the same" for row in cells) + "."
    )
    table = Table("Weights in fewer bits", columns, tuple(cells))
    return Panel("precision", "Weights in fewer bits", _CAPTION, figure, alt, table)


def _rows(cost: Mapping[str, Any] | None) -> list[tuple[float, float, float]]:
    """BPB, float32's and agreement of each exit; nothing where the record is not whole."""
    lists = [list(numbers(entry(cost, key))) for key in ("bpb", "float32_bpb", "agreement")]
    if not lists[0] or len({len(values) for values in lists}) > 1:
        return []
    rows = [(float(a), float(b), float(c)) for a, b, c in zip(*lists, strict=True)]
    return rows if all(map(math.isfinite, (x for row in rows for x in row))) else []
