"""The geometry that a training logs, which changes nothing of the training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.phase import weight_norm
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.training.monitors import GeometryLog
from topograd.training.runs import start


def of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if record["kind"] == kind]


def test_it_logs_and_the_training_is_the_same_bit_for_bit(
    straight: Run, config: TrainConfig, tmp_path: Path
) -> None:
    trainer = start(config, tmp_path / "run")
    trainer.train(on_step=GeometryLog(trainer.task, every=2))
    assert [r["loss"] for r in of_kind(trainer.task.run, "train")] == [
        r["loss"] for r in of_kind(straight, "train")
    ]
    records = of_kind(trainer.task.run, "geometry")
    assert [record["step"] for record in records] == list(range(2, config.steps + 1, 2))
    assert all(len(record["sigma"]) == len(trainer.task.stack.layers) + 1 for record in records)
    assert all(sigma > 0 for record in records for sigma in record["sigma"])
    assert records[-1]["weight_norm"] == weight_norm(trainer.task.stack)
    assert [record["phase"] for record in records[:4]] == ["undecided"] * 4, "too few to say"
    assert not any(module._forward_hooks for module in trainer.task.stack.modules())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_growing_model_accumulates(resumed: bool, config: TrainConfig, tmp_path: Path) -> None:
    """Also where a run is resumed before every step: then the earlier records are in its log alone."""
    trainer = start(config, tmp_path / "run")
    log = GeometryLog(trainer.task, every=1)
    for step in range(1, 8):
        with torch.no_grad():
            for parameter in trainer.task.stack.layers.parameters():
                parameter.mul_(1.3).add_(0.01 * torch.randn_like(parameter))
        log = GeometryLog(trainer.task, every=1) if resumed else log
        log(step, 7, [0.0], None)
    assert of_kind(trainer.task.run, "geometry")[-1]["phase"] == "accumulation"


def test_the_probe_has_no_padding_and_is_spaced_over_the_text(config: TrainConfig, tmp_path: Path) -> None:
    task = start(config, tmp_path / "run").task
    text = task.text
    padded = (text.targets == -100).any(1)
    assert padded.any(), "so that this can fail"
    assert not padded.all()
    whole = [row.tolist() for row in text.inputs[~padded]]
    probe = GeometryLog(task, every=1)._probe.tolist()
    places = [whole.index(row) for row in probe]
    assert places[0] == 0
    assert places[-1] >= len(whole) - 1 - len(whole) // len(probe)


def test_a_model_that_does_not_change_reads_the_same_whatever_it_is_trained_on(
    config: TrainConfig, tmp_path: Path
) -> None:
    """The rank was estimated at each reading, from other rows: r and σ of a fixed model wandered."""
    trainer = start(config, tmp_path / "run")
    log = GeometryLog(trainer.task, every=1)
    for step in range(1, 4):
        log(step, 3, [0.0], None)
    again = GeometryLog(trainer.task, every=1)
    again(4, 4, [0.0], None)
    first, *others = of_kind(trainer.task.run, "geometry")
    assert len(others) == 3
    for record in others:
        assert (record["rank"], record["sigma"]) == (first["rank"], first["sigma"])


def test_an_input_that_loses_its_rank_has_no_reading(config: TrainConfig, tmp_path: Path) -> None:
    trainer = start(config, tmp_path / "run")
    log = GeometryLog(trainer.task, every=1)
    log(1, 2, [0.0], None)
    with torch.no_grad():
        for parameter in trainer.task.stack.parameters():
            parameter.copy_(parameter.mean().expand_as(parameter))
    log(2, 2, [0.0], None)
    assert of_kind(trainer.task.run, "geometry")[-1]["sigma"] is None


def test_how_often_is_checked(config: TrainConfig, tmp_path: Path) -> None:
    with refused(GeometryError, setting="every", given=0):
        GeometryLog(start(config, tmp_path / "run").task, every=0)
