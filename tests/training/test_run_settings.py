"""λ by a schedule, an average of the weights that teaches, and batches in parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.search_config import SurgeryConfig
from topograd.runs.topology_config import TopologyConfig, parse_schedule
from topograd.search.surgery import surgery_run
from topograd.topology.plan import Plan
from topograd.training.optimizers import make_optimizers
from topograd.training.runs import RunTrainer, resume, start
from topograd.training.step_runner import StepRunner

TAUGHT = {"objective": "distillation", "teacher": "average", "teacher_decay": 0.9}
SCHEDULED = {"grad_scale_schedule": "0:0,0.5:0.5,0.75:1"}


@pytest.fixture
def short(config: TrainConfig) -> TrainConfig:
    return config.changed(steps=8, save_every=3, eval_every=0)


def losses(run: Run) -> list[list[float]]:
    return [r["loss"] for r in run.metrics() if r["kind"] == "train"]


def same(one: Run, two: Run) -> None:
    assert losses(one) == losses(two)
    names = [run.store.names()[-1] for run in (one, two)]
    assert names[0] == names[1]
    assert one.store.weights(names[0]) == two.store.weights(names[1])


KILLED = """
import os, signal, sys
from topograd.training.runs import resume

def on_step(step, *_):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

resume(sys.argv[1]).train(on_step=on_step)
"""


@pytest.mark.parametrize(
    "change",
    [SCHEDULED, TAUGHT, {"batch": 4, "batch_parts": 2}, SCHEDULED | TAUGHT],
    ids=["λ", "teacher", "parts", "both"],
)
def test_killed_and_stopped_by_a_signal_it_goes_on_bit_for_bit(
    change: dict[str, Any], short: TrainConfig, tmp_path: Path
) -> None:
    settings = short.changed(**change)
    whole = start(settings, tmp_path / "whole")
    whole.train()
    start(settings, tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], check=False)
    assert done.returncode == -signal.SIGKILL
    trainer = resume(tmp_path / "run")
    assert trainer.step == 3
    stopped = trainer.train(
        on_step=lambda step, *_: os.kill(os.getpid(), signal.SIGTERM) if step == 7 else None
    )
    assert (stopped["steps"], stopped["finished"]) == (7, False)
    assert resume(tmp_path / "run").train()["finished"]
    same(Run.open(tmp_path / "run"), whole.task.run)


def test_the_schedule_gives_the_edges_their_value(short: TrainConfig, tmp_path: Path) -> None:
    task = start(short.changed(steps=8, **SCHEDULED), tmp_path / "run").task
    found = [[lam for _, lam in task.current_plan(step).stages[1].inputs] for step in range(8)]
    assert found == [[0.0]] * 4 + [[0.5]] * 2 + [[1.0]] * 2
    assert task.current_plan(0).stages[0].inputs == task.plan.stages[0].inputs, "the embedding's stays"


def test_a_schedule_of_one_value_is_that_value(short: TrainConfig, tmp_path: Path) -> None:
    runs = []
    changes: list[dict[str, Any]] = [{"grad_scale": 1.0}, {"grad_scale_schedule": "0:1"}]
    for number, change in enumerate(changes):
        runs.append(start(short.changed(**change), tmp_path / str(number)))
        runs[-1].train()
    assert losses(runs[0].task.run) == losses(runs[1].task.run)


@pytest.mark.parametrize(
    "text", ["", "0", "0:2", "0.1:0", "0:0,0:1", "0:0,1:1", "0:0,x:1", "0:nan", "0:0,0.5"]
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with refused(ConfigError, setting="grad_scale_schedule"):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ({"partition": "2,2", "grad_scale": 1.0, **SCHEDULED}, "grad_scale"),
        (
            {"graph": "soft", "grad_scales": (0.5,), **SCHEDULED},
            "grad_scale_schedule",
        ),
        ({"partition": "2,2", "interface": "S=8,r=8", **SCHEDULED}, "grad_scale_schedule"),
        ({"partition": "2,2", "teacher_decay": 0.5}, "teacher_decay"),
        ({"partition": "2,2", "teacher": "average", "teacher_decay": 1.0}, "teacher_decay"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(table: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        TopologyConfig(**table)


@pytest.mark.parametrize(
    ("change", "setting"),
    [(SCHEDULED, "grad_scale_schedule"), (TAUGHT | {"prediction": "last"}, "teacher")],
)
def test_a_search_refuses_them(
    change: dict[str, Any], setting: str, short: TrainConfig, tmp_path: Path
) -> None:
    with refused(ConfigError, setting=setting):
        start(surgery_run(short.changed(**change), SurgeryConfig(every=4, min_depth=1)), tmp_path / "run")


def test_the_teacher_is_the_average_of_the_weights(short: TrainConfig, tmp_path: Path) -> None:
    trainer = start(short.changed(**TAUGHT), tmp_path / "run")
    name, expected = "layers.0.mlp.up.weight", list[Tensor]()

    def on_step(step: int, *_: object) -> None:
        now = trainer.task.stack.get_parameter(name).detach()
        expected.append(expected[-1].lerp(now, 1 - 0.9))

    expected.append(trainer.task.stack.get_parameter(name).detach().clone())
    trainer.train(on_step=on_step)
    average = trainer.task.average
    assert average is not None
    assert torch.equal(average.averaged.get_parameter(name), expected[-1])
    assert not torch.equal(expected[0], expected[-1])
    again = resume(tmp_path / "run")
    again.task.prepare(8, None)
    assert again.task.average is not None
    for one, two in zip(average.averaged.parameters(), again.task.average.averaged.parameters(), strict=True):
        assert torch.equal(one, two)


def gradients(
    trainer: RunTrainer, parts: int, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    stack = trainer.task.stack.double()
    stack.zero_grad()
    loop = StepRunner(stack, make_optimizers(stack, trainer.task.config.optimizer), parts=parts)
    found = loop._gradients(Plan.of(trainer.task.plan.topology, len(stack.layers)), [batch, batch], 2)
    return found, {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("change", [{}, {"objective": "residual", "grad_scale": 0.5}])
def test_parts_of_a_batch_add_up_to_it(change: dict[str, Any], short: TrainConfig, tmp_path: Path) -> None:
    """In float64, where rows have targets of different number too."""
    trainer = start(short.changed(batch=4, **change), tmp_path / "run")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.task.stack.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    inputs = torch.randint(257, (4, 16), generator=generator)
    targets = torch.randint(257, (4, 16), generator=generator)
    targets[1, 3:] = -100
    (whole, expected), *others = (gradients(trainer, parts, (inputs, targets)) for parts in (1, 2, 4))
    for found, gradient in others:
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)
        assert gradient.keys() == expected.keys()
        for name, tensor in gradient.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-14)


def test_parts_that_cannot_add_up_are_refused(
    short: TrainConfig, image_config: TrainConfig, tmp_path: Path
) -> None:
    with refused(ConfigError, setting="batch_parts", given=3):
        replace(short, batch=4, batch_parts=3)
    with refused(ConfigError, setting="batch_parts", given=2):
        short.changed(batch=4, batch_parts=2, loss_every=(2, 1))
    with refused(ConfigError, setting="batch_parts", given=2):
        start(short.changed(batch=4, batch_parts=2, objective="autoencoder"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    network = image_config.model.changed(network="vgg", widths=(4, 4))
    batchnorm = image_config.changed(model=network, partition="L", batch_parts=2)
    with refused(ConfigError, setting="batch_parts", given=2):
        start(batchnorm, tmp_path / "run")


def test_kept_states_and_teachers_logits_are_cut_with_their_rows(
    short: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    settings = short.changed(
        batch=4,
        init=str(straight.folder),
        tune=replace(short.tune, frozen=True),
        objective="distillation",
        teacher=str(straight.folder),
        teacher_top=8,
        partition="1,1",
    )
    runs = []
    for parts in (1, 2):
        runs.append(start(replace(settings, batch_parts=parts), tmp_path / str(parts)))
        runs[-1].train()
    for one, two in zip(*(losses(trainer.task.run) for trainer in runs), strict=True):
        assert one == pytest.approx(two, rel=1e-4, nan_ok=True)
