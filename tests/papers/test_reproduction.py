"""Every number has its page and its command: claims, results, the pages of the site."""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from papers.__main__ import main as papers_main
from papers.reproduction import (
    DOCS,
    PAPERS,
    STATES,
    MeasuredResult,
    PaperClaim,
    ResultPage,
    beside,
    chosen,
    claims,
    counts,
    result_pages,
    results,
    site_pages,
)
from raising import refused
from topograd.cli.main import VERBS
from topograd.cli.main import main as topograd_main
from topograd.errors import ConfigError

ROOT = Path(__file__).parents[2]
EVERYTHING = (*claims(), *beside())


def ident(one: PaperClaim) -> str:
    return f"{one.paper} {one.where}: {one.claim[:40]}"


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("result", results().values(), ids=results())
def test_every_number_stands_on_its_page(result: MeasuredResult) -> None:
    assert Path(result.source).parent == Path("docs/results")
    text = one_line((ROOT / result.source).read_text(encoding="utf-8"))
    for name, number in result.numbers.items():
        assert number in text, f"{result.name}.{name} is {number!r}, which {result.source} does not have"


@pytest.mark.parametrize("one", EVERYTHING, ids=ident)
def test_claims_have_no_numbers_of_their_own(one: PaperClaim) -> None:
    words = re.sub(r"`[^`]*`|\{[\w.-]+\}", "", one.words)
    words = re.sub(r"1F1B|[A-Za-z]\w*(-\d+)?", "", words)  # names such as SmolLM2 and CIFAR-10
    assert not re.search(r"\d", words), one.words
    assert "{" not in one.ours, "every number has a value"


class _Parsed(BaseException):
    """The arguments were accepted."""


@pytest.fixture
def parse_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end as soon as their arguments were read."""
    read = tyro.cli

    def parse(*args: Any, **settings: Any) -> Any:
        read(*args, **settings)
        raise _Parsed

    monkeypatch.setattr(tyro, "cli", parse)


def parses(run: Any, words: list[str]) -> bool:
    """Whether a program takes these arguments: none is missing, flags exist, values have their types."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            run(words)
    except _Parsed:
        return True
    return False


@pytest.mark.usefixtures("parse_alone")
@pytest.mark.parametrize("command", sorted({one.command for one in EVERYTHING}))
def test_every_command_exists_and_takes_its_arguments(command: str) -> None:
    words = shlex.split(command)
    assert words, "a claim without a command"
    if words[0] == "pytest":
        assert (ROOT / words[1]).exists()
        if "-k" in words:
            wanted = words[words.index("-k") + 1]
            tests = re.findall(r"def (test_\w+)", (ROOT / words[1]).read_text(encoding="utf-8"))
            assert any(wanted in test for test in tests), wanted
    elif words[:3] == ["python", "-m", "papers"]:
        assert parses(papers_main, words[3:])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] == "topograd"
        assert words[1] in VERBS
        assert parses(topograd_main, words[1:])


@pytest.mark.usefixtures("parse_alone")
@pytest.mark.parametrize(
    "command", ["search pareto --preset tiny --layers 6", "compose BASE SIDECAR", "generate RUN --dept 1"]
)
def test_a_command_without_what_it_needs_is_seen(command: str) -> None:
    assert not parses(topograd_main, command.split())


def test_every_paper_is_there_and_every_state_is_known() -> None:
    assert {one.paper for one in claims()} == PAPERS.keys()
    assert {one.state for one in claims()} == set(STATES)
    assert {one.state for one in beside()} == {""}
    assert len({(one.paper, one.where, one.claim) for one in EVERYTHING}) == len(EVERYTHING)
    assert sum(counts(claims()).values()) == len(claims())
    used = {name for one in EVERYTHING for name in one.sources}
    assert used >= results().keys() - {"hugging-face", "optim-bench"}, "results without a claim"


def test_a_verdict_of_a_finished_claim_has_a_number_or_a_test() -> None:
    for one in claims():
        if one.state in ("reproduced", "failed") and not one.sources:
            assert one.command.startswith(("pytest", "topograd", "python -m papers")), ident(one)


def test_a_claim_that_ours_differs_from_is_not_reproduced() -> None:
    """As the page defines it: *corrected* is where something else is true than the text says."""
    differs = re.compile(r"(less|more|fewer|not|only)\b")
    assert [ident(one) for one in chosen(state="reproduced") if differs.match(one.ours)] == []
    states = {one.claim: one.state for one in claims()}
    assert states["A step takes 1.33 times backprop's with four stages"] == "corrected"
    assert states["Every prefix of stages is the model that would have been trained alone"] == "corrected"


_INTERVAL = re.compile(r"([+\-−]?\d+(?:\.\d+)?) ?%? \[([+\-−]?[\d.]+), ([+\-−]?[\d.]+)\]")


def spans_zero(words: str) -> bool:
    """Whether the only interval of a sentence has both signs."""
    found = [
        (float(low.replace("−", "-")), float(high.replace("−", "-")))
        for _, low, high in _INTERVAL.findall(words)
    ]
    return len(found) == 1 and found[0][0] < 0 < found[0][1]


def test_a_claim_whose_one_interval_has_both_signs_is_undecided() -> None:
    """Claims that two things are the same are exempt: there such an interval is the point."""
    same = ("Rank hardly matters", "Under the residual Log-OP tails of another order come apart")
    for one in claims():
        if spans_zero(one.ours) and one.claim not in same:
            assert one.state in ("undecided", "not run"), f"{ident(one)}: {one.ours}"
    assert spans_zero("of what depth is worth 0 % [-48, 49]")
    assert not spans_zero("+0.0363 [+0.0196, +0.0530]")


def test_choosing() -> None:
    assert chosen() == list(claims())
    some = chosen(paper="dead-directions", state="failed")
    assert [(one.paper, one.state) for one in some] == [("dead-directions", "failed")]
    with refused(ConfigError, setting="paper", given="x"):
        chosen(paper="x")


@pytest.mark.parametrize("page", result_pages(), ids=lambda page: page.name)
def test_a_page_of_results_bears_its_line_of_the_index(page: ResultPage) -> None:
    assert re.fullmatch(r"2026-\d\d-\d\d-[a-z0-9-]+\.md", page.name)
    assert page.topic
    assert page.verdict
    assert page.command
    assert not re.search(r"^# ", page.body, re.MULTILINE), "one title"
    body = one_line(page.body)
    for number in re.findall(r"[+-]?\d+(?:\.\d+)", page.figure):
        assert number.lstrip("+") in body, f"{page.name}: {number}"


@pytest.mark.parametrize("page", result_pages(), ids=lambda page: page.name)
def test_links_of_a_page_of_results_lead_somewhere(page: ResultPage) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.body):
        assert (DOCS / "results" / link).is_file(), link


def test_the_pages_of_the_site_are_these() -> None:
    """If this fails: `python -m papers pages`."""
    for name, text in site_pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name
