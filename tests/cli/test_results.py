"""The results in a run's folder: used while they fit its checkpoints, measured again where they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.results import plan_of, predicts_by, readings_table, results_of, stored_results
from topograd.errors import RunError
from topograd.runs.config import preset
from topograd.runs.folder import Run


@pytest.fixture
def run(staged: Path, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(staged, tmp_path / "moved"))


def test_stored_results_are_found_under_the_folder_s_new_name(run: Run) -> None:
    found = stored_results(run)
    assert found is not None
    assert (found["run"], found["steps"], found["finished"]) == (str(run.folder), 12, True)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"steps": "12", "bpb": {}}', '{"steps": 12, "bpb": {}}', '{"steps": 12, "bpb": [3.5]}'],
)
def test_what_is_no_result_is_not_used(content: str, run: Run) -> None:
    """The run's own, as another version may have written it, or one without a manifest."""
    run.manifest.bind(run.results_file.name, content)
    assert stored_results(run) is None
    run.manifest.path.unlink()
    assert stored_results(run) is None


def test_results_that_the_run_did_not_write_are_refused(run: Run, backprop: Path) -> None:
    """R5: those of another run at the same step."""
    shutil.copyfile(backprop / "results.json", run.results_file)
    with pytest.raises(RunError, match=r"results\.json is not the file that this run wrote; delete it"):
        stored_results(run)
    run.results_file.unlink()
    assert stored_results(run) is None


def test_results_of_other_weights_are_not_used(run: Run) -> None:
    own = json.loads(run.results_file.read_text())
    run.write_results(own | {"weights": "0" * 64})
    assert stored_results(run) is None
    run.write_results(own)
    assert stored_results(run) is not None


def test_results_of_another_step_are_not_used_but_measured(run: Run) -> None:
    recorded = json.loads(run.results_file.read_text())
    shutil.rmtree(run.checkpoints / "step-00000012")
    assert stored_results(run) is None
    config, results = results_of(run.folder)
    assert results["steps"] == 10
    assert not results["finished"]
    assert results["bpb"] != recorded["bpb"]
    logged = [r["seconds"] for r in run.metrics() if r["kind"] == "train" and r["step"] == 10]
    assert [results["seconds"]] == logged
    assert config.steps == 12


def test_the_table_has_a_row_for_each_prefix_and_pooling(run: Run) -> None:
    table = readings_table(*results_of(run.folder))
    labels = list(table.columns[0].cells)
    assert labels == [
        *("stages 1..1, 1 layers", "stages 1..2, 2 layers"),
        *("sum of all stages", "mean of all stages", "shrinkage of all stages"),
        "model: its last stage",
    ]


@pytest.mark.parametrize(
    ("settings", "exits", "predicts"),
    [
        ({"partition": "2,2", "objective": "residual"}, ["2 layers", "4 layers"], "the sum of stages 1-2"),
        ({"graph": "forest", "branches": ("1,1", "2")}, ["1", "2", "4"], "a pool of stages 2-3"),
        ({"graph": "cover", "intervals": ((0, 3), (2, 4))}, ["3", "5"], "a pool of stages 1-2"),
        ({"partition": "2,2", "decoder": 1}, ["3", "5"], "its last stage"),
        ({"partition": "2,2", "decoder": 1, "prediction": "sum"}, ["3", "6"], "the sum of stages 2,4"),
        ({"partition": "1,1,2", "prediction": "path:1,3"}, ["1", "2", "4"], "the path 1,3"),
        ({"partition": "2,2", "prediction": "0,1"}, ["2", "4"], "a pool of stages 2"),
        ({"partition": "2,2", "weights": (0.0, 1.0)}, ["stage 2 of 2"], "its last stage"),
    ],
)
def test_exits_say_which_layers_run_for_them(
    settings: dict[str, Any], exits: list[str], predicts: str
) -> None:
    """All that an exit's prediction reads, each layer once: a pool of branches runs every branch."""
    config = preset("tiny", **settings)
    plan = plan_of(config)
    readings = [0.0] * len(exits)
    results: dict[str, Any] = {"run": "r", "steps": 1, "bpb": {"prefix": readings, "prediction": 3.0}}
    results |= dict.fromkeys(("ece", "effective_rank", "usefulness"), readings)
    labels = list(readings_table(config, results).columns[0].cells)
    assert [
        str(label).partition(", ")[2].removesuffix(" layers") or label for label in labels[: len(exits)]
    ] == [exit_.removesuffix(" layers") for exit_ in exits]
    assert predicts_by(plan) == predicts
