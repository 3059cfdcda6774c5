"""Eight prompts at every exit: what is counted as right, and whose numbers stand beside it."""

from __future__ import annotations

import pytest

import questions
from questions import QUESTIONS, prefix_table, right_counts
from topograd.decode.model import Model
from topograd.evaluation.texts import score


def test_every_exit_writes_and_is_scored(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    written = model.generate("stage", 4, depth="prefix:2")
    said = str(written).strip().upper()
    asked = {"own": (("stage", f" {said[:2]}"), ("relay of", " loss"))}
    monkeypatch.setattr(questions, "QUESTIONS", asked)
    monkeypatch.setattr(questions, "ANSWER_TOKENS", 4)
    (rows,) = prefix_table(model).values()
    assert [row["prompt"] for row in rows] == ["stage", "relay of"]
    assert rows[0]["exits"][1]["text"] == str(written)
    assert rows[0]["exits"][1]["right"], "in any case of letters"
    [second] = score(model, "relay of", " loss")
    assert [each["logprob"] for each in rows[1]["exits"]] == pytest.approx(second.score.total)
    assert [each["rank"] for each in rows[1]["exits"]] == second.score.rank[:, 0].tolist()
    assert right_counts(rows)[1] == sum(row["exits"][1]["right"] for row in rows) >= 1


def test_two_sets_of_eight() -> None:
    assert {name: len(asked) for name, asked in QUESTIONS.items()} == {"world": 8, "python": 8}
    prompts = [prompt for asked in QUESTIONS.values() for prompt, _ in asked]
    assert len(set(prompts)) == 16
