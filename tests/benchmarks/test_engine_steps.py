"""Seconds of each gradient engine in two checkouts: the order of turns, what is read, what is missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import engine_steps
from engine_steps import ENGINES, HERE, Settings, measure, step_seconds

TINY = Settings(HERE, preset="tiny", partition="2,2", rounds=1, steps=4, warmup=1)


@pytest.mark.parametrize("name", ["autograd", "scan, pullback"])
def test_a_step_of_a_real_training(name: str) -> None:
    assert step_seconds(HERE / "src", ENGINES[name], TINY) > 0


def test_the_median_of_the_steps_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(source: Path, words: list[str], threads: int) -> str:
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir()
        seconds = [9.0, 10.0, 12.0, 12.5]
        records = [{"kind": "train", "step": i + 1, "seconds": s} for i, s in enumerate(seconds)]
        lines = [{"kind": "eval"}, *records]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        return ""

    monkeypatch.setattr(engine_steps, "call", train)
    assert step_seconds(HERE / "src", [], TINY) == 1.0
    assert step_seconds(HERE / "src", [], Settings(HERE, warmup=2)) == 1.25


def test_checkouts_take_turns_and_what_one_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    calls: list[tuple[str, bool]] = []

    def seconds(source: Path, flags: list[str], settings: Settings) -> float:
        here = source == HERE / "src"
        assert here or source == tmp_path.resolve() / "src"
        if "--jacobian" in flags and not here:
            raise subprocess.CalledProcessError(2, "train", stderr="one\nUnrecognized options: --jacobian\n")
        calls.append((next((name for name, each in ENGINES.items() if each == flags), ""), here))
        return 2.0 if here else 1.0

    monkeypatch.setattr(engine_steps, "step_seconds", seconds)
    engines = measure(Settings(tmp_path, rounds=2))["engines"]
    assert [here for name, here in calls if name == "autograd"] == [True, False, False, True]
    assert list(engines) == list(ENGINES)
    for name, found in engines.items():
        if "--jacobian" in ENGINES[name]:
            assert found["other"] == "Unrecognized options: --jacobian"
            assert "ratio" not in found
            assert found["here"]["median"] == 2.0
        else:
            assert found["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}
