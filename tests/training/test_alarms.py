"""`train --on-alarm`: a run that is disturbed at one step, what it does, and that it can be resumed."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError, DivergenceError
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.training.runs import RunTrainer, resume, start
from topograd.training.trainer import Reading

STEPS, BAD = 24, 18


class Crash(Exception):
    """Stands for a kill between two steps."""


def settings(config: TrainConfig, action: Any, **more: Any) -> TrainConfig:
    return replace(config, on_alarm=action, steps=STEPS, save_every=4, eval_every=0, save_seconds=0, **more)


def disturbed(trainer: RunTrainer, factor: float = 1e3) -> RunTrainer:
    """The gradient of one step is a thousand times too large, as of a bad batch."""
    loop = trainer.task.loop
    gradients = loop.gradients

    def larger(plan: Any, inputs: Tensor, targets: Tensor, scale: float, *more: Any) -> Tensor:
        return gradients(plan, inputs, targets, scale * (factor if loop.late.step == BAD - 1 else 1), *more)

    loop.gradients = larger  # type: ignore[method-assign, assignment]
    return trainer


def of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if record["kind"] == kind]


def losses(run: Run) -> list[Any]:
    return [(record["step"], record["loss"]) for record in of_kind(run, "train")]


def test_a_calm_run_is_the_same_bit_for_bit(config: TrainConfig, tmp_path: Path) -> None:
    runs = [start(settings(config, action), tmp_path / action) for action in ("none", "rollback")]
    for trainer in runs:
        trainer.train()
    assert losses(runs[0].task.run) == losses(runs[1].task.run)
    assert of_kind(runs[1].task.run, "alarm") == []


@pytest.mark.parametrize("action", ["report", "skip", "lower"])
def test_an_alarm_is_written_down_with_its_batch(action: str, config: TrainConfig, tmp_path: Path) -> None:
    trainer = disturbed(start(settings(config, action), tmp_path / "run"))
    before: dict[int, Tensor] = {}

    def see(step: int, steps: int, found: list[float], reading: Reading | None) -> None:
        before[step] = torch.cat([p.detach().flatten() for p in trainer.task.stack.parameters()])

    trainer.train(on_step=see)
    (record,) = of_kind(trainer.task.run, "alarm")
    assert (record["step"], record["action"]) == (BAD, action)
    assert record["signals"]["gradient_norm"]["value"] > 100 * record["signals"]["gradient_norm"]["usual"]
    assert record["batch"] is not None
    assert torch.equal(before[BAD], before[BAD - 1]) == (action == "skip")


def test_a_rollback_is_bit_exact_and_resumable(config: TrainConfig, tmp_path: Path) -> None:
    trainer = disturbed(start(settings(config, "rollback", keep=9), tmp_path / "run"))
    held: dict[int, Any] = {}

    def see(step: int, steps: int, found: list[float], reading: Reading | None) -> None:
        states = {name: one.state_dict()["state"] for name, one in trainer.task.optimizers.items()}
        held[step] = copy.deepcopy((trainer.task.model.state_dict(), states))

    trainer.train(on_step=see)
    run = trainer.task.run
    (record,) = of_kind(run, "alarm")
    assert record["restored"] == 16
    torch.testing.assert_close(held[BAD], held[16], rtol=0, atol=0)
    again = disturbed(start(settings(config, "rollback", keep=9), tmp_path / "again"))

    def crash(step: int, steps: int, found: list[float], reading: Reading | None) -> None:
        if step == 22:
            raise Crash

    with pytest.raises(Crash):
        again.train(on_step=crash)
    second = disturbed(resume(tmp_path / "again"))
    second.train()
    assert losses(second.task.run) == losses(run)
    assert of_kind(second.task.run, "alarm") == of_kind(run, "alarm")


def test_numbers_that_are_not_finite(config: TrainConfig, tmp_path: Path) -> None:
    trainer = disturbed(start(settings(config, "skip"), tmp_path / "run"), float("inf"))
    assert trainer.train()["finished"]
    assert [record["step"] for record in of_kind(trainer.task.run, "alarm")] == [BAD]
    with pytest.raises(DivergenceError):
        disturbed(start(settings(config, "report"), tmp_path / "other"), float("inf")).train()


def test_a_rollback_needs_checkpoints(config: TrainConfig) -> None:
    with refused(ConfigError, setting="on_alarm"):
        replace(config, on_alarm="rollback", save_every=0)
