"""What decoding reads beside the weights: only what a depth needs, and once while a run is open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from file_reads import opened_below
from retrofits import retrofitted_copy
from topograd.decode import model as module
from topograd.decode.calibration import store
from topograd.decode.model import Model, load
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import Runtime

TENSORS = "draft/topograd_adapter.safetensors"


@pytest.fixture(scope="module")
def folder(make_session: Callable[..., LoadedTextRun], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return retrofitted_copy(make_session(3).run.folder, tmp_path_factory.mktemp("reads") / "run")


@pytest.fixture
def model(folder: Path) -> Model:
    model = load(folder)
    assert model.engine.last == 2, "it is laid out"
    return model


def test_a_depth_that_needs_no_calibration_reads_none(model: Model, folder: Path) -> None:
    with opened_below(folder) as read:
        for depth in ("full", "prefix:3", "speculate:lookup"):
            model.generate("stage ", 3, depth=depth)
    assert read == []
    with opened_below(folder) as read:
        model.generate("stage ", 3, depth="prefix:1")
    assert "calibration.json" not in read, "an exit's translator is in the adapter"
    assert read.count(TENSORS) == 1


@pytest.mark.parametrize("depth", [None, "speculate", "speculate:draft+table", "wand:flip-rate:0.01"])
def test_a_second_text_reads_nothing(model: Model, folder: Path, depth: str | None) -> None:
    with opened_below(folder) as read:
        made = model.generate("stage ", 3, depth=depth)
    assert made.depth == (depth or "speculate")
    assert read.count(TENSORS) == 1
    assert read.count("calibration.json") in (0, 2), "its SHA-256, and its content"
    with opened_below(folder) as again:
        assert model.generate("stage ", 3, depth=depth) == made
    assert again == []


def test_a_run_that_drafts_is_opened_once(
    model: Model, make_session: Callable[..., LoadedTextRun], tmp_path: Path
) -> None:
    small = retrofitted_copy(make_session(2).run.folder, tmp_path / "small")
    with opened_below(small) as read:
        made = model.generate("stage ", 3, draft=small)
    assert read
    with opened_below(small) as again:
        assert model.generate("stage ", 3, draft=small) == made
    assert again == []


def test_what_a_depth_takes_to_be_found_is_of_the_texts_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, load_calibration = [0.0], store.load

    def slow(session: LoadedTextRun, runtime: Runtime) -> object:
        now[0] += 5
        return load_calibration(session, runtime)

    monkeypatch.setattr(store, "load", slow)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert model.generate("stage ", 3).seconds >= 5
    assert model.generate("stage ", 3, depth="full").seconds == 0
