"""A way to call the program, and sizes that make a training take a fraction of a second."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calls import Call, caller
from papers.__main__ import main
from papers.latent_bounded_interfaces import interfaces
from papers.staged_runs import PRESETS, Arm, Sizes
from topograd.runs.config import TrainConfig

Invent = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run `python -m papers` with these words."""
    return caller(main, capfd)


@pytest.fixture
def few_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of few words."""
    words = random.Random(0).choices(["stage", "loss", "relay", "\n"], k=2000)
    (tmp_path / "corpus.txt").write_text(" ".join(words), encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return str(tmp_path / "corpus.txt")


@pytest.fixture
def sizes(few_words: str) -> Sizes:
    return replace(PRESETS["tiny"], eval_bytes=200, data=few_words)


@pytest.fixture
def small_cases(few_words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of bounded interfaces are small models on that file."""
    for name, value in (("CONTEXT", 16), ("HELDOUT_BYTES", 400), ("SAMPLE_ROWS", 4)):
        monkeypatch.setattr(interfaces, name, value)
    whole = interfaces.Case.config

    def config(self: interfaces.Case, steps: int = 3) -> TrainConfig:
        found = whole(replace(self, width=16), steps)
        return replace(found, data=few_words, batch=2)

    monkeypatch.setattr(interfaces.Case, "config", config)


@pytest.fixture
def invent() -> Invent:
    """Rows of arms with readings that a test makes up, a little different for each of three seeds."""

    def rows(arms: Sequence[Arm], **readings: Callable[[Arm], Any]) -> list[dict[str, Any]]:
        found = []
        for seed in range(3):
            for i, arm in enumerate(arms):
                noise = random.Random(10 * seed + i).uniform(-1e-4, 1e-4)
                row: dict[str, Any] = {"arm": arm.name, "seed": seed}
                for key, reading in readings.items():
                    value = reading(arm)
                    row[key] = (
                        [None, *(v + noise for v in value)] if isinstance(value, list) else value + noise
                    )
                found.append(row)
        return found

    return rows
