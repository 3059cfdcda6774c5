"""The study of specialists and facts in its smallest form, and that a second run goes on behind the first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from papers.kept import Kept
from papers.outcome import Result, asked
from papers.product_of_experts import specialist_facts
from papers.product_of_experts.facts import World
from topograd.runs.session import LoadedTextRun


def study(place: Path) -> Result:
    return specialist_facts.run(asked("specialists", "tiny", kept=Kept(place / "rows.jsonl")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def found(place: Path) -> Result:
    return study(place)


def test_the_base_is_preserved_and_the_controls_move_it(found: Result) -> None:
    rows = [row for row in found.rows if row["what"] == "preservation"]
    moved: dict[str, list[float]] = {}
    for row in rows:
        moved.setdefault(row["model"].partition(",")[0], []).append(row["base_max_abs_logit_delta"])
    assert moved["dual head"] == [0.0] * 6
    assert moved["single head"][-1] > 0
    assert moved["LoRA"][-1] > 0
    assert found.drawing is not None
    assert len(found.drawing.series) == 4


def test_every_question_has_its_table(found: Result) -> None:
    assert len(found.tables) == 6, "all but the fifty prompts, which want a larger base"
    assert all(len(row) == len(table.header) for table in found.tables for row in table.rows)
    assert all(isinstance(cell, str) for table in found.tables for row in table.rows for cell in row)
    assert found.setting.endswith(".")
    assert len(found.findings) == 4
    verdicts = {claim.name: claim.verdict for claim in found.claims}
    assert verdicts["reference: the base does not move"] == "held"
    assert len(verdicts) == 9


def test_what_was_measured_is_not_measured_again(
    found: Result, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run takes what the first kept, and computes what is missing."""
    lines = (place / "rows.jsonl").read_text().splitlines()
    (place / "rows.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    monkeypatch.setattr(specialist_facts.BaseStudy, "taught", lambda *_: pytest.fail("it was kept"))
    assert study(place).rows == found.rows


def test_a_training_that_was_ended_goes_on(
    make_session: Callable[..., LoadedTextRun], tmp_path: Path
) -> None:
    """Read on its way, ended and taken up again it is the training in one go; an earlier step begins anew."""
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in World.make(1).records(1)))
    settings = replace(specialist_facts.TINY, context=16).settings(data, 2)
    base = make_session(2)

    def training(name: str) -> specialist_facts.Training:
        return specialist_facts.Training(tmp_path / name, base, settings, layers=1)

    whole, first = training("whole"), training("parts")
    expected = whole.at(2).part("specialist").tensors()
    begun = {name: tensor.clone() for name, tensor in first.at(1).part("specialist").tensors().items()}
    again = training("parts")
    for name, tensor in again.at(1).part("specialist").tensors().items():
        assert torch.equal(tensor, begun[name])
    for name, tensor in again.at(2).part("specialist").tensors().items():
        assert torch.equal(tensor, expected[name])
    assert [row["step"] for row in again.preservation()] == [0, 1, 2]
    earlier = training("parts").at(1).part("specialist").tensors()
    assert all(torch.equal(tensor, begun[name]) for name, tensor in earlier.items())
