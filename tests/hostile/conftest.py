"""Counts of faults, printed at the end; `--faults N` tries N times as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from calls import Call, caller
from topograd.cli.main import main

_counts: Counter[str] = Counter()


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Counts a fault of a kind and how it ended."""

    def add(kind: str, ending: str) -> None:
        request.node.user_properties.append(("fault", f"{kind}: {ending}"))

    return add


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run `topograd` with these words."""
    return caller(main, capfd)


@pytest.fixture(scope="session")
def times(pytestconfig: pytest.Config) -> int:
    """How many times the usual number of faults is tried."""
    return int(pytestconfig.getoption("--faults"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _counts.update(str(text) for name, text in report.user_properties if name == "fault")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _counts:
        terminalreporter.section("faults")
        for text, number in sorted(_counts.items()):
            terminalreporter.write_line(f"{number:6}  {text}")
        terminalreporter.write_line(f"{_counts.total():6}  in all, none lost, silent or with a traceback")
