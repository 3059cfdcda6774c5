"""`topograd eval core`, beside `topograd eval`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.runs.folder import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of a few items."""
    place = tmp_path_factory.mktemp("core")
    copa = [{"query": f"stage {i}", "choices": ["loss", "relay"], "gold": i % 2} for i in range(4)]
    language = [{"context": f"stage {i}", "continuation": "loss"} for i in range(3)]
    for name, items in (("copa", copa), ("lambada_openai", language)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return place


@pytest.fixture
def run(staged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(staged, tmp_path / "run"))


def test_the_one_object_and_the_log(run: Path, folder: Path, call: Any) -> None:
    words = ("eval", "core", run, "--tasks", folder)
    answer = call(*words, "--json")
    found = answer.json
    assert found["name"] == "CORE-2"
    assert len(found["core"]) == 2
    assert set(found["tasks"]) == {"copa", "lambada_openai"}
    assert len(found["tasks"]["copa"]["accuracy"]) == len(found["tasks"]["copa"]["centered"]) == 2
    assert "no file for hellaswag_zeroshot, jeopardy" in answer.err
    assert "left out, so this is CORE-2" in answer.err
    (log,) = (run / "evaluation").glob("core-*.jsonl")
    assert len(log.read_text().splitlines()) == 1 + 7
    assert json.loads((run / "evaluation" / "core.json").read_text())["core"] == found["core"]
    assert call(*words, "--json").json == found
    assert "CORE-2" in call(*words).out


def test_some_tasks_some_items_and_another_run(run: Path, backprop: Path, folder: Path, call: Any) -> None:
    other = Path(shutil.copytree(backprop, run.parent / "other"))
    words = ("eval", "core", run, "--tasks", folder, "--only", "copa", "--limit", 2, "--against", other)
    found = call(*words, "--baselines", "v2", "--json").json
    assert found["name"] == "CORE-1"
    assert found["tasks"]["copa"]["items"] == 2
    (row,) = found["polarisation"]["tasks"]
    assert row["task"] == "copa"
    table = call(*words).out
    assert "against" in table
    assert "undecided" in table or "tie" in table or "wins" in table or "loses" in table


def test_with_a_specialist(straight: Run, spec: Path, folder: Path, call: Any, tmp_path: Path) -> None:
    log = tmp_path / "items.jsonl"
    words = ("eval", "core", straight.folder, "--tasks", folder, "--only", "copa", "--specialists", spec)
    found = call(*words, "--log", log, "--json").json
    assert found["depths"][-1] == str(spec)
    assert len(found["core"]) == len(found["depths"])
    assert json.loads(log.read_text().splitlines()[0])["specialists"][0][0] == spec.name
    assert not (straight.folder / "evaluation" / "core.json").exists(), "it is not the run's own score"
    plain = call(*words[:-2], "--log", log).refusal
    assert "is the log of other weights, tasks or settings" in plain


def test_a_run_that_cannot_be_written_is_only_read(
    run: Path, folder: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    answer = call("eval", "core", run, "--tasks", folder, "--only", "copa", "--json")
    assert "so no item is logged; give --log FILE" in answer.err
    assert not (run / "evaluation").exists()
    log = tmp_path / "items.jsonl"
    call("eval", "core", run, "--tasks", folder, "--only", "copa", "--log", log)
    assert len(log.read_text().splitlines()) == 5


def test_what_cannot_be_is_one_line(run: Path, folder: Path, call: Any, tmp_path: Path) -> None:
    words = ("eval", "core", run, "--tasks", folder)
    assert "task is 'copi'; it must be some of" in call(*words, "--only", "copi").refusal
    assert "holds no file of these tasks" in call(*words, "--only", "piqa").refusal
    assert "--limit is 0; it must be at least 1" in call(*words, "--limit", 0).refusal
    assert "is no folder" in call("eval", "core", run, "--tasks", tmp_path / "none").refusal
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "copa.jsonl").write_text('{"query": "a", "choices": ["b", "c"]}\n')
    assert "line 1 has no gold answer" in call("eval", "core", run, "--tasks", bad).refusal


def test_help_is_at_hand(call: Any) -> None:
    assert "eval core" in call("eval", "--help").out
    assert call("eval", "core", "--help").out.startswith("usage: topograd eval core")
