"""Claims of the five papers, what was measured here, and the pages that list both. Needs no torch.

`results/results.toml` has measured results: a command, the page of docs/results/ with its output, and the
numbers as they stand there. `results/claims.toml` has the claims; their words take numbers from results by
name and hold none of their own. Tests follow each number back to its page and parse each command.

    reproduced   ours agrees in kind with the paper, at our size
    corrected    something else is true than the text says, and `ours` says what
    failed       ours contradicts it, at our size
    undecided    measured, and the interval or the design does not decide
    not run      nothing here tests it

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
DOCS = Path(__file__).parents[1] / "docs"
PAPERS: Mapping[str, str] = {
    "product-of-experts": "Product of Experts as Scalable Local Learning",
    "stage-partitioned-learning": "Stage-Partitioned Learning",
    "latent-bounded-interfaces": "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces",
    "dead-directions": "Dead Directions: Geometric Singular Learning",
    "gram-metrics": "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics",
}
STATES = ("reproduced", "corrected", "failed", "undecided", "not run")
LEAD = (
    "*Reproduced*: ours agrees in kind, at our size. *Corrected*: something else is true than the text says. "
    "*Failed*: ours contradicts it, at our size. *Undecided*: measured, and the interval or the design does "
    "not decide. *Not run*: nothing here tests it."
)
RESULTS_LEAD = """
What was measured, newest first, failures included. A speed is a ratio of things that took turns, with
quartiles; a quality has a 90 % interval over seeds unless the page says otherwise. A number without an
interval is a record of one run and decides nothing. Machine of all pages: 2 cores of an AMD EPYC (some with
AVX2 only, some with AVX-512), 24 GiB, Python 3.11, torch 2.13 CPU, a virtual machine with ±10 % of noise in
time. No GPU was used. Commands have today's names.

This table is made from the pages' front matter by `python -m papers pages`.
"""
PAPERS_LEAD = """
A test holds each number against [the page of results](../results/index.md) that it comes from and parses each
command. These pages are made from `papers/results/` by `python -m papers pages`.
"""
_NUMBER = re.compile(r"\{(?:([\w-]+)\.)?(\w+)\}")
_FRONT_MATTER = re.compile(r'^(\w+): "(.*)"$', re.MULTILINE)


@dataclass(frozen=True)
class MeasuredResult:
    """Numbers that a command gave, and the page that has them."""

    name: str
    command: str
    source: str
    numbers: Mapping[str, str]


@dataclass(frozen=True)
class PaperClaim:
    """One statement of a paper, or one measurement of ours beside it."""

    paper: str
    where: str
    claim: str
    state: str
    """One of STATES; empty for what is no claim of the paper."""
    command: str
    ours: str
    """Our finding, in words and numbers."""
    words: str
    """The same with the names of the numbers."""
    sources: tuple[str, ...]
    """Names of the results whose numbers it has."""

    def as_dict(self) -> dict[str, Any]:
        names = ("paper", "where", "claim", "state", "command", "ours")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ResultPage:
    """A page of docs/results/ by its front matter."""

    name: str
    title: str
    topic: str
    figure: str
    command: str
    verdict: str
    body: str


@cache
def results() -> dict[str, MeasuredResult]:
    """The results by name."""
    tables = tomllib.loads((FOLDER / "results.toml").read_text(encoding="utf-8"))
    return {
        name: MeasuredResult(name, table["command"], table["source"], table["numbers"])
        for name, table in tables.items()
    }


@cache
def claims() -> tuple[PaperClaim, ...]:
    """All claims, in the order of the papers."""
    return tuple(_claim(table) for table in _tables()["claim"])


@cache
def beside() -> tuple[PaperClaim, ...]:
    """Measurements of ours that stand beside a paper and are no claim of it; they are not counted."""
    return tuple(_claim(table) for table in _tables()["beside"])


def _tables() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((FOLDER / "claims.toml").read_text(encoding="utf-8"))


def _claim(table: Mapping[str, str]) -> PaperClaim:
    own = table.get("result", "")
    words = table["ours"]
    sources = dict.fromkeys([own, *(name or own for name, _ in _NUMBER.findall(words))])
    return PaperClaim(
        table["paper"],
        table["where"],
        table["claim"],
        table.get("state", ""),
        table.get("command") or results()[own].command,
        _NUMBER.sub(lambda match: results()[match[1] or own].numbers[match[2]], words),
        words,
        tuple(name for name in sources if name),
    )


def chosen(paper: str | None = None, state: str | None = None) -> list[PaperClaim]:
    """The claims of a paper, or in a state; by default all."""
    if paper is not None and paper not in PAPERS:
        raise ConfigError(setting="paper", given=paper, allowed=f"one of {', '.join(PAPERS)}")
    return [one for one in claims() if paper in (None, one.paper) and state in (None, one.state)]


def counts(some: Sequence[PaperClaim]) -> dict[str, int]:
    """The number of claims in each state."""
    return {state: sum(one.state == state for one in some) for state in STATES}


def result_pages() -> list[ResultPage]:
    """The pages of docs/results/, newest first."""
    files = sorted((DOCS / "results").glob("2*.md"), reverse=True)
    return [read_result_page(file) for file in files]


def read_result_page(file: Path) -> ResultPage:
    """A page of results; its front matter has topic, figure, command and verdict."""
    _, front, rest = file.read_text(encoding="utf-8").split("---\n", 2)
    title, body = rest.strip().removeprefix("# ").split("\n", 1)
    return ResultPage(name=file.name, title=title, body=body, **dict(_FRONT_MATTER.findall(front)))


def site_pages() -> dict[str, str]:
    """The generated pages by path under docs/: the index of results, the index of papers, a page a paper."""
    pages = {"results/index.md": _results_index(), "papers/index.md": _papers_index()}
    return pages | {f"papers/{paper}.md": _paper_page(paper) for paper in PAPERS}


def _results_index() -> str:
    lines = ["# Results", RESULTS_LEAD, _record(("date", "page", "topic", "figure", "command", "verdict"))]
    lines.append("|" + "---|" * 6)
    for page in result_pages():
        link = f"[{page.title}]({page.name})"
        cells = (page.name[:10], link, page.topic, page.figure, f"`{page.command}`", page.verdict)
        lines.append(_record(cells))
    return "\n".join([*lines, _toctree("2*", ":reversed:")])


def _papers_index() -> str:
    lines = ["# The papers, claim by claim", "", LEAD, PAPERS_LEAD, _record(("paper", *STATES))]
    lines.append("|" + "---|" * (1 + len(STATES)))
    for paper, title in PAPERS.items():
        lines.append(_record([f"[{title}]({paper}.md)", *map(str, counts(chosen(paper)).values())]))
    return "\n".join([*lines, _toctree("*", ":titlesonly:")])


def _paper_page(paper: str) -> str:
    lines = [f"# {PAPERS[paper]}", "", LEAD, ""]
    lines.append(", ".join(f"{number} {state}" for state, number in counts(chosen(paper)).items()) + ".")
    lines += ["", *_claims_table(chosen(paper))]
    if own := [one for one in beside() if one.paper == paper]:
        lines += [
            "",
            "## Measured beside the paper",
            "",
            "No claims of the paper, and not counted above.",
            "",
        ]
        lines += _claims_table(own)
    return "\n".join(lines) + "\n"


def _claims_table(some: Sequence[PaperClaim]) -> list[str]:
    states = any(one.state for one in some)
    columns = ["where", "claim", "state", "here", "command", "results"]
    if not states:
        columns = ["where", "question", "here", "command", "results"]
    lines = [_record(columns), "|" + "---|" * len(columns)]
    for one in some:
        sources = dict.fromkeys(Path(results()[name].source).name for name in one.sources)
        links = ", ".join(f"[{name[:10]}](../results/{name})" for name in sources)
        state = [one.state] if states else []
        lines.append(_record([one.where, one.claim, *state, one.ours, f"`{one.command}`", links]))
    return lines


def _record(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _toctree(pattern: str, option: str) -> str:
    return f"\n```{{toctree}}\n:hidden:\n:glob:\n{option}\n\n{pattern}\n```\n"
