"""The study of bounded interfaces: its cases, going on after a kill, and its table."""

import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from topograd.nn.gpt import ARCHITECTURES
from topograd.runs.config import TrainConfig
from topograd.studies import interfaces as study
from topograd.studies.interfaces import (
    Case,
    headline,
    position_losses,
    run,
    sweeps,
    table,
    train_case,
    trained,
)
from topograd.training.forward import stage_outputs

SMALL = "S=4,r=4,pool=tail"


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model on a small text, for a few steps."""
    words = random.Random(0).choices(["stage", "loss", "relay", "\n"], k=2000)
    (tmp_path / "corpus.txt").write_text(" ".join(words))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("WIDTH", 16), ("CONTEXT", 16), ("HELDOUT_BYTES", 400)):
        monkeypatch.setattr(study, name, value)
    whole = Case.config

    def config(self: Case, steps: int = 3) -> TrainConfig:
        return replace(whole(self, steps), data=str(tmp_path / "corpus.txt"), batch=2)

    monkeypatch.setattr(Case, "config", config)


def test_every_case_is_a_model_that_can_be_built() -> None:
    cases = [case for kind in ARCHITECTURES for case in (*headline(kind), *sweeps(kind))]
    keys = [(case.architecture, case.name, case.seed) for case in cases]
    assert len(set(keys)) == len(keys)
    for case in cases:
        if not case.interface or int(case.interface.split(",")[0][2:]) <= 16:  # the small context
            assert case.config().model.architecture == case.architecture
    assert {case.seed for case in headline("mamba3")} == {0, 1, 2}
    shallow, bounded, _ = headline("hybrid", [0])[1:]
    assert (shallow.config().model.layers, len(bounded.config().topology().stages)) == (2, 4)


def test_the_loss_of_every_position() -> None:
    stack, plan, _ = trained(Case("x", interface=SMALL, partition="1,1"), steps=1)
    inputs = torch.randint(257, (3, 16))
    targets = torch.randint(257, (3, 16))
    targets[0, 5] = -100
    losses = position_losses(stack, plan, inputs, targets)
    assert losses.isnan().nonzero().tolist() == [[0, 5]]
    with torch.no_grad():
        logits = stack.readout(stage_outputs(stack, plan, inputs, [1])[1], 1)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # leaves -100 out
    torch.testing.assert_close(losses.nanmean(), mean)


def test_a_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("dense", partition="1,1"), Case(SMALL, partition="1,1", interface=SMALL)]
    file = tmp_path / "out" / "rows.jsonl"
    first = run(file, cases[:1], steps=3)
    asked: list[Case] = []

    def counted(case: Case, steps: int) -> dict[str, Any]:
        asked.append(case)
        return train_case(case, steps)

    monkeypatch.setattr(study, "train_case", counted)
    found = run(file, cases, steps=3)
    assert asked == cases[1:]
    assert found["transformer", "dense", 0] == first["transformer", "dense", 0]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["dense", SMALL]
    assert all(0 < row["ce"] < 6 and row["steps"] == 3 for row in rows)


def test_the_table_measures_from_dense_and_from_shallow() -> None:
    def rows(name: str, values: Sequence[float]) -> list[dict[str, Any]]:
        shared = {"architecture": "mamba3", "name": name, "early": 2.0}
        return [{**shared, "seed": seed, "ce": ce} for seed, ce in enumerate(values)]

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table([*rows("dense", [1.0, 1.2]), *rows("shallow", [1.5]), *rows("S=8", [1.1, 1.3])]))
    text = console.export_text()
    bounded = next(line for line in text.splitlines() if "S=8" in line)
    assert bounded.replace("│", " ").split() == [
        "mamba3", "S=8", "1.2000", "0.1414", "2.0000", "2", "+0.1000", "-0.3000",
    ]  # fmt: skip
