"""Questions at every exit, early exits and drafts by category, and their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prompts
from prompts import (
    CATEGORIES,
    QUESTIONS,
    Settings,
    bench_prompts,
    main,
    prefix_table,
    prompt_tables,
    right_counts,
)
from raising import refused
from topograd.decode.model import Model, load
from topograd.errors import ConfigError
from topograd.evaluation.texts import score
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, open_session


@pytest.fixture(scope="module")
def folder(make_session: Any) -> Path:
    """Of a run of two stages that is not calibrated."""
    session: LoadedTextRun = make_session(2)
    return session.run.folder


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Two categories of one prompt on the reference model, which is calibrated."""
    patch = pytest.MonkeyPatch()
    patch.setattr(prompts, "CATEGORIES", {name: CATEGORIES[name][:1] for name in ("code", "prose")})
    patch.setattr(prompts, "QUESTIONS", {"world": QUESTIONS["world"][:1]})
    try:
        return bench_prompts(load(REFERENCE), Settings(tokens=6, drafts=2, rounds=1))
    finally:
        patch.undo()


def test_every_way_stands_beside_full_depth(found: dict[str, Any]) -> None:
    exits = found["exits"]
    drafters = [f"draft by stage {k + 1}" for k in range(exits - 1)]
    assert list(found["all"]) == ["full", "wand:sum-of-bounds", "wand:flip-rate", *drafters]
    assert found["not_measured"] is None
    for ways in (*found["categories"].values(), found["all"]):
        assert ways["full"]["identical"] == 1.0
        assert ways["full"]["mean_stage"] == exits
        assert ways["full"]["acceptance"] is None
        for name in drafters:
            assert ways[name]["mismatches"] == 0, "a draft never changes a text"
            assert 0 <= ways[name]["acceptance"] <= 1
        for name in ("wand:sum-of-bounds", "wand:flip-rate"):
            assert 1 <= ways[name]["mean_stage"] <= exits
    both = [ways["draft by stage 1"]["mean_stage"] for ways in found["categories"].values()]
    assert found["all"]["draft by stage 1"]["mean_stage"] == pytest.approx(sum(both) / 2)
    assert found["compute"][-1] == 1.0
    assert found["compute"] == sorted(found["compute"])
    assert found["right"].keys() == {"world"}


def test_without_a_calibration_only_drafts(model_without: Any) -> None:
    modes, problem = prompts._modes(model_without, 3)
    assert problem is not None
    assert "is not calibrated" in problem
    assert list(modes) == ["full", "draft by stage 1"]


@pytest.fixture
def model_without(folder: Path) -> Model:
    return Model(open_session(folder))


def test_settings_are_checked() -> None:
    with refused(ConfigError, setting="drafts", given=0):
        Settings(drafts=0)
    with pytest.raises(ConfigError, match="more than 1000000 tokens"):
        Settings(tokens=100_000, rounds=100)


@pytest.fixture
def model(folder: Path) -> Model:
    """A run of two stages on bytes, in float64."""
    session = open_session(folder)
    session.stack.double()
    return Model(session)


def test_every_exit_writes_and_is_scored(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    written = model.generate("stage", 4, depth="prefix:2")
    said = str(written).strip().upper()
    asked = {"own": (("stage", f" {said[:2]}"), ("relay of", " loss"))}
    monkeypatch.setattr(prompts, "QUESTIONS", asked)
    monkeypatch.setattr(prompts, "ANSWER_TOKENS", 4)
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
    asked = [prompt for questions in QUESTIONS.values() for prompt, _ in questions]
    assert len(set(asked)) == 16


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


def test_the_one_object(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CATEGORIES", {"lists": ("one, two,",)})
    monkeypatch.setattr(prompts, "QUESTIONS", {"world": (("gold is", " Au"),)})
    settings = Settings(tokens=3, drafts=2, rounds=1)
    main(folder, settings, json=True)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert f"measuring {folder}" in said.err
    assert list(found["all"]) == ["full", "draft by stage 1"]
    assert "is not calibrated" in found["not_measured"]
    assert found["all"]["draft by stage 1"]["mismatches"] == 0
    assert found["settings"] == {"tokens": 3, "drafts": 2, "rounds": 1}
    main(folder, settings)
    assert "Draft stages, 2 tokens" in capsys.readouterr().out
