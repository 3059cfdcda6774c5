"""The page of one study of staged learning: the prediction, every claim with its verdict, figure and table.

It stands alone, as a report does: no script, nothing loaded. FOLDER/NAME.html is written last, after
FOLDER/NAME.json and FOLDER/figures/NAME.svg and .png.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from topograd.errors import RunError
from topograd.files import write_atomic, write_json
from topograd.report.drawing import legend_below, look, new_figure, panels, render, style
from topograd.report.figures import Panel
from topograd.report.markup import document, escape, section, table_html, tiles_html
from topograd.report.page import figure_html
from topograd.report.tables import Table, fixed, read_row

Record = Mapping[str, Any]
BARS = "Bars are 90 % intervals of the mean over seeds; a point without one has a single value."


def write_study(folder: Path, record: Record) -> Path:
    """Write everything into the folder and return the page's path. The same record gives the same bytes."""
    name = record["study"]
    page, figures = folder / f"{name}.html", folder / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        with style():
            panel = study_panel(record)
            assert panel.figure is not None, "a study always has points"
            svg, png = render(panel.figure)
        write_atomic(figures / f"{name}.svg", svg)
        write_atomic(figures / f"{name}.png", png)
        write_json(folder / f"{name}.json", dict(record))
        write_atomic(page, _page(record, panel, svg))
    except OSError as problem:
        reason = problem.strerror
        raise RunError(f"cannot write {page} ({reason}); pass --out with a folder you can write") from None
    return page


def study_panel(record: Record) -> Panel:
    """The figure of a study, with its points as a table; inside `drawing.style()`."""
    drawing = record["figure"]
    table = Table(
        drawing["title"],
        ("series", drawing["across"], drawing["up"], "from", "to"),
        tuple(
            (series["name"], fixed(x, 2), *(fixed(value, 4) for value in (y, low, high)))
            for series in drawing["series"]
            for x, y, low, high in zip(*(series[key] for key in ("x", "y", "low", "high")), strict=True)
        ),
    )
    alt = f"{drawing['title']}. {read_row(table, 0)}"
    return Panel(record["study"], drawing["title"], BARS, _draw(drawing), alt, table)


def _draw(drawing: Mapping[str, Any]) -> Figure:
    """Every series as points with bars, joined by a line along x."""
    figure = new_figure(3.8)
    (axes,) = panels(figure, 1)
    for i, series in enumerate(drawing["series"]):
        drawn = look(i, len(drawing["series"]))
        points = sorted(zip(*(series[key] for key in ("x", "y", "low", "high")), strict=True))
        x, y, low, high = zip(*points, strict=True)
        reach = ([b - a for a, b in zip(low, y, strict=True)], [b - a for a, b in zip(y, high, strict=True)])
        axes.errorbar(
            x,
            y,
            yerr=reach,
            color=drawn.colour,
            linestyle=drawn.dash,
            marker=drawn.marker,
            markersize=5,
            capsize=3,
            elinewidth=0.9,
            label=series["name"],
        )
    axes.set(xlabel=drawing["across"], ylabel=drawing["up"])
    legend_below(figure, axes)
    return figure


def _page(record: Record, panel: Panel, svg: str) -> str:
    sizes = record["sizes"]
    lead = (
        f"GPTs of six layers of width {sizes['width']} on bytes, {sizes['steps']} steps of "
        f"{sizes['batch']} × {sizes['context']} tokens ({sizes['soft_steps']} where boundaries are learned). "
        "All arms of a seed start from the same weights and see the same data in the same order."
    )
    links = [("claims", "What was predicted, and what came out"), (panel.name, panel.title)]
    links.append(("numbers", "The table"))
    table = record["table"]
    numbers = Table(table["caption"], tuple(table["header"]), tuple(map(tuple, table["rows"])))
    tiles = tiles_html([("verdict", record["verdict"]), ("seeds", str(record["seeds"]))])
    parts = [
        section("claims", links[0][1], _claims(record)),
        figure_html(panel, svg),
        section("numbers", "The table", table_html(numbers)),
    ]
    return document(f"{record['title']} ({record['study']})", lead, links, parts, tiles)


def _claims(record: Record) -> str:
    """The prediction in words, and a table of claims."""
    rows = tuple(
        (claim["name"], claim["prediction"], claim["measured"], claim["verdict"], claim["rule"])
        for claim in record["claims"]
    )
    header = ("claim", "what the paper says", "measured", "verdict", "rule")
    words = f"<p>{escape(record['prediction'])}</p>"
    return words + table_html(Table("Each claim, judged by its rule", header, rows))
