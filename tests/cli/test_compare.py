import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.compare import compare
from topograd.runs.config import preset


def results(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return read


def test_the_gap_is_to_the_backprop_run_wherever_it_stands(staged: Path, backprop: Path, call: Any) -> None:
    answer = call("compare", staged, backprop, "--json").json
    assert answer["against"] == str(backprop)
    ours, theirs = answer["runs"]
    assert (ours["partition"], theirs["partition"]) == ([1, 1], [2])
    assert ours["bpb"] == results(staged)["bpb"]
    assert ours["seconds"] == results(staged)["seconds"]
    assert theirs["gap"] == {"prediction": 0.0, "last": 0.0, "best": 0.0}, "one stage has nothing to pool"
    expected = 100 * (results(staged)["bpb"]["prediction"] / results(backprop)["bpb"]["prediction"] - 1)
    assert ours["gap"]["prediction"] == ours["gap"]["last"] == pytest.approx(expected)
    readings = {k: v for k, v in ours["bpb"].items() if k not in ("prefix", "stages")}
    assert ours["best"]["bpb"] == min([*ours["bpb"]["prefix"], *readings.values()])


def test_gaps_by_hand() -> None:
    def run(name: str, partition: str, last: float, **more: float) -> tuple[Any, dict[str, Any]]:
        bpb = {"last": last, "sum": 9.0, "mean": 9.0, "shrinkage": 9.0, "prefix": [4.0, last], **more}
        bpb = {"prediction": last, **bpb}
        return preset("tiny", partition=partition), {"run": name, "steps": 1, "bpb": bpb}

    both = compare([run("a", "2,2", 2.2), run("b", "4", 2.0), run("c", "1,3", 2.0, mean=1.5)])
    assert both["against"] == "b"
    assert [row["gap"]["prediction"] for row in both["runs"]] == pytest.approx([10.0, 0.0, 0.0])
    summed = run("s", "2,2", 6.0, prediction=3.0, sum=3.0)
    residual = (preset("tiny", partition="2,2", objective="residual"), summed[1])
    row = compare([residual, run("b", "4", 2.0)])["runs"][0]
    assert row["predicts_by"] == "sum"
    assert row["gap"] == pytest.approx({"prediction": 50.0, "last": 200.0, "best": 50.0}), "D1"
    assert [row["gap"]["last"] for row in both["runs"]] == pytest.approx([10.0, 0.0, 0.0])
    assert [row["gap"]["best"] for row in both["runs"]] == pytest.approx([10.0, 0.0, -25.0])
    assert both["runs"][2]["best"] == {"prediction": "mean", "bpb": 1.5}
    assert both["runs"][0]["best"]["prediction"] == "prefix 2"
    assert compare([run("a", "2,2", 2.2), run("c", "1,3", 2.0)])["against"] == "a", (
        "the first, without backprop"
    )


def test_a_run_without_results_is_measured(staged: Path, backprop: Path, call: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(staged, tmp_path / "run")
    (copy / "results.json").unlink()
    answer = call("compare", copy, backprop, "--json")
    assert f"measuring {copy}" in answer.err
    row = answer.json["runs"][0]
    assert row["bpb"] == results(staged)["bpb"]
    assert row["seconds"] == pytest.approx(results(staged)["seconds"])
    assert row["finished"] is True
    assert not (copy / "results.json").exists()


def test_results_of_another_checkpoint_do_not_count(staged: Path, call: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(staged, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "step-00000012")
    row = call("compare", copy, "--json").json["runs"][0]
    assert (row["steps"], row["finished"]) == (10, False)


def test_runs_on_different_text_are_pointed_out(
    staged: Path, size: list[str], call: Any, tmp_path: Path
) -> None:
    words = [*size, "--eval-bytes", 200, "--steps", 1, "--out", tmp_path / "run", "--json"]
    assert call("train", *words).code == 0
    answer = call("compare", staged, tmp_path / "run", "--json")
    assert answer.code == 0
    assert "differ in eval_bytes" in answer.err
    assert "these runs were trained for 12, 1 steps" in answer.err
    assert "steps" not in call("compare", staged, staged, "--json").err


def test_a_table_for_people(staged: Path, backprop: Path, call: Any) -> None:
    table = call("compare", staged, backprop).out
    for words in (
        "partition",
        "1,1",
        "predicts by",
        "gap of what it predicts",
        "+0.00 %",
        "shrinkage",
        "best prefix",
    ):
        assert words in table


def test_bad_questions_are_one_line(staged: Path, call: Any, tmp_path: Path) -> None:
    assert "there is no run to compare" in call("compare").refusal
    assert "it has neither config.toml nor config.json" in call("compare", staged, tmp_path).refusal
    assert "Unrecognized options: --gap" in call("compare", staged, "--gap").refusal
