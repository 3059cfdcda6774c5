"""`python -m papers reproduce`: the claims of the papers, our finding beside each, and its command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from papers import PROGRAM
from papers.reproduction import LEAD, PAPERS, PaperClaim, chosen, counts
from topograd.cli.console import Json, make_folder, out, parse, print_json
from topograd.errors import RunError
from topograd.files import write_atomic

State = Literal["reproduced", "corrected", "failed", "undecided", "not run"]
COLUMNS = {"where": "where", "claim": "claim", "state": "state", "ours": "here", "command": "command"}


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Every table and claim of the five papers, ours beside theirs.

    Nothing is run: the numbers are those of committed results, each with the command that gives it.
    """

    paper: str | None = None
    """One of product-of-experts, stage-partitioned-learning, latent-bounded-interfaces, dead-directions,
    gram-metrics."""
    state: State | None = None
    """Only the claims in this state."""
    out: Path | None = None
    """A folder into which the page reproduce.html is written."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Print the claims, and return the exit code."""
    args = parse(Reproduce, argv, "reproduce", program=PROGRAM)
    some = chosen(args.paper, args.state)
    answer: dict[str, Any] = {"claims": [one.as_dict() for one in some], "counts": counts(some)}
    if args.out is not None:
        make_folder(args.out)
        answer["page"] = str(write_page(args.out, answer))
    if args.json:
        print_json(answer)
    else:
        _show(some, answer)
    return 0


def claims_table(paper: str, some: list[PaperClaim]) -> Table:
    """The claims of one paper."""
    table = Table(title=PAPERS[paper], title_justify="left", show_lines=True)
    for column in COLUMNS.values():
        table.add_column(column, no_wrap=column == "state")
    for one in some:
        table.add_row(*(getattr(one, key) for key in COLUMNS))
    return table


def write_page(folder: Path, answer: Mapping[str, Any]) -> Path:
    """Write reproduce.html into the folder and return its path: counts, and a table for each paper."""
    from topograd.report.markup import document, section, table_html, tiles_html
    from topograd.report.tables import Table

    page, links, parts = folder / "reproduce.html", [], []
    for paper, title in PAPERS.items():
        rows = [tuple(one[key] for key in COLUMNS) for one in answer["claims"] if one["paper"] == paper]
        if rows:
            table = Table(f"{title}: {len(rows)} claims", tuple(COLUMNS.values()), tuple(rows))
            links.append((paper, title))
            parts.append(section(paper, title, table_html(table)))
    tiles = tiles_html([(state, str(number)) for state, number in answer["counts"].items()])
    try:
        write_atomic(page, document("The papers, claim by claim", LEAD.replace("*", ""), links, parts, tiles))
    except OSError as problem:
        reason = problem.strerror
        raise RunError(
            f"cannot write {page} ({reason})", remedy="pass --out with a folder you can write"
        ) from None
    return page


def _show(some: list[PaperClaim], answer: Mapping[str, Any]) -> None:
    console = out()
    for paper in PAPERS:
        own = [one for one in some if one.paper == paper]
        if own:
            console.print(claims_table(paper, own))
    console.print(", ".join(f"{number} {state}" for state, number in answer["counts"].items()))
    if "page" in answer:
        console.print(f"Page: {Path(answer['page']).resolve()}", soft_wrap=True)
