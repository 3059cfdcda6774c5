"""The page of one study: what was predicted, every claim with its verdict, findings, figures and tables.

It stands alone, as a report does: no script, nothing loaded, every figure described and with its numbers in a
table. FOLDER/NAME.html is written last, after FOLDER/NAME.json and FOLDER/figures/NAME*.svg and .png.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from papers.dead_directions.grokking_figures import grokking_panels
from papers.dead_directions.optimizer_figures import optimizer_panels
from papers.gram_metrics.field_figures import field_panels
from papers.latent_bounded_interfaces.interface_figures import interface_panels
from topograd.errors import RunError
from topograd.files import write_atomic, write_json
from topograd.report.drawing import Drawing, legend_below, look, new_figure, panels, render, style
from topograd.report.figures import Panel
from topograd.report.markup import document, escape, section, table_html, tiles_html
from topograd.report.page import figure_html
from topograd.report.tables import Table, fixed, read_row

Record = Mapping[str, Any]
BARS = "Bars are 90 % intervals of the mean over seeds; a point without one has a single value."
FIGURES: Mapping[str, Callable[[Record], tuple[Panel, ...]]] = {
    "fields": field_panels,
    "fields-digits": field_panels,
    "grokking": grokking_panels,
    "interfaces": interface_panels,
    "optimizers": optimizer_panels,
}
"""Studies with figures of their own; the others have the one that their record describes, or none."""
SHORT = 24
"""Letters of a verdict that still fits a tile."""


def write_study(folder: Path, record: Record) -> Path:
    """Write everything into the folder and return the page's path. The same record gives the same bytes."""
    name = record["study"]
    page, figures = folder / f"{name}.html", folder / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        with style():
            drawn = study_panels(record)
            images = {panel.name: render(panel.figure) for panel in drawn if panel.figure is not None}
        for panel, drawing in images.items():
            stem = name if panel == name else f"{name}-{panel}"
            write_atomic(figures / f"{stem}.svg", drawing.svg)
            write_atomic(figures / f"{stem}.png", drawing.png)
        write_json(folder / f"{name}.json", dict(record))
        write_atomic(page, _page(record, drawn, images))
    except OSError as problem:
        reason = problem.strerror
        raise RunError(
            f"cannot write {page} ({reason})",
            setting="page",
            given=page,
            remedy="pass --out with a folder you can write",
        ) from None
    return page


def study_panels(record: Record) -> tuple[Panel, ...]:
    """The figures of a study, inside `drawing.style()`."""
    own = FIGURES.get(record["study"])
    if own is not None:
        return own(record)
    return () if record["figure"] is None else (points_panel(record["study"], record["figure"]),)


def points_panel(name: str, drawing: Record) -> Panel:
    """Series of points with intervals, and the same as a table."""
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
    return Panel(name, drawing["title"], BARS, _draw(drawing), alt, table)


def _draw(drawing: Record) -> Figure:
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


def _page(record: Record, drawn: Sequence[Panel], images: Mapping[str, Drawing]) -> str:
    first = "What was predicted, and what came out"
    links = [("outcome", first), *((panel.name, panel.title) for panel in drawn), ("numbers", "The numbers")]
    tables = [Table(t["caption"], tuple(t["header"]), tuple(map(tuple, t["rows"]))) for t in record["tables"]]
    verdict = record["verdict"] or ""
    tiles = [("verdict", verdict)] if 0 < len(verdict) <= SHORT else []
    tiles += [] if record["seeds"] is None else [("seeds", str(record["seeds"]))]
    parts = [
        section("outcome", first, _outcome(record)),
        *(figure_html(panel, images.get(panel.name)) for panel in drawn),
        section("numbers", "The numbers", "\n".join(map(table_html, tables))),
    ]
    title = f"{record['title']} ({record['study']})"
    return document(title, record["setting"], links, parts, tiles_html(tiles) if tiles else "")


def _outcome(record: Record) -> str:
    """The prediction, what was found, the claims, and the verdict, as far as there are any."""
    body = [f"<p>{escape(record['prediction'])}</p>"]
    if record["findings"]:
        message = "".join(f"<li>{escape(words)}</li>" for words in record["findings"])
        body.append(f"<ul>{message}</ul>")
    if record["claims"]:
        header = ("claim", "prediction", "measured", "verdict", "rule")
        keys = ("name", "prediction", "measured", "verdict", "rule")
        rows = tuple(tuple(claim[key] for key in keys) for claim in record["claims"])
        body.append(table_html(Table("Each claim, judged by its rule", header, rows)))
    if record["verdict"] is not None:
        body.append(f"<p><strong>Verdict.</strong> {escape(record['verdict'])}</p>")
    return "\n".join(body)
