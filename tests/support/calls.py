"""What a call of a program gave, as a program that called it would see it, and tables on a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Answer:
    """What a call of the command gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout, which must be one line with one JSON object."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        assert self.out.endswith("\n")
        value = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(value, dict)
        return value

    @property
    def refusal(self) -> str:
        """The one line that says what was wrong."""
        assert self.code == 2
        assert self.out == ""
        assert self.err.startswith("topograd: ")
        assert self.err.count("\n") == 1
        return self.err


Call = Callable[..., Answer]


def caller(main: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs a program with words, and gives what came of it."""

    def run(*words: object) -> Answer:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return Answer(code, *capfd.readouterr())

    return run


def shown(table: Table) -> str:
    """A table on a terminal of 80 columns."""
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    return file.getvalue()
