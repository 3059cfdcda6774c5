"""Flips, cuts and swaps of every file of every kind of folder: refused in one line, or without effect."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from damages import damage, digest, faults, files_of, outcome
from topograd.convert.importing import import_model
from topograd.decode.model import Model
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.attach import new_specialist, open_specialist
from topograd.specialists.finetune import FineTuning
from topograd.specialists.model import SpecialistPool
from topograd.specialists.settings import FineTune
from topograd.training.runs import resume, start

Count = Callable[[str, str], None]
STOPPED = 6


def loaded(folder: Path) -> Any:
    """What a run is for somebody who decodes it: settings, weights, text."""
    session = open_session(folder)
    model = Model(session, "torch")
    text = str(model.generate([5, 6], 4, depth="speculate"))
    return session.config, session.step, digest(dict(session.stack.state_dict())), text


def resumed(folder: Path) -> Any:
    """What a stopped run becomes: the losses from there on, and the weights at its end.

    Earlier records may be missing: an emptied log counts as given up on purpose.
    """
    trainer = resume(folder)
    trainer.train()
    records = [record for record in Run.open(folder).metrics() if record["kind"] == "train"]
    losses = {record["step"]: record["loss"] for record in records if record["step"] > STOPPED}
    return losses, digest(dict(trainer.task.stack.state_dict()))


@pytest.fixture(scope="module")
def stopped(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in the middle, with a checkpoint there."""
    trainer = start(config, tmp_path_factory.mktemp("stopped") / "run")
    trainer.train(stop_after=STOPPED)
    return trainer.task.run.folder


def test_a_run_that_is_loaded(straight: Run, count: Count, times: int, tmp_path: Path) -> None:
    damage(straight.folder, loaded, "run", count, 6 * times, tmp_path)


def test_a_run_that_is_resumed(stopped: Path, count: Count, times: int, tmp_path: Path) -> None:
    damage(stopped, resumed, "stopped run", count, 1 * times, tmp_path)


@pytest.mark.parametrize("copied", [False, True])
def test_an_imported_model(
    source: Callable[[str], tuple[Path, Any]], copied: bool, count: Count, times: int, tmp_path: Path
) -> None:
    import_model(source("llama")[0], tmp_path / "run", partition="2,2", copy=copied)
    damage(tmp_path / "run", loaded, "imported run", count, 4 * times, tmp_path)


def test_what_is_imported(
    source: Callable[[str], tuple[Path, Any]], count: Count, times: int, tmp_path: Path
) -> None:
    """A flip of one bit of a weight is another model, and nothing says what it should have been."""
    folder = source("llama")[0]

    def imported(copy: Path) -> str:
        shutil.rmtree(tmp_path / "made", ignore_errors=True)
        import_model(copy, tmp_path / "made", partition="2,2", copy=True)
        return digest(dict(open_session(tmp_path / "made").stack.state_dict()))

    chance, copy = random.Random(0), tmp_path / "source"
    expected = imported(folder)
    for file in files_of(folder):
        for name, harm in faults((folder / file).read_bytes(), chance, 4 * times):
            shutil.rmtree(copy, ignore_errors=True)
            harm(Path(shutil.copytree(folder, copy)) / file)
            wanted = expected if name != "flip" else ANY
            ending = outcome(lambda: imported(copy), wanted)
            count(f"source, {name}", "read" if (name, ending) == ("flip", "unchanged") else ending)


@pytest.fixture(scope="module")
def specialist(gpt: LoadedTextRun, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A specialist whose training was stopped in the middle."""
    folder = tmp_path_factory.mktemp("specialist") / "s"
    new_specialist(folder, gpt, layers=1, head_rank=4)
    settings = FineTune(data=str(chats), steps=6, batch=3, context=16, save_every=2)
    FineTuning.start(folder, settings).train(stop_after=4)
    return folder


def test_a_specialist_that_is_used(
    specialist: Path, gpt: LoadedTextRun, count: Count, times: int, tmp_path: Path
) -> None:
    def used(folder: Path) -> Any:
        pool = SpecialistPool.open(gpt.run.folder, {"s": open_specialist(folder)})
        return str(pool.model({"s": 1.0}).generate([5, 6], 4))

    damage(specialist, used, "specialist", count, 2 * times, tmp_path)


def test_a_specialist_that_is_trained_further(
    specialist: Path, count: Count, times: int, tmp_path: Path
) -> None:
    def finished(folder: Path) -> Any:
        result = FineTuning.resume(folder).train()
        return result["bpb"], [row["bpb"] for row in result["preservation"] if row["step"] > 4]

    damage(specialist, finished, "stopped specialist", count, 1 * times, tmp_path)
