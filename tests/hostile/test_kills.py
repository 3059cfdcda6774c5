"""Kills before file operations of everything that trains: what is left resumes to the same weights.

A folder is copied before each operation on a file, which is what a kill at that moment leaves. A sample of
the copies is resumed to the end.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topograd.errors import TopogradError
from topograd.runs.adapter import TENSORS
from topograd.runs.config import TrainConfig
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.attach import new_specialist
from topograd.specialists.finetune import FineTuning
from topograd.specialists.settings import FineTune
from topograd.training.runs import resume, start

Count = Callable[[str, str], None]
_EVENTS = {"open", *(f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "truncate", "link"))}
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


def test_a_run(config: TrainConfig, count: Count, times: int, tmp_path: Path) -> None:
    config = replace(config, steps=6, save_every=2, eval_every=3)
    with copies_before_every_operation(tmp_path / "run", tmp_path / "copies") as copies:
        start(config, tmp_path / "run").train()

    def weights(folder: Path) -> bytes:
        return b"".join(t.numpy().tobytes() for t in open_session(folder).stack.state_dict().values())

    def finish(folder: Path) -> bytes:
        resume(folder).train()
        return weights(folder)

    survive(copies, finish, weights(tmp_path / "run"), "a run", count, 20 * times)


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
