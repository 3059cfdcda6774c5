"""The page of all claims of the papers: how many are in each state, and a table for each paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from topograd.errors import RunError
from topograd.files import write_atomic
from topograd.report.markup import document, section, table_html, tiles_html
from topograd.report.tables import Table

LEAD = (
    "Reproduced: ours agrees in kind, at our size. Corrected: something else is true than the text says. "
    "Failed: ours contradicts it, at our size. Open: not decided here; the command would go on."
)
COLUMNS = {"where": "where", "claim": "claim", "state": "state", "ours": "here", "command": "command"}


def write_reproduction(folder: Path, answer: Mapping[str, Any], papers: Mapping[str, str]) -> Path:
    """Write reproduce.html into the folder and return its path; `papers` has the titles by name."""
    page = folder / "reproduce.html"
    by_paper = {name: [one for one in answer["claims"] if one["paper"] == name] for name in papers}
    some = {name: own for name, own in by_paper.items() if own}
    parts = [section(name, papers[name], table_html(_table(papers[name], own))) for name, own in some.items()]
    links = [(name, papers[name]) for name in some]
    tiles = [(state, str(number)) for state, number in answer["counts"].items()]
    try:
        write_atomic(page, document("The papers, claim by claim", LEAD, links, parts, tiles_html(tiles)))
    except OSError as problem:
        reason = problem.strerror
        raise RunError(f"cannot write {page} ({reason}); pass --out with a folder you can write") from None
    return page


def _table(title: str, some: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(tuple(str(one[key]) for key in COLUMNS) for one in some)
    return Table(f"{title}: {len(some)} claims", tuple(COLUMNS.values()), rows)
