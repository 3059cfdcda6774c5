"""The page of the study of fields: what came out, the verdict, and every figure.

It stands alone, as a report does: no script, nothing loaded, every figure described and with its numbers in a
table. DIR/DATA.html is written last, after DIR/DATA.json and DIR/figures/DATA-*.svg and .png.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from topograd.errors import RunError
from topograd.files import write_atomic, write_json
from topograd.report.drawing import render, style
from topograd.report.fields_figures import Record, study_panels
from topograd.report.figures import Panel
from topograd.report.markup import document, escape, section
from topograd.report.page import figure_html

WORDS = {"teacher": "a generated teacher", "digits": "scikit-learn's digits, even against odd"}


def write_study(folder: Path, record: Record) -> Path:
    """Write everything into the folder and return the page's path. The same record gives the same bytes."""
    data = record["data"]
    page, figures = folder / f"{data}.html", folder / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        with style():
            drawn = study_panels(record)
            images = {panel.name: render(panel.figure) for panel in drawn if panel.figure is not None}
        for name, (svg, png) in images.items():
            write_atomic(figures / f"{data}-{name}.svg", svg)
            write_atomic(figures / f"{data}-{name}.png", png)
        write_json(folder / f"{data}.json", dict(record))
        write_atomic(page, _page(record, drawn, {name: svg for name, (svg, _) in images.items()}))
    except OSError as problem:
        reason = problem.strerror
        raise RunError(f"cannot write {page} ({reason}); pass --out with a folder you can write") from None
    return page


def _page(record: Record, drawn: Sequence[Panel], svgs: Mapping[str, str]) -> str:
    title = f"Fields during training: {record['data']}"
    links = [("findings", "What came out"), *((panel.name, panel.title) for panel in drawn)]
    sizes = record["sizes"]
    lead = (
        f"Networks of {sizes['depth']} layers of {sizes['width']} neurons, without biases, that learn "
        f"{WORDS[record['data']]}, from {sizes['examples']} examples by plain gradient descent. The output "
        "is the mean of the last layer."
    )
    found = [words for part in record["findings"].values() for words in part]
    said = "".join(f"<li>{escape(words)}</li>" for words in found)
    verdict = f"<p><strong>The conjecture of section 10.3.</strong> {escape(record['verdict'])}</p>"
    parts = [
        section("findings", "What came out", f"<ul>{said}</ul>\n{verdict}"),
        *(figure_html(panel, svgs.get(panel.name)) for panel in drawn),
    ]
    return document(title, lead, links, parts)
