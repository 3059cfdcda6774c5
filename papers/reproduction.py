"""Every table and claim of the five papers, and what came of it here. Needs no torch.

`results/results.toml` has what was measured: a command, the section of LOG.md or docs/ where its output is
written down, and the numbers, as they stand there. `results/claims.toml` has the claims; their words take
numbers from results by name and hold none of their own. So no number stands without its script, and a test
follows each of them back: to the section, to the command, and from the command to a verb, a study, a
benchmark or a test that exists.

    reproduced   ours agrees in kind with theirs, at our size
    corrected    something else is true than the text says, and `ours` says what
    failed       ours contradicts it, at our size
    open         not decided here; `command` would go on

Limits. A state is a judgement by reading both sides, not a computation; sizes differ by orders of magnitude.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from topograd.errors import ConfigError

FOLDER = Path(__file__).parent / "results"
PAPERS: Mapping[str, str] = {
    "product-of-experts": "Product of Experts as Scalable Local Learning",
    "stage-partitioned-learning": "Stage-Partitioned Learning",
    "latent-bounded-interfaces": "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces",
    "dead-directions": "Dead Directions: Geometric Singular Learning",
    "gram-metrics": "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics",
}
STATES = ("reproduced", "corrected", "failed", "open")
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class MeasuredResult:
    """What a command gave, and where that is written down."""

    name: str
    command: str
    source: str
    section: str | None
    found: Mapping[str, str]


@dataclass(frozen=True)
class PaperClaim:
    """One thing that a paper says."""

    paper: str
    where: str
    claim: str
    state: str
    command: str
    ours: str
    """What we find, in words and numbers."""
    words: str
    """The same with the names of the numbers."""
    result: str | None

    def as_dict(self) -> dict[str, Any]:
        names = ("paper", "where", "claim", "state", "command", "ours")
        return {name: getattr(self, name) for name in names}


@cache
def results() -> dict[str, MeasuredResult]:
    """The results by name."""
    given = tomllib.loads((FOLDER / "results.toml").read_text(encoding="utf-8"))
    return {
        name: MeasuredResult(name, one["command"], one["source"], one.get("section"), one["found"])
        for name, one in given.items()
    }


@cache
def claims() -> tuple[PaperClaim, ...]:
    """All claims, in the order of the papers."""
    given = tomllib.loads((FOLDER / "claims.toml").read_text(encoding="utf-8"))["claim"]
    return tuple(_claim(one) for one in given)


def _claim(one: Mapping[str, str]) -> PaperClaim:
    measured = results()[one["result"]] if "result" in one else None
    command = one.get("command") or ("" if measured is None else measured.command)
    found: Mapping[str, str] = {} if measured is None else measured.found
    ours = _PLACE.sub(lambda place: found[place[1]], one["ours"])
    return PaperClaim(
        one["paper"],
        one["where"],
        one["claim"],
        one["state"],
        command,
        ours,
        one["ours"],
        one.get("result"),
    )


def chosen(paper: str | None = None, state: str | None = None) -> list[PaperClaim]:
    """The claims of a paper, or in a state; by default all."""
    if paper is not None and paper not in PAPERS:
        raise ConfigError(setting="paper", given=paper, allowed=f"one of {', '.join(PAPERS)}")
    return [one for one in claims() if paper in (None, one.paper) and state in (None, one.state)]


def counts(some: Sequence[PaperClaim]) -> dict[str, int]:
    """How many claims are in each state."""
    return {state: sum(one.state == state for one in some) for state in STATES}


def markdown(some: Sequence[PaperClaim]) -> str:
    """The page in Markdown, a table for each paper; docs/reproduce.md is this of all claims."""
    lines = [
        "# The papers, claim by claim",
        "",
        "What the five papers say, and what came of it here. *Reproduced*: ours agrees in kind, at our size.",
        "*Corrected*: something else is true than the text says. *Failed*: ours contradicts it, at our size.",
        "*Open*: not decided here; the command would go on. This page is made from `papers/results/` by",
        "`python -m papers reproduce --markdown`, and a test holds each number against",
        "[LOG.md](../LOG.md) or the page that it comes from.",
        "",
        "| paper | " + " | ".join(STATES) + " |",
        "|---|" + "---|" * len(STATES),
    ]
    by_paper = {paper: [one for one in some if one.paper == paper] for paper in PAPERS}
    for paper, own in by_paper.items():
        lines.append(f"| {PAPERS[paper]} | " + " | ".join(map(str, counts(own).values())) + " |")
    for paper, own in by_paper.items():
        lines += [
            "",
            f"## {PAPERS[paper]}",
            "",
            "| where | claim | state | here | command |",
            "|---|---|---|---|---|",
        ]
        cells = ((one.where, one.claim, one.state, one.ours, f"`{one.command}`") for one in own)
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(lines) + "\n"
