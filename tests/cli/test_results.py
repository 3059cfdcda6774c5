"""The results in a run's folder: used while they fit its checkpoints, measured again where they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from topograd.cli.results import readings_table, results_of, stored_results
from topograd.runs.folder import Run


@pytest.fixture
def run(staged: Path, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(staged, tmp_path / "moved"))


def test_stored_results_are_found_under_the_folder_s_new_name(run: Run) -> None:
    found = stored_results(run)
    assert found is not None
    assert (found["run"], found["steps"], found["finished"]) == (str(run.folder), 12, True)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"steps": "12", "bpb": {}}'])
def test_what_is_no_result_is_not_used(content: str, run: Run) -> None:
    run.results_file.write_text(content)
    assert stored_results(run) is None


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
    ]
