import math
from dataclasses import dataclass
from typing import Any

import pytest

from topograd.cli.console import Folder, Json, number, parse, percent, print_json
from topograd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A verb to try."""

    folder: Folder
    """Where."""
    count: int = 3
    """How many of the things that this verb counts, which takes more words to say than a line is wide."""
    json: Json = False

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ConfigError(setting="count", given=13, allowed="another")


def test_flags_become_a_dataclass() -> None:
    asked = parse(Sample, ["here", "--count", "7", "--json"], "sample")
    assert (str(asked.folder), asked.count, asked.json) == ("here", 7, True)


def test_a_default_may_be_given() -> None:
    assert parse(Sample, ["x"], "sample", Sample(folder=asked_folder(), count=9)).count == 9


def asked_folder() -> Any:
    return parse(Sample, ["x"], "sample").folder


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], r"^DIR is missing; see topograd sample --help$"),
        (["x", "--count", "many"], r"^--count is 'many'; it must be a whole number$"),
        (["x", "--cuont", "3"], r"Unrecognized options: --cuont, 3 \(did you mean --count\?\); see"),
        (["x", "y"], "Unrecognized options: y; see topograd sample --help"),
        (["x", "--count"], "^--count has no value; see topograd sample --help$"),
        (["x", "--count", "13"], "^--count is 13; it must be another$"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse(Sample, argv, "sample")
    assert "\n" not in str(caught.value)
    assert not set("│╭╰─") & set(str(caught.value))
    assert capfd.readouterr() == ("", "")


def test_help_goes_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Sample, ["--help"], "sample")
    assert not caught.value.code
    out, err = capfd.readouterr()
    assert out.startswith("usage: topograd sample")
    assert err == ""


def test_json_has_no_nan(capfd: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1.5, math.nan, (math.inf, None)], "b": {"c": -math.inf, "d": "é\n", "e": True}})
    expected = '{"a": [1.5, null, [null, null]], "b": {"c": null, "d": "\\u00e9\\n", "e": true}}\n'
    assert capfd.readouterr().out == expected


def test_numbers_for_people() -> None:
    assert (number(1.23456), number(2, 1), number(None), number(math.nan)) == ("1.2346", "2.0", "–", "–")
    assert (percent(-1.234), percent(0.0), percent(math.inf)) == ("-1.23 %", "+0.00 %", "–")
