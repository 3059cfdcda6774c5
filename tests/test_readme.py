"""README: its numbers stand on results pages, its commands take their arguments, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from papers.reproduction import claims, counts
from topograd.cli.main import main
from topograd.pretrained import REFERENCE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs/results").glob("2*.md")}
_NUMBER = re.compile(r"[+-]?\d+\.\d+|\d+,\d\d\d")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def things() -> list[str]:
    """The rows of the table: a link, a command, a measured number."""
    return [line for line in section("Six things it does").splitlines() if line.startswith("| [")]


def test_there_are_six_things() -> None:
    assert len(things()) == 6


@pytest.mark.parametrize("thing", things(), ids=lambda thing: thing[3:25])
def test_a_number_of_the_table_stands_on_the_page_that_it_links(thing: str) -> None:
    measured = thing.split(" | ")[2]
    (page,) = re.findall(r"docs/results/([\w.-]+\.md)", measured)
    numbers = _NUMBER.findall(re.sub(r"\(docs/[^)]*\)|SmolLM2-\d+M", "", measured))
    assert len(numbers) >= 3, "a number and its interval"
    for number in numbers:
        assert number in RESULTS[page], f"{number} is not on {page}"


def test_numbers_of_the_limits_stand_on_some_page() -> None:
    everything = "\n".join(RESULTS.values())
    for number in _NUMBER.findall(section("What it does not do")):
        assert number in everything, number


def test_shares_that_interfaces_keep_are_those_of_their_page() -> None:
    (item,) = (one for one in section("What it does not do").split("\n- ") if "Bounded interfaces" in one)
    shares = re.findall(r"-?\d+ % \[-?\d+, -?\d+\]", item)
    assert len(shares) == 5
    for share in shares:
        assert share in RESULTS["2026-11-18-bounded-interfaces.md"], share


def test_the_count_of_claims_is_that_of_the_papers() -> None:
    text = " ".join(section("The papers").split())
    assert f"Their {len(claims())} claims" in text
    assert ", ".join(f"{number} {state}" for state, number in counts(claims()).items()) in text


class _Parsed(BaseException):
    """The arguments were accepted."""


@pytest.mark.parametrize("command", re.findall(r"`topograd ([^`]+)`", README))
def test_a_command_takes_its_arguments(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = tyro.cli
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"\w+\.txt", command):  # a text that is read must be there
        Path(file).touch()

    def parse(*args: Any, **settings: Any) -> Any:
        read(*args, **settings)
        raise _Parsed

    monkeypatch.setattr(tyro, "cli", parse)
    with pytest.raises(_Parsed), contextlib.redirect_stderr(io.StringIO()):
        main(shlex.split(command.replace("MODEL", str(REFERENCE))))


def test_files_that_commands_name_are_there() -> None:
    for script in re.findall(r"python (\S+\.py)", README):
        assert (ROOT / script).is_file(), script
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make (\w+)`", README)) <= set(targets)


HOW_TO = (
    "speed-up-a-hugging-face-model",
    "fine-tune-without-forgetting",
    "add-a-specialist",
    "serve",
    "early-exits",
    "several-machines",
    "watch-a-training",
    "read-a-checkpoint",
    "search-a-topology",
    "own-stack",
)


def test_links_lead_somewhere() -> None:
    site = {"docs/index.md", *(f"docs/how-to/{name}.md" for name in HOW_TO)}
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        there = (ROOT / link).exists()
        assert there or link in site, link


def test_it_is_one_screen_before_the_limits() -> None:
    """Two sentences, a figure, install, ten lines, six things."""
    assert len(README.split("## What it does not do")[0].splitlines()) <= 60
    code = README.split("```python\n", 1)[1].split("```", 1)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
