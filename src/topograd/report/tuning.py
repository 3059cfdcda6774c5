"""Figures of a fine-tuned run: what it learned and forgot over its steps, and what of both each layer did.

The first is from its metrics (`learned`, `forgotten` at every evaluation), the second from
`training/layer_shares.py`. Both are None for a run that measured no old text.
"""

from collections.abc import Mapping
from typing import Any

from topograd.report.data import RunData, number, records
from topograd.report.drawing import Bar, bars, legend_below, look, new_figure, panels, whole_steps
from topograd.report.figures import Panel
from topograd.report.tables import Table, fixed, read_row, spread

KINDS = ("learned", "forgotten")


def forgetting_panel(run: RunData) -> Panel | None:
    """Learned and forgotten at every evaluation."""
    rows = [r for r in records(run) if r.get("kind") == "eval" and "forgotten" in r]
    if not rows:
        return None
    title, figure = "Learned and forgotten", new_figure(3.0)
    (axes,) = panels(figure, 1)
    for place, kind in enumerate(KINDS):
        drawn = look(place, 2)
        values = [number(row.get(kind)) for row in rows]
        steps = [number(row.get("step")) for row in rows]
        axes.plot(steps, values, color=drawn.colour, linestyle=drawn.dash, marker=drawn.marker, label=kind)
    axes.set_ylabel("bits per byte")
    whole_steps(axes)
    legend_below(figure, axes)
    table = Table(
        title,
        ("step", *KINDS),
        tuple(
            (f"{number(rows[i].get('step')):g}", *(fixed(number(rows[i].get(k)), 4) for k in KINDS))
            for i in spread(len(rows), 10)
        ),
    )
    caption = (
        "Learned: bits per byte of held-out new text below the base's. Forgotten: bits per byte of the old "
        "text above the base's."
    )
    return Panel("forgetting", title, caption, figure, f"{title}. {read_row(table, -1)}", table)


def layers_panel(shares: Mapping[str, Any] | None) -> Panel | None:
    """The share of each layer in what was learned and forgotten."""
    if shares is None:
        return None
    title, figure, layers = "What each layer learned and forgot", new_figure(3.2), shares["layers"]
    for place, (axes, kind) in enumerate(zip(panels(figure, 2), KINDS, strict=True)):
        colour = look(place, 2).colour
        drawn = [Bar(_short(row["layer"]), row[kind], colour, fixed(row[kind], 3)) for row in layers]
        bars(axes, drawn, 4)
        axes.set_title(f"{kind}: {fixed(shares[kind], 4)} in all")
        axes.set_xlabel("layer")
        axes.set_ylabel("bits per byte")
    lines = [(row["layer"], *(fixed(row[k], 5) for k in KINDS)) for row in layers]
    lines.append(("not shared out", *(fixed(shares["rest"][k], 5) for k in KINDS)))
    table = Table(title, ("layer", *KINDS), tuple(lines))
    caption = (
        "The change of bits per byte from the base to this model, shared out along the straight way between "
        "their weights: a layer's bar is what its own change did on that way, and the bars add up to the "
        "whole. A layer with a long bar on the left and a short one on the right learned at little cost. "
        "New text is part of the held-out text, so its sum differs a little from the figure above."
    )
    return Panel("layers", title, caption, figure, f"{title}. {read_row(table, 0)}", table)


def _short(layer: str) -> str:
    return layer if layer.isdecimal() else "other"
