"""Kills before file operations of everything that trains: what is left resumes to the same weights.

A folder is copied before each operation on a file, which is what a kill at that moment leaves. A sample of
the copies is resumed to the end.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from calls import Call
from topograd.cli.main import INTERRUPTED
from topograd.convert.draft_training import DraftTraining
from topograd.convert.own_text import OwnTextConfig
from topograd.convert.retrofit import RetrofitConfig, retrofit
from topograd.errors import TopogradError
from topograd.runs.adapter import TENSORS, is_adapter
from topograd.runs.config import TrainConfig
from topograd.runs.search_config import SoftConfig
from topograd.runs.session import LoadedTextRun, open_session
from topograd.search.candidates import Space
from topograd.search.measured import as_runs
from topograd.search.pareto import explore
from topograd.search.settings import ParetoConfig
from topograd.search.soft import soft_run
from topograd.specialists.attach import new_specialist
from topograd.specialists.finetune import FineTuning
from topograd.specialists.router import RouterTask
from topograd.specialists.settings import FineTune
from topograd.training.runs import resume, start
from topograd.training.trainer import Schedule, StepRecord

Count = Callable[[str, str], None]
_CALLS = ("mkdir", "rename", "remove", "rmdir", "truncate", "link")
_EVENTS = {"open", "sqlite3.connect", *(f"os.{name}" for name in _CALLS)}
_listener: Callable[[], None] | None = None


def _hear(event: str, _: tuple[Any, ...]) -> None:
    if _listener is not None and event in _EVENTS:
        _listener()


sys.addaudithook(_hear)  # one cannot be removed; it does nothing without a listener


@contextmanager
def copies_before_every_operation(folder: Path, place: Path) -> Iterator[list[Path]]:
    """Copies of a folder before each operation on any file, alike ones once."""
    global _listener
    made: list[Path] = []
    last = ""

    def listener() -> None:
        global _listener
        nonlocal last
        _listener = None  # the copy's own operations do not count
        state = hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            state.update(str(path).encode())
            if path.is_file() and path.name != "lock":
                state.update(path.read_bytes())
        if state.hexdigest() != last and folder.exists():
            last = state.hexdigest()
            made.append(Path(shutil.copytree(folder, place / str(len(made)))))
        _listener = listener

    _listener = listener
    try:
        yield made
    finally:
        _listener = None


def survive(
    copies: list[Path], finish: Callable[[Path], Any], expected: Any, kind: str, count: Count, wanted: int
) -> None:
    """Resume a sample of the copies; only one without any checkpoint may say that there is nothing."""
    assert len(copies) > 10, "a training operates on files"
    chosen = sorted(random.Random(kind).sample(range(len(copies)), min(wanted, len(copies))))
    for index in chosen:
        copy = copies[index]
        if any(copy.rglob("checkpoints/step-*")):
            assert finish(copy) == expected, f"kill {index} of {len(copies)}"
            count(f"kill of {kind}", "resumed to the same weights")
            continue
        try:
            result = finish(copy)
        except TopogradError:
            count(f"kill of {kind}", "nothing was saved yet")
        else:
            assert result == expected, f"kill {index} of {len(copies)}"
            count(f"kill of {kind}", "begun again to the same weights")


def weights(folder: Path) -> bytes:
    return b"".join(t.numpy().tobytes() for t in open_session(folder).stack.state_dict().values())


@pytest.mark.parametrize("searched", [False, True])
def test_a_run(searched: bool, config: TrainConfig, count: Count, times: int, tmp_path: Path) -> None:
    """One of a fixed partition, and one that learns its boundaries and hardens them at its end."""
    config = replace(config, steps=6, save_every=2, eval_every=3)
    config = soft_run(config, SoftConfig(stages=2)) if searched else config
    with copies_before_every_operation(tmp_path / "run", tmp_path / "copies") as copies:
        start(config, tmp_path / "run").train()

    def finish(folder: Path) -> bytes:
        resume(folder).train()
        return weights(folder)

    kind = "a search by soft boundaries" if searched else "a run"
    survive(copies, finish, weights(tmp_path / "run"), kind, count, (10 if searched else 20) * times)


def test_a_pareto_search(config: TrainConfig, count: Count, times: int, tmp_path: Path) -> None:
    """A study belongs to its place: each copy is put back there. Every candidate of the space is trained."""
    pytest.importorskip("optuna")
    config = replace(config, steps=4, save_every=2, eval_every=0)
    study = tmp_path / "study"

    def searched() -> Any:
        settings = ParetoConfig(trials=2, rungs=(4,))
        train = as_runs(config, ["bpb"])
        found = explore(Space(2), {"bpb": "minimize"}, train, study, settings, base="x")
        return {tried.candidate.key: (tried.steps, tried.state, tried.values) for tried in found}

    with copies_before_every_operation(study, tmp_path / "copies") as copies:
        expected = searched()
    assert len(expected) == 2

    def finish(copy: Path) -> Any:
        shutil.rmtree(study)
        shutil.copytree(copy, study)
        return searched()

    survive(copies, finish, expected, "a Pareto search", count, 12 * times)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_a_specialist(
    average: float, gpt: LoadedTextRun, chats: Path, count: Count, times: int, tmp_path: Path
) -> None:
    folder = tmp_path / "specialist"
    new_specialist(folder, gpt, layers=1, head_rank=4)
    settings = FineTune(data=str(chats), steps=6, batch=3, context=16, save_every=2, average=average)
    with copies_before_every_operation(folder, tmp_path / "copies") as copies:
        FineTuning.start(folder, settings).train()
    expected = (folder / TENSORS).read_bytes()

    def finish(copy: Path) -> bytes:
        FineTuning.resume(copy).train()
        return (copy / TENSORS).read_bytes()

    survive(copies, finish, expected, "a specialist's training", count, 15 * times)


DRAFTS = RetrofitConfig(
    tokens=256,
    vocabulary=64,
    depths=2,
    slots=2,
    text=OwnTextConfig(length=16, rows=8),
    training=DraftTraining(epochs=1),
)


def test_a_draft_stage(
    gpt: LoadedTextRun, count: Count, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topograd.convert.draft_training.SAVE_SECONDS", 1e-9)  # after each step

    def finish(folder: Path) -> bytes:
        if not is_adapter(folder / "draft"):
            retrofit(gpt, folder / "draft", DRAFTS, exits=True)
        return (folder / "draft" / TENSORS).read_bytes()

    with copies_before_every_operation(tmp_path / "made", tmp_path / "copies") as copies:
        expected = finish(tmp_path / "made")
    survive(copies, finish, expected, "a draft stage's training", count, 12 * times)


def test_sigterm_saves_and_says_how_to_go_on(
    gpt: LoadedTextRun, chats: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)
    step = RouterTask.step

    def told(task: RouterTask, number: int) -> StepRecord:
        if number == 50:
            signal.raise_signal(signal.SIGTERM)
        return step(task, number)

    monkeypatch.setattr(RouterTask, "step", told)
    words = ["--specialists", tmp_path / "s", "--data", chats, "--out", tmp_path / "r", "--context", "16"]
    answer = call("specialist", "route", gpt.run.folder, *words)
    assert answer.code == INTERRUPTED
    assert "stopped at step 51 of 300; the same command goes on" in answer.err
    assert [path.name for path in (tmp_path / "r.work" / "checkpoints").iterdir()] == ["step-00000051"]
    assert call("specialist", "route", gpt.run.folder, *words).code == 0


def test_a_router(
    gpt: LoadedTextRun,
    chats: Path,
    call: Call,
    count: Count,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topograd.specialists.router.Schedule", partial(Schedule, save_every=2))
    monkeypatch.setattr("topograd.specialists.router.STEPS", 6)
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)

    def finish(folder: Path) -> bytes:
        there = is_adapter(folder / "r")
        words = ["--specialists", tmp_path / "s", "--data", chats, "--out", folder / "r"]
        answer = call("specialist", "route", gpt.run.folder, *words, "--context", "16")
        assert answer.code == (2 if there else 0), answer
        return (folder / "r" / TENSORS).read_bytes()

    with copies_before_every_operation(tmp_path / "made", tmp_path / "copies") as copies:
        expected = finish(tmp_path / "made")
    survive(copies, finish, expected, "a router's training", count, 12 * times)
