"""A run on pictures is a run: it resumes bit for bit, and refuses what is not its own."""

from dataclasses import replace
from pathlib import Path

import torch

from raising import refused
from topograd.errors import CheckpointError, ConfigError, RunError
from topograd.nn.images.config import ImageConfig
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import heldout_images, open_run, open_session, read_settings
from topograd.topology.plan import Plan
from topograd.training.image_evaluation import evaluate_images
from topograd.training.runs import resume, start


def losses(run: Run) -> list[list[float]]:
    return [record["loss"] for record in run.metrics() if record["kind"] == "train"]


def test_a_stopped_run_goes_on_bit_for_bit(image_config: TrainConfig, image_run: Run, tmp_path: Path) -> None:
    trainer = start(image_config, tmp_path / "run")
    trainer.train(stop_after=7)
    again = resume(tmp_path / "run")
    again.train()
    assert losses(again.task.run) == losses(image_run)
    ours, theirs = open_run(tmp_path / "run"), open_run(image_run.folder)
    for name, value in ours.stack.state_dict().items():
        assert torch.equal(value, theirs.stack.state_dict()[name])


def test_settings_are_written_without_those_of_text(image_config: TrainConfig, image_run: Run) -> None:
    written = image_run.read_config()
    assert not {"tokenizer", "eval_bytes"} & written.keys()
    assert written["model"]["kind"] == "mlp"
    config = read_settings(image_run)
    assert isinstance(config.model, ImageConfig)
    assert (config.model.shape, config.model.classes) == ((1, 8, 8), 3)
    assert TrainConfig.from_dict(config.as_dict() | {"search": {"kind": "none"}}).model == config.model


def test_it_learns(image_run: Run) -> None:
    results = image_run.read_results()
    assert results is not None
    assert len(results["accuracy"]["prefix"]) == 3
    assert results["accuracy"]["prediction"] > 0.6


def test_what_needs_text_refuses_it(image_run: Run) -> None:
    with refused(RunError, setting="folder"):
        open_session(image_run.folder)


def test_what_needs_pictures_refuses_text(straight: Run) -> None:
    with refused(RunError, setting="model.kind", given="gpt"):
        heldout_images(open_run(straight.folder))


def test_a_run_begins_with_another_and_follows_a_teacher(
    image_config: TrainConfig, image_run: Run, tmp_path: Path, straight: Run
) -> None:
    settings = image_config.changed(objective="distillation", teacher=str(image_run.folder))
    trainer = start(replace(settings, init=str(image_run.folder), steps=2), tmp_path / "pupil")
    base = open_run(image_run.folder).stack.state_dict()
    assert all(torch.equal(value, base[name]) for name, value in trainer.task.stack.state_dict().items())
    assert trainer.train()["steps"] == 2
    with refused(ConfigError, setting="teacher"):
        start(image_config.changed(objective="distillation", teacher=str(straight.folder)), tmp_path / "no")


def test_other_pictures_end_a_run(image_config: TrainConfig, image_run: Run, idx_folder: Path) -> None:
    trainer = resume(image_run.folder)
    trainer.task.data = replace(trainer.task.data, digest="other")
    with refused(CheckpointError, setting="data"):
        trainer.load(image_run.store.names()[-1])


def test_settings_that_do_not_go_with_pictures_are_refused(image_config: TrainConfig) -> None:
    with refused(ConfigError, setting="data"):
        replace(image_config, data=None)
    with refused(ConfigError, setting="interface"):
        image_config.changed(interface="S=2,r=4")


def test_a_forest_of_networks_is_a_run(image_config: TrainConfig, tmp_path: Path) -> None:
    settings = image_config.changed(graph="forest", partition="L", branches=("1,1,1", "3"))
    trainer = start(replace(settings, steps=2), tmp_path / "forest")
    results = trainer.train()
    assert len(results["accuracy"]["prefix"]) == 4
    opened = open_run(tmp_path / "forest")
    reading = evaluate_images(opened.stack, Plan.of(opened.plan, 6), heldout_images(opened))
    assert reading.accuracy.prediction == results["accuracy"]["prediction"]
