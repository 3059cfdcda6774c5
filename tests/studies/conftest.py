"""Sizes that make a training take a fraction of a second, for the studies of staged learning."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topograd.studies.staged_runs import PRESETS, Arm, Sizes

Invent = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    words = random.Random(0).choices(["stage", "loss", "relay", "\n"], k=2000)
    (tmp_path / "corpus.txt").write_text(" ".join(words), encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return replace(PRESETS["tiny"], eval_bytes=200, data=str(tmp_path / "corpus.txt"))


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
