"""`topograd reproduce`: every claim of the papers, what came of it here, and the command that gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from papers.reproduction import PAPERS, PaperClaim, chosen, counts, markdown
from topograd.cli.console import Json, make_folder, out, parse, print_json
from topograd.errors import ConfigError

State = Literal["reproduced", "corrected", "failed", "open"]


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
    markdown: bool = False
    """Print the page in Markdown."""
    json: Json = False

    def __post_init__(self) -> None:
        if self.markdown and self.json:
            raise ConfigError("--markdown and --json are both given; give one of them")


def run(argv: list[str]) -> int:
    """Print the claims, and return the exit code."""
    asked = parse(Reproduce, argv, "reproduce")
    some = chosen(asked.paper, asked.state)
    answer: dict[str, Any] = {"claims": [one.as_dict() for one in some], "counts": counts(some)}
    if asked.out is not None:
        from papers.claims_page import write_reproduction

        make_folder(asked.out)
        answer["page"] = str(write_reproduction(asked.out, answer, PAPERS))
    if asked.json:
        print_json(answer)
    elif asked.markdown:
        print(markdown(some), end="")
    else:
        _show(some, answer)
    return 0


def claims_table(paper: str, some: list[PaperClaim]) -> Table:
    """The claims of one paper."""
    table = Table(title=PAPERS[paper], title_justify="left", show_lines=True)
    for column in ("where", "claim", "state", "here", "command"):
        table.add_column(column, no_wrap=column == "state")
    for one in some:
        table.add_row(one.where, one.claim, one.state, one.ours, one.command)
    return table


def _show(some: list[PaperClaim], answer: Mapping[str, Any]) -> None:
    console = out()
    for paper in PAPERS:
        own = [one for one in some if one.paper == paper]
        if own:
            console.print(claims_table(paper, own))
    console.print(", ".join(f"{number} {state}" for state, number in answer["counts"].items()))
    if "page" in answer:
        console.print(f"Page: {Path(answer['page']).resolve()}", soft_wrap=True)
