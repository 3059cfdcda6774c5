"""The page of all claims of the papers: how many are in each state, and a table for each paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from topograd.errors import RunError
from topograd.files import write_atomic
from topograd.report.markup import document, section, table_html, tiles_html
from topograd.report.tables import Table
from topograd.studies.reproduction import PAPERS, PaperClaim, counts

LEAD = (
    "Reproduced: ours agrees in kind, at our size. Corrected: something else is true than the text says. "
    "Failed: ours contradicts it, at our size. Open: not decided here; the command would go on."
)


def write_reproduction(folder: Path, some: Sequence[PaperClaim]) -> Path:
    """Write reproduce.html into the folder and return its path."""
    page = folder / "reproduce.html"
    by_paper = {paper: [one for one in some if one.paper == paper] for paper in PAPERS}
    parts = [
        section(paper, PAPERS[paper], table_html(_table(paper, own)))
        for paper, own in by_paper.items()
        if own
    ]
    links = [(paper, PAPERS[paper]) for paper, own in by_paper.items() if own]
    tiles = [(state, str(number)) for state, number in counts(some).items()]
    try:
        write_atomic(page, document("The papers, claim by claim", LEAD, links, parts, tiles_html(tiles)))
    except OSError as problem:
        reason = problem.strerror
        raise RunError(f"cannot write {page} ({reason}); pass --out with a folder you can write") from None
    return page


def _table(paper: str, some: Sequence[PaperClaim]) -> Table:
    header = ("where", "claim", "state", "here", "command")
    rows = tuple((one.where, one.claim, one.state, one.ours, one.command) for one in some)
    return Table(f"{PAPERS[paper]}: {len(some)} claims", header, rows)
