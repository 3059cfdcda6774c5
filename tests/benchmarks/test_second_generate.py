"""A second `generate` of one token: of a run as it is, and of a retrofitted, calibrated copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from file_reads import opened_below
from second_generate import overhead, retrofitted
from topograd.decode.model import load
from topograd.runs.session import LoadedTextRun


@pytest.fixture(scope="module")
def run(make_session: Callable[..., LoadedTextRun]) -> Path:
    return make_session(3).run.folder


def test_a_retrofitted_copy_drafts_by_everything_and_the_run_stays(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    folder = retrofitted(run, tmp_path / "copy", 300)
    model = load(folder)
    with opened_below(folder) as read:
        first = model.generate("stage ", 4)
    assert (first.depth, first) == ("speculate", load(run).generate("stage ", 4))
    assert "calibration.json" in read
    assert any(name.startswith("draft/") for name in read)
    with opened_below(folder) as read:
        spread = overhead(model, None, rounds=2)
    assert read == [], "what is measured reads nothing"
    assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_as_it_is(run: Path) -> None:
    assert overhead(load(run), "full", rounds=2)["median"] > 0
