"""What was kept of a draft stage and a table comes back; what does not fit its base is one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from raising import refused
from retrofits import add_draft
from topograd.decode.calibration.measure import Calibration, heldout_readings
from topograd.decode.calibration.store import load, store
from topograd.decode.calibration.tune import tune
from topograd.decode.depths import default_depth, engine_of, strategy_of
from topograd.decode.lookup import NGramTable
from topograd.decode.retrofitted import KIND, open_exits, open_retrofit, retrofit_tensors
from topograd.decode.strategies import generate_batch
from topograd.errors import RunError
from topograd.nn.draft_stage import DraftStage, unit
from topograd.runs.adapter import BaseIdentity, create_adapter
from topograd.runs.session import LoadedTextRun, heldout_text, open_session


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    return make_session(2)


def test_what_was_kept_comes_back(session: LoadedTextRun, tmp_path: Path) -> None:
    stage = DraftStage(session.stack, torch.arange(0, 200, 3))
    for parameter in stage.parameters():
        nn.init.normal_(parameter)
    table = NGramTable.of(np.array([[1, 2, 3, 1, 2, 3]]), least=1)
    tensors = retrofit_tensors(stage, table)
    base = BaseIdentity.of(session)
    create_adapter(tmp_path / "a", kind=KIND, base=base, tensors=tensors, settings={}, card="")
    random = torch.random.get_rng_state()
    found = open_retrofit(session, tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), random), "opening draws nothing"
    for mine, its in zip(stage.state_dict().values(), found.stage.state_dict().values(), strict=True):
        assert torch.equal(mine, its)
    assert found.table.find([1, 2]) == table.find([1, 2])
    assert not any(p.requires_grad for p in found.stage.parameters())
    wrong = {**tensors, "stage.relay.token.weight": torch.zeros(3, 3)}
    create_adapter(tmp_path / "b", kind=KIND, base=base, tensors=wrong, settings={}, card="")
    with refused(RunError, setting="adapter"):
        open_retrofit(session, tmp_path / "b")
    for number, exits in enumerate(([0, 2], [1, 0], [-1, 1])):
        wrong = retrofit_tensors(DraftStage(session.stack, torch.arange(9), exits, 2), table)
        create_adapter(tmp_path / f"d{number}", kind=KIND, base=base, tensors=wrong, settings={}, card="")
        with refused(RunError, setting="adapter"):
            open_retrofit(session, tmp_path / f"d{number}")
    create_adapter(tmp_path / "c", kind="lora", base=base, tensors=tensors, settings={}, card="")
    with refused(RunError, setting="kind", given="lora"):
        open_retrofit(session, tmp_path / "c")


PROMPT = [[115, 116, 97, 103, 101]]


@pytest.fixture(scope="module")
def three(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    return make_session(3)


@pytest.fixture
def with_exits(three: LoadedTextRun, tmp_path: Path) -> LoadedTextRun:
    """A run of three stages in float64 whose two exits have translators of their own."""
    session = open_session(shutil.copytree(three.run.folder, tmp_path / "run"))
    add_draft(session, 0.5)
    session.stack.double()
    return session


def written(session: LoadedTextRun, depth: str) -> list[int]:
    mode = strategy_of(depth, session, engine_of(session))
    return [emitted.token for emitted in generate_batch(mode, PROMPT, 11)[0]]


@pytest.mark.covers("gpt", "decode", feature="retrofit")
@torch.no_grad()
def test_exits_are_what_prefixes_predict_and_full_depth_stays(with_exits: LoadedTextRun) -> None:
    session = with_exits
    engine, translators = engine_of(session), open_exits(session)
    with torch.inference_mode():
        cache = engine.start(PROMPT)
        for stage in range(3):
            engine.run(cache, stage)
            h = cache[0].cache.hidden(cache, stage)
            read = translators[stage](unit(h)) if stage < 2 else h
            wanted = session.stack.readout(read, stage)
            assert torch.allclose(engine.logits(cache, stage), wanted, rtol=0, atol=1e-12)
    through = {depth: written(session, depth) for depth in ("full", "prefix:1", "path:1", "speculate:3")}
    assert through["speculate:3"] == through["full"]
    assert through["path:1"] == through["prefix:1"]
    shutil.rmtree(session.run.folder / "draft")
    assert written(session, "full") == through["full"]
    assert written(session, "prefix:1") != through["prefix:1"]


def test_a_calibration_is_of_the_exits_that_it_read(with_exits: LoadedTextRun) -> None:
    session = with_exits
    text, engine = heldout_text(session, None, 300), engine_of(session)
    readings = heldout_readings(session, text)
    same = heldout_readings(session, text, engine=engine)
    assert torch.equal(readings.top, same.top)
    tuning = tune(engine, text, open_retrofit(session))
    store(session, engine.runtime, Calibration.of(readings, 0), tuning)
    assert load(session, engine.runtime)[1] == tuning
    assert len(written(session, "wand:flip-rate:0.01")) == 11
    shutil.rmtree(session.run.folder / "draft")
    assert not torch.equal(heldout_readings(session, text).top[:2], readings.top[:2])
    with refused(RunError, setting="exits"):
        load(session, engine.runtime)
    assert default_depth(session, engine.runtime) == "full"


def test_exits_of_other_weights_are_refused_where_one_is_read(
    with_exits: LoadedTextRun, session: LoadedTextRun, tmp_path: Path
) -> None:
    other = open_session(shutil.copytree(session.run.folder, tmp_path / "other"))
    shutil.copytree(with_exits.run.folder / "draft", other.run.folder / "draft")
    assert len(written(other, "full")) == 11, "full depth asks for no exit"
    with pytest.raises(RunError, match="has other weights"):
        written(other, "prefix:1")
