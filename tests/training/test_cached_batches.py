"""Training from kept states is training: the same losses to rounding, and only what is needed is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.exec.objectives import teacher_logits
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import build_stack, open_session
from topograd.training.cached_batches import LOGITS, cached_layers
from topograd.training.runs import start


def asked(config: TrainConfig, base: Run, **tune: Any) -> TrainConfig:
    return replace(config, init=str(base.folder), steps=5, tune=replace(config.tune, **tune))


@pytest.mark.parametrize("how", [{"frozen": True}, {"first_layer": 1}, {"first_layer": 1, "lora_rank": 2}])
def test_losses_are_those_of_computing_the_trunk_each_time(
    config: TrainConfig, straight: Run, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Rows come in another order with kept states, so the loader's first epoch is one batch of all rows."""
    settings = replace(asked(config, straight, **how), steps=1, batch=10)
    seen: list[int] = []
    one = start(settings, tmp_path / "kept").train(on_rows=lambda done, _: seen.append(done))
    other = start(
        replace(settings, tune=replace(settings.tune, states="none")), tmp_path / "computed"
    ).train()
    assert seen[-1] == 10
    # The first step's losses are of the base's weights on the first ten rows, in whichever order.
    losses = [Run.open(run["run"]).metrics()[0]["loss"] for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, nan_ok=True)  # nan is of the frozen stage
    assert Run.open(one["run"]).metrics()[0]["grad_norm"] == pytest.approx(
        Run.open(other["run"]).metrics()[0]["grad_norm"], rel=1e-4
    )


def test_what_is_kept(config: TrainConfig, straight: Run) -> None:
    def layers(settings: TrainConfig) -> tuple[int, ...]:
        return cached_layers(settings, build_stack(settings)[1])

    assert layers(asked(config, straight, frozen=True)) == (1,)
    taught = asked(config, straight, frozen=True).changed(objective="distillation", teacher="self")
    assert layers(taught) == (1, 2)
    assert layers(asked(config, straight, first_layer=1)) == (1,)
    assert layers(asked(config, straight, only_stage=2)) == (1,)
    assert layers(asked(config, straight, only_stage=1)) == ()
    assert layers(asked(config, straight, lora_rank=2)) == ()
    assert layers(asked(config, straight, frozen=True, states="none")) == ()
    bused = asked(config, straight, first_layer=1).changed(source="embedding")
    assert layers(bused) == ()


def test_distilled_from_its_own_last_stage(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    """Exits of a frozen model come nearer to its last stage, with dropout and LoRA it learns too."""
    taught: dict[str, Any] = {"objective": "distillation", "teacher": "self", "teacher_mix": 1.0}
    settings = replace(asked(config, straight, frozen=True, exit_rank=8), steps=30).changed(**taught)
    start(settings, tmp_path / "exits").train()
    losses = [r["loss"][0] for r in Run.open(tmp_path / "exits").metrics() if r["kind"] == "train"]
    assert sum(losses[-5:]) < sum(losses[:5])
    lora = asked(config, straight, lora_rank=2, layer_dropout=0.3).changed(
        grad_scale=1.0, depth_weights=0.5, **taught
    )
    assert start(lora, tmp_path / "lora").train()["finished"]


def test_a_teachers_logits_are_computed_once(
    config: TrainConfig, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of the vocabulary kept, a step learns what it learns from the teacher itself."""
    vocab = open_session(straight.folder).config.model.vocab
    table = {"partition": "1,1", "objective": "distillation", "teacher": str(straight.folder)}
    chosen = config.changed(steps=4, save_every=2, eval_every=0, teacher_top=vocab, **table)
    trainer = start(chosen, tmp_path / "student")
    trainer.task.prepare(0, None)
    assert (tmp_path / "student" / LOGITS / "cache.json").is_file()
    assert trainer.task.states is not None
    batch = next(trainer.task.states)
    assert batch.teacher is not None
    assert trainer.task.teacher is not None
    running = teacher_logits(trainer.task.teacher.predictor, batch.inputs)
    everything = slice(0, batch.inputs.numel())
    torch.testing.assert_close(batch.teacher(everything), running(everything))

    trainer.task.states.seek({"epoch": 0, "row": 0})
    monkeypatch.setattr(trainer.task.teacher.predictor, "forward", lambda *_: pytest.fail("it ran again"))
    assert trainer.train()["finished"]
    assert not (tmp_path / "student" / LOGITS).exists(), "what is done is forgotten"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"teacher_top": -1}, "teacher_top is -1; it must be at least 1, or 0 to run it"),
        ({"teacher_top": 4}, "no other run teaches; give its folder as teacher"),
        ({"teacher_top": 4, "teacher": "self", "objective": "distillation"}, "no other run teaches"),
    ],
)
def test_logits_without_another_teacher_are_refused(
    config: TrainConfig, given: dict[str, Any], words: str
) -> None:
    with refused(ConfigError, setting="teacher_top"):
        config.changed(**given)
