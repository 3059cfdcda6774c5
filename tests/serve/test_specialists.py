"""Specialists that requests switch on: each text has its own, and what it would have alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from topograd.errors import ConfigError
from topograd.runs.session import Session
from topograd.serve.server import open_served
from topograd.serve.settings import Limits
from topograd.serve.texts import Tell
from topograd.specialists.attach import new_specialist


def _listener(tokens: list[int]) -> Tell:
    """Whoever listens keeps the tokens."""
    return lambda choice: lambda progress: tokens.extend(each.token for each in progress.written)


def test_rows_with_and_without_specialists(make_session: Callable[..., Session], tmp_path: Path) -> None:
    base = make_session(3)
    new_specialist(tmp_path / "quiet", base)
    served = open_served(base.run.folder, "base", Limits(rows=2), [tmp_path / "quiet"])
    assert served.specialists is not None
    assert served.specialists.names == ["quiet"]
    from topograd.serve.lanes import Lanes
    from topograd.serve.metrics import Counters
    from topograd.serve.scheduler import Scheduler

    lanes = Lanes(served.model.session, served.model.engine, served.specialists)
    scheduler = Scheduler(lanes, served.limits, Counters())
    asked = {"n": 1, "depth": None, "model": None, "stop": (), "seed": 0, "temperature": 0, "top_k": None}
    asked |= {"top_p": 1, "ignore_eos": False, "weights": None}
    told: dict[str, list[int]] = {"with": [], "without": []}
    active: dict[str, list[str]] = {"with": ["quiet"], "without": []}
    for name, tokens in told.items():
        (job,) = served.jobs(asked | {"specialists": active[name]}, [[100, 101]], 5, _listener(tokens))
        scheduler.add([job])
    while scheduler.step():
        pass
    assert len(told["with"]) == 5
    assert told["with"] == told["without"], "it has learned nothing yet, so it adds nothing"
    expected = served.specialists.generate([[100, 101]], [{"quiet": 1.0}], 5)
    assert told["with"] == expected[0]
    with pytest.raises(ConfigError, match="full depth"):
        lanes.of("prefix:1", job.sampling, (("quiet", 1.0),))
