"""No number stands without its script: claims, results, the pages they come from, and the commands."""

import re
import shlex
from pathlib import Path

import pytest

from papers.check import CHECKS
from papers.reproduction import (
    PAPERS,
    STATES,
    MeasuredResult,
    PaperClaim,
    chosen,
    claims,
    counts,
    markdown,
    results,
)
from papers.studies import STUDIES
from raising import refused
from topograd.cli.main import MOVED, VERBS
from topograd.errors import ConfigError

ROOT = Path(__file__).parents[2]


def ident(one: PaperClaim) -> str:
    return f"{one.paper} {one.where}: {one.claim[:40]}"


def section_of(result: MeasuredResult) -> str:
    text = (ROOT / result.source).read_text(encoding="utf-8")
    if result.section is None:
        return text
    parts = re.split(r"^## ", text, flags=re.M)
    own = [part for part in parts if part.startswith(result.section)]
    assert own, f"{result.source} has no section {result.section!r}"
    return "\n".join(own)


@pytest.mark.parametrize("result", results().values(), ids=results())
def test_every_number_stands_where_it_is_said_to(result: MeasuredResult) -> None:
    text = " ".join(section_of(result).split())
    for name, number in result.found.items():
        assert number in text, f"{result.name}.{name} is {number!r}, which {result.source} does not have"


@pytest.mark.parametrize("one", claims(), ids=ident)
def test_claims_have_no_numbers_of_their_own(one: PaperClaim) -> None:
    words = re.sub(r"`[^`]*`|\{\w+\}", "", one.words)
    words = re.sub(r"1F1B|[A-Za-z]\w*(-\d+)?", "", words)  # names such as SmolLM2 and CIFAR-10
    assert not re.search(r"\d", words), one.words
    assert "{" not in one.ours, "every number has a value"
    assert one.result is not None or "{" not in one.words


@pytest.mark.parametrize("command", sorted({one.command for one in claims()}))
def test_every_command_exists(command: str) -> None:
    words = shlex.split(command)
    assert words, "a claim without a command"
    if words[0] == "pytest":
        assert (ROOT / words[1]).exists()
        if "-k" in words:
            wanted = words[words.index("-k") + 1]
            tests = re.findall(r"def (test_\w+)", (ROOT / words[1]).read_text(encoding="utf-8"))
            assert any(wanted in test for test in tests), wanted
    elif words[:3] == ["python", "-m", "papers"]:
        verb, name = words[3:5]
        assert name in {"run": STUDIES, "check": CHECKS}[verb]
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] == "topograd"
        assert words[1] in VERBS
        assert " ".join(words[1:3]) not in MOVED


def test_every_paper_is_there_and_every_state_is_known() -> None:
    assert {one.paper for one in claims()} == PAPERS.keys()
    assert {one.state for one in claims()} == set(STATES)
    assert len({(one.paper, one.where, one.claim) for one in claims()}) == len(claims())
    assert sum(counts(claims()).values()) == len(claims())
    used = {one.result for one in claims()}
    assert used >= results().keys() - {"hugging-face", "optim-bench"}, "results that nobody cites"


def test_a_verdict_of_a_finished_claim_has_a_number_or_a_test() -> None:
    for one in claims():
        if one.state in ("reproduced", "failed") and one.result is None:
            assert one.command.startswith(("pytest", "topograd", "python -m papers")), ident(one)


def test_a_claim_that_ours_differs_from_is_not_reproduced() -> None:
    """As the page defines it: *corrected* is where something else is true than the text says."""
    differs = re.compile(r"(less|more|fewer|not|only)\b")
    assert [ident(one) for one in chosen(state="reproduced") if differs.match(one.ours)] == []
    states = {one.claim: one.state for one in claims()}
    assert states["A step takes 1.33 times backprop's with four stages"] == "corrected"
    assert states["Every prefix of stages is the model that would have been trained alone"] == "corrected"


def test_choosing() -> None:
    assert chosen() == list(claims())
    failed = chosen(paper="gram-metrics", state="failed")
    assert [(one.paper, one.state) for one in failed] == [("gram-metrics", "failed")]
    with refused(ConfigError, setting="paper", given="x"):
        chosen(paper="x")


def test_the_page_of_the_docs_is_this_one() -> None:
    assert (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8") == markdown(claims())
