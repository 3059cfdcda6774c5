"""From a frozen run to a adapter that drafts for it; the base stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import topograd as tg
from raising import refused
from topograd.convert import own_text
from topograd.convert.draft_training import DraftTraining
from topograd.convert.own_text import OwnText, OwnTextConfig
from topograd.convert.retrofit import RetrofitConfig, retrofit
from topograd.decode.retrofitted import has_retrofit, open_retrofit
from topograd.errors import ConfigError, RunError
from topograd.runs.session import LoadedTextRun, open_session

CONFIG = RetrofitConfig(
    tokens=512, vocabulary=64, text=OwnTextConfig(length=16, rows=8), training=DraftTraining(epochs=6)
)


def test_a_run_is_retrofitted_and_drafts(session: LoadedTextRun, tmp_path: Path) -> None:
    folder = shutil.copytree(session.run.folder, tmp_path / "run")
    base = open_session(folder)
    before = {name: t.clone() for name, t in base.stack.state_dict().items()}
    told: set[str] = set()
    found = retrofit(base, None, CONFIG, exits=True, on_work=lambda what, *_: told.add(what))
    assert told == {"tokens of own text", "steps of teaching", "exits"}
    assert all(torch.equal(t, before[name]) for name, t in base.stack.state_dict().items())
    assert found["tokens"] == 512
    assert {row["stage"] for row in found["exits"]} == {1, 2}
    assert has_retrofit(base)
    assert not (folder / "draft.work").exists()
    assert len(open_retrofit(base).table) == found["table"] > 0
    model = tg.load(folder)
    full = model.generate("stage loss ", tokens=12, depth="full")
    assert set(model.engine.translators()) == {0, 1}
    for depth in ("speculate:draft", "speculate:table", "speculate:draft+lookup+table"):
        made = model.generate("stage loss ", tokens=12, depth=depth)
        assert made == full
        assert sum(n for n, _ in made.by_drafter.values()) == made.drafted
    assert model.generate("stage loss ", tokens=12, draft=folder / "draft") == full
    assert model.generate("stage loss ", tokens=12, draft=folder) == full, "itself as its own draft model"
    for depth in ("speculate:3", "speculate:3@all", f"speculate:{folder}", f"speculate:{folder}@all"):
        made = model.generate("stage loss ", tokens=12, depth=depth)
        assert made == full
        assert ("stage 1 (64)" in made.by_drafter) == (depth == "speculate:3")
    with pytest.raises(RunError, match="exists and is not an empty folder; pass another --out"):
        retrofit(base, None, CONFIG)


def test_exits_behind_private_decoders_are_no_states_that_a_draft_reads(
    make_session: Callable[..., LoadedTextRun],
) -> None:
    session = make_session(2, decoder=1)
    found = retrofit(session, None, replace(CONFIG, depths=3), exits=True)
    assert found["depths"] == 1, "full depth passes by the decoder of stage 1"
    model = tg.load(session.run.folder)
    made = model.generate("stage loss ", tokens=12, depth="speculate:draft")
    assert made.drafted
    assert made == model.generate("stage loss ", tokens=12, depth="full")


def test_the_kernels_of_a_precision_write_the_text(session: LoadedTextRun, tmp_path: Path) -> None:
    int4 = replace(CONFIG, text=replace(CONFIG.text, weights="int4"))
    for name, config in (("float32", CONFIG), ("int4", int4)):
        retrofit(session, tmp_path / name, config, text=tmp_path / f"{name}-text")
    states = [
        OwnText.open(tmp_path / f"{name}-text", session.weights).take([1]).states
        for name in ("float32", "int4")
    ]
    assert not torch.equal(*states)


@pytest.mark.covers("gpt", "decode", feature="retrofit")
@pytest.mark.parametrize(("depths", "slots", "read"), [(3, 1, [0, 1, 2]), (2, 3, [0, 2]), (9, 1, [0, 1, 2])])
def test_depths_and_blocks(
    session: LoadedTextRun, text: OwnText, tmp_path: Path, depths: int, slots: int, read: list[int]
) -> None:
    out, text_folder = tmp_path / "draft", shutil.copytree(text.folder, tmp_path / "text")
    config = replace(CONFIG, depths=depths, slots=slots, training=DraftTraining(epochs=2))
    found = retrofit(session, out, config, text=text_folder)
    assert (found["depths"], found["slots"]) == (len(read), slots)
    assert len(found["agreement"]) == (5 if slots == 1 else slots)
    stage = open_retrofit(session, out).stage
    assert stage.depths is not None
    assert stage.depths.tolist() == read
    assert stage.slots == slots
    model = tg.load(session.run.folder)
    full = model.generate("stage loss ", tokens=12, depth="full")
    made = model.generate("stage loss ", tokens=12, depth="speculate:draft", draft=out)
    assert made == full
    again = retrofit(session, tmp_path / "more", CONFIG, text=text_folder, init=out)
    assert (again["depths"], again["slots"]) == (len(read), slots)
    with refused(ConfigError, setting="init"):
        retrofit(session, tmp_path / "other", config, text=text_folder, init=out)


def test_another_base_is_refused(
    session: LoadedTextRun, make_session: Callable[..., LoadedTextRun], tmp_path: Path
) -> None:
    out = tmp_path / "adapter"
    retrofit(session, out, replace(CONFIG, tokens=128), text=tmp_path / "text")
    assert (tmp_path / "text" / own_text.NAME).is_file(), "it was asked to be kept"
    other = make_session(2)
    with pytest.raises(RunError, match="has other weights; give the base that it was made for"):
        open_retrofit(other, out)
    with pytest.raises(ConfigError, match="has no draft stage; make one with: topograd retrofit"):
        open_retrofit(other)
    with refused(ConfigError, setting="tokens", given=3):
        RetrofitConfig(tokens=3)
