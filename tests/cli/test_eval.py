import json
import shutil
from pathlib import Path
from typing import Any

import pytest


def test_it_measures_what_the_training_measured(staged: Path, call: Any) -> None:
    recorded = json.loads((staged / "results.json").read_text())
    results = call("eval", staged, "--json").json
    assert results == {key: recorded[key] for key in results}
    assert {"run", "steps", "bpb", "ece", "effective_rank", "usefulness"} <= results.keys()


def test_other_text_other_checkpoints_and_less_of_it(staged: Path, call: Any, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("a text that it never saw before " * 30)
    assert call("eval", staged, "--data", text, "--json").json["bytes"] == text.stat().st_size
    assert 100 < call("eval", staged, "--data", text, "--bytes", 200, "--json").json["bytes"] <= 200
    early = call("eval", staged, "--from", "step-00000010", "--json").json
    assert early["steps"] == 10
    assert early["bpb"] != call("eval", staged, "--json").json["bpb"]


def test_nothing_is_written(staged: Path, call: Any, tmp_path: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in staged.rglob("*"))
    assert call("eval", staged).code == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in staged.rglob("*")) == before


def test_a_table_for_people(staged: Path, backprop: Path, call: Any) -> None:
    table = call("eval", staged).out
    for words in ("step 12 of 12", "stages 1..2, 2 layers", "mean of all stages"):
        assert words in table
    assert "backprop" in call("eval", backprop).out


def test_a_name_with_brackets_is_a_name(
    staged: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be broken into lines, perhaps within the name
    odd = shutil.copytree(staged, Path("[bold] [x]"))
    assert "[bold] [x]: step 12" in " ".join(call("eval", odd).out.split())
    assert "[bold] [x]" in " ".join(call("compare", odd).out.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--data nowhere.txt", "--data 'nowhere.txt' does not exist"),
        ("--bytes 0", "--bytes is 0"),
        ("--bytes 3", "too small for one window"),
        ("--bytes few", "--bytes is 'few'; it must be a whole number"),
        ("--from step-7", "has no checkpoint 'step-7'; it has"),
        ("--stages 3", "Unrecognized options: --stages"),
    ],
)
def test_bad_questions_are_one_line(words: str, why: str, staged: Path, call: Any) -> None:
    assert why in call("eval", staged, "--json", *words.split()).refusal


def test_text_that_is_too_short_and_runs_that_are_none(staged: Path, call: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "is empty" in call("eval", staged, "--data", tmp_path / "empty.txt").refusal
    assert "it has neither config.toml nor config.json" in call("eval", tmp_path).refusal
    assert "MODEL is missing" in call("eval").refusal
    copy = shutil.copytree(staged, tmp_path / "copy")
    (copy / "checkpoints" / "step-00000012" / "state.json").unlink()
    assert "resume with --from step-00000010" in call("eval", copy).refusal
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json" in call("eval", copy).refusal
