"""Kinds of models beside the GPT: stopped and resumed, a run has the weights of one without a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

import topograd as tg
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun


def check(config: tg.TrainConfig, folder: Path) -> None:
    config = config.changed(steps=4, batch=2, eval_every=0, eval_bytes=300, save_every=0)
    tg.start(config, folder / "whole").train()
    tg.start(config, folder / "parts").train(stop_after=2)
    middle = Run.open(folder / "parts").store.weights("step-00000002")
    tg.resume(folder / "parts").train()
    ends = [Run.open(folder / name).store.weights("step-00000004") for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    assert ends[0] != middle


@pytest.mark.covers("mamba", "train", "resume")
@pytest.mark.parametrize("architecture", ["mamba2", "mamba3", "hybrid"])
def test_mamba(architecture: str, config: tg.TrainConfig, tmp_path: Path) -> None:
    check(config.changed(model=config.gpt.changed(architecture=architecture, ssm_state=8)), tmp_path)


def tuned(base: LoadedTextRun, corpus: Path) -> tg.TrainConfig:
    return base.config.changed(init=str(base.run.folder), data=str(corpus), partition="2,2")


@pytest.mark.covers("imported", "train", "resume")
def test_a_native_family(imported: LoadedTextRun, corpus: Path, tmp_path: Path) -> None:
    check(tuned(imported, corpus), tmp_path)


@pytest.mark.covers("adapted", "train", "resume")
def test_a_model_that_transformers_runs(adapted: LoadedTextRun, corpus: Path, tmp_path: Path) -> None:
    check(tuned(adapted, corpus), tmp_path)
