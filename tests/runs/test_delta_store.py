"""Runs that stand on another: small, exact where nothing of the base learns, and refused without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import topograd as tg
from raising import refused
from topograd.errors import CheckpointError, RunError
from topograd.exec.forward import Predictor, stage_logits
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.runs.tune_config import PARTIAL
from topograd.training.runs import resume, start

TOKENS = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
Tune = Callable[..., Path]


@pytest.fixture
def base(straight: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(straight.folder, tmp_path / "base"))


@pytest.fixture
def tune(config: TrainConfig, base: Path, tmp_path: Path) -> Tune:
    def make(name: str = "tuned", stop_after: int | None = None, **changes: Any) -> Path:
        settings = {n: changes.pop(n) for n in PARTIAL if n in changes}
        asked = replace(config, init=str(base), steps=6, tune=replace(config.tune, **settings))
        start(asked.changed(**changes), tmp_path / name).train(stop_after)
        return tmp_path / name

    return make


def logits(folder: Path) -> torch.Tensor:
    session = open_session(folder)
    with torch.no_grad():
        return Predictor(session.stack, session.plan)(TOKENS)


@pytest.mark.covers("gpt", "train", feature="lora")
def test_a_lora_run_is_small_and_its_logits_are_the_trained_ones(tune: Tune, base: Path) -> None:
    tuned = tune(lora_rank=2)
    (checkpoint,) = (tuned / "checkpoints").glob("step-00000006")
    kept = load_file(checkpoint / "model.safetensors")
    assert {name.rpartition(".")[2] for name in kept} == {"lora_a", "lora_b"}
    assert not torch.equal(logits(tuned), logits(base))
    trainer = resume(tuned)  # unmerged, as it was trained
    with torch.no_grad():
        unmerged = Predictor(trainer.task.stack, trainer.task.plan)(TOKENS)
    torch.testing.assert_close(logits(tuned), unmerged, rtol=1e-4, atol=1e-4)
    session = open_session(tuned)
    assert not any(name.endswith("lora_a") for name in session.stack.state_dict())
    assert isinstance(tg.load(tuned).generate("stage", tokens=4), str)


@pytest.mark.covers("gpt", "train", feature="frozen")
def test_a_frozen_base_is_bit_identical_and_its_exits_learn(tune: Tune, base: Path) -> None:
    tuned = tune(frozen=True)
    assert torch.equal(logits(tuned), logits(base))
    ours, theirs = open_session(tuned), open_session(base)
    with torch.no_grad():
        exits = [stage_logits(s.stack, s.plan, 0, TOKENS) for s in (ours, theirs)]
    assert not torch.equal(*exits)
    kept = load_file(next((tuned / "checkpoints").glob("step-00000006")) / "model.safetensors")
    assert all(name.startswith("head.deltas.0.") for name in kept)


def test_only_later_layers_learn(tune: Tune, base: Path) -> None:
    tuned = tune(first_layer=1)
    ours, theirs = (open_session(folder).stack.state_dict() for folder in (tuned, base))
    changed = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert changed
    assert all(name.startswith("layers.1.") for name in changed)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_stage_goes_on_alone(tune: Tune, base: Path, stage: int) -> None:
    tuned = tune(only_stage=stage)
    ours, theirs = (open_session(folder).stack.state_dict() for folder in (tuned, base))
    assert ours.keys() == theirs.keys()
    changed = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert changed
    assert all(name.startswith(f"layers.{stage - 1}.") for name in changed)
    assert len(open_session(tuned).plan.predicting()) == 2, "the others predict as before"


def test_a_stage_with_a_head_of_its_own_goes_on_alone(
    config: TrainConfig, tune: Tune, base: Path, tmp_path: Path
) -> None:
    heads = {"heads": "own", "bus": "detached"}
    shutil.rmtree(base)
    start(config.changed(**heads), base).train(2)
    tuned = tune(only_stage=2, **heads)
    ours, theirs = (open_session(folder).stack.state_dict() for folder in (tuned, base))
    assert ours.keys() == theirs.keys()
    changed = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert {name[:13] for name in changed if name.startswith("head.")} == {"head.deltas.1"}
    assert all(name.startswith(("layers.1.", "head.deltas.1.")) for name in changed)


@pytest.mark.covers("gpt", "resume", feature="lora")
@pytest.mark.covers("gpt", "resume", feature="frozen")
@pytest.mark.parametrize(
    "how", [{"lora_rank": 2}, {"frozen": True}, {"first_layer": 1, "lora_rank": 2}, {"only_stage": 1}]
)
def test_stopped_and_resumed_it_is_the_same(tune: Tune, how: dict[str, Any]) -> None:
    whole, cut = tune("whole", **how), tune("cut", stop_after=3, **how)
    resume(cut).train()
    files = [next((run / "checkpoints").glob("step-00000006")) / "model.safetensors" for run in (whole, cut)]
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (cut / "hidden-states").exists()


def test_killed_before_its_first_checkpoint_it_begins_again(
    config: TrainConfig, base: Path, tmp_path: Path
) -> None:
    asked = replace(config, init=str(base), steps=4, tune=replace(config.tune, lora_rank=2))
    start(asked, tmp_path / "whole").train()
    start(asked, tmp_path / "killed")
    resume(tmp_path / "killed").train()
    assert torch.equal(logits(tmp_path / "killed"), logits(tmp_path / "whole"))


def test_another_or_missing_base_is_named(tune: Tune, base: Path, tmp_path: Path) -> None:
    tuned = tune(lora_rank=2)
    resume(base)  # opens: the base itself is well
    moved = base.rename(tmp_path / "elsewhere")
    with refused(CheckpointError, setting="base"):
        open_session(tuned)
    moved.rename(base)
    for name in sorted((base / "checkpoints").iterdir())[-1:]:
        shutil.rmtree(name)
    with refused(CheckpointError, setting="base"):
        open_session(tuned)


def test_a_changed_base_json_is_refused(tune: Tune) -> None:
    tuned = tune(lora_rank=2)
    file = tuned / "base.json"
    file.write_text(file.read_text().replace('"folder"', '"Folder"'))
    with pytest.raises(RunError, match=r"base\.json"):
        open_session(tuned)


def test_a_run_stands_on_a_run_that_stands_on_another(
    tune: Tune, config: TrainConfig, tmp_path: Path
) -> None:
    first = tune("first", lora_rank=2)
    asked = replace(config, init=str(first), steps=2, tune=replace(config.tune, frozen=True))
    start(asked, tmp_path / "second").train()
    assert torch.equal(logits(tmp_path / "second"), logits(first))
