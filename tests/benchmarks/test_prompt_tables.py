"""`topograd bench prompts`: the tables of people, and the one object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import prompts
import questions
from prompt_tables import prompt_tables

WAY = {"prompts": 2, "speedup": {"median": 1.5, "low": 1.4, "high": 1.6}, "identical": 0.5, "ties": 1}
EXIT = {"text": " Au", "right": True, "logprob": -1.0, "rank": 3}


def results(**more: Any) -> dict[str, Any]:
    """Two exits, one category, one question."""
    ways = {
        "full": WAY | {"mean_stage": 2.0, "acceptance": None},
        "wand:flip-rate": WAY | {"mean_stage": 1.25, "acceptance": None},
        "draft by stage 1": WAY | {"mean_stage": 1.5, "acceptance": 0.75},
    }
    return {
        "questions": {
            "world": [{"prompt": "[gold] is", "answer": " Au", "exits": [EXIT, EXIT | {"right": False}]}]
        },
        "categories": {"code": ways},
        "all": ways,
        "compute": [0.5, 1.0],
        "settings": {"drafts": 3},
        "not_measured": None,
        **more,
    }


def cells(table: Any) -> list[list[str]]:
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_a_table_for_each_question() -> None:
    answers, early, drafts, drafters = prompt_tables(results())
    assert cells(answers)[0] == ["[gold] is", "Au", "yes (3)", "no (3)"]
    assert cells(answers)[-1] == ["right", "", "1", "0"]
    assert early.title == "wand:flip-rate"
    assert cells(early)[0] == ["code", "2", "1.50", "0.50", "1", "1.25", "–"]
    assert cells(drafts)[-1] == ["all", "2", "1.50", "0.50", "1", "1.50", "0.75"]
    assert cells(drafters) == [["draft by stage 1", "50 %", "2", "1.50", "0.50", "1", "1.50", "0.75"]]


def test_what_was_not_measured_is_said() -> None:
    tables = prompt_tables(results(not_measured="the run is not calibrated"))
    assert tables[-1].caption == "not measured: leaving early (the run is not calibrated)"


def test_the_one_object(staged: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "CATEGORIES", {"lists": ("one, two,",)})
    monkeypatch.setattr(questions, "QUESTIONS", {"world": (("gold is", " Au"),)})
    words = ("bench", "prompts", staged, "--tokens", 3, "--drafts", 2, "--rounds", 1)
    answer = call(*words, "--json")
    found = answer.json
    assert f"measuring {staged}" in answer.err
    assert list(found["all"]) == ["full", "draft by stage 1"]
    assert "is not calibrated" in found["not_measured"]
    assert found["all"]["draft by stage 1"]["mismatches"] == 0
    assert found["settings"] == {"tokens": 3, "drafts": 2, "rounds": 1}
    assert "Draft stages, 2 tokens" in call(*words).out
    assert "--drafts is 0; it must be at least 1" in call(*words[:-4], "--drafts", 0).refusal
