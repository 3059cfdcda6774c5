"""Kinds of models beside the GPT, trained over two ranks: the losses of one process."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from topograd.files import dump_toml
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun
from topograd.training.runs import start

OWN = Path(__file__).parents[2] / "examples" / "own_stack.toml"


def losses(folder: Path) -> list[float]:
    return [loss for r in Run.open(folder).metrics() if r["kind"] == "train" for loss in r["loss"]]


def compare(config: TrainConfig, folder: Path, launch: Any) -> None:
    """Train in this process and on two ranks; what ranks share is summed in another order."""
    start(config, folder / "one").train()
    file = folder / "config.toml"
    file.write_text(dump_toml(config.as_dict()))
    parallel = ["--parallel", "stages=2,timeout=300", "--json"]
    job = launch("cli", 2, argv=["train", "--config", str(file), "--out", str(folder / "two"), *parallel])
    assert job.results() == [0, 0], job.said()
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-4)
    assert len(losses(folder / "two")) == 2 * config.steps


def tuned(base: LoadedTextRun, corpus: Path) -> TrainConfig:
    config = base.config.changed(init=str(base.run.folder), data=str(corpus), partition="2,2")
    return config.changed(steps=3, batch=2, eval_every=0, eval_bytes=300)


@pytest.mark.covers("mamba", "parallel")
@pytest.mark.parametrize("architecture", ["mamba2", "hybrid"])
def test_mamba(architecture: str, config: TrainConfig, launch: Any, tmp_path: Path) -> None:
    model = config.gpt.changed(architecture=architecture, ssm_state=8)
    compare(config.changed(model=model, partition="1,1", steps=3, eval_every=0), tmp_path, launch)


@pytest.mark.covers("imported", "parallel")
def test_a_family_that_was_imported(
    imported: LoadedTextRun, corpus: Path, launch: Any, tmp_path: Path
) -> None:
    compare(tuned(imported, corpus), tmp_path, launch)


@pytest.mark.covers("adapted", "parallel")
def test_a_model_that_transformers_runs(
    adapted: LoadedTextRun, corpus: Path, launch: Any, tmp_path: Path
) -> None:
    compare(tuned(adapted, corpus), tmp_path, launch)


@pytest.mark.covers("images", "parallel")
def test_images(image_config: TrainConfig, launch: Any, tmp_path: Path) -> None:
    compare(image_config.changed(steps=3, eval_every=0, partition="2,1"), tmp_path, launch)


@pytest.mark.covers("own", "parallel")
def test_a_stack_of_ones_own(corpus: Path, launch: Any, tmp_path: Path) -> None:
    config = TrainConfig.from_dict(tomllib.loads(OWN.read_text()) | {"version": 3})
    small = config.changed(data=str(corpus), steps=3, batch=2, eval_bytes=300)
    compare(small, tmp_path, launch)
