"""Mistakes that a new user makes: one line that names the flag and says what to do instead."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --lr 0.1", "did you mean --optimizer.lr-matrix?"),
        ("train --preset huge", "--preset is 'huge'; it must be one of tiny, small, base"),
        (
            "train --preset tiny --lora-rank 4",
            "--lora-rank is 4; it needs a model to begin with: give init",
        ),
        ("train --preset tiny --data empty", "corpus 'empty' is empty; give a text of at least 256 bytes"),
        ("train --preset tiny --out empty", "cannot make a run in empty (File exists); pass another folder"),
        ("train --resume nowhere", "it does not exist; give the folder of a run"),
        ("report empty", "it is a file; give the folder of a run"),
        ("generate RUN/config.toml", "give its folder, RUN"),
        ("space properties nowhere", "give layers per stage, as 4,4,4, or the folder of a run"),
        ("search pareto --out study --steps 9", "give the steps of a training with --rungs"),
        ("specialist attach RUN --out RUN", "RUN is taken; give an empty folder, or a new one"),
        ("demo --out RUN", "RUN is a run; give the demo a folder of its own"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(
    line: str, said: str, staged: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    assert said.replace("RUN", str(staged)) in call(*line.replace("RUN", str(staged)).split()).refusal
