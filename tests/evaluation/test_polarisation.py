"""Wins and losses by intervals, and in the paper's words."""

from __future__ import annotations

import numpy as np

from topograd.evaluation.core import CoreResult, TaskResult
from topograd.evaluation.polarisation import GROUPS, polarisation
from topograd.evaluation.tasks import TASKS


def result(**shares: float) -> CoreResult:
    """Accuracies at the last of two depths, of 200 items each."""
    tasks = []
    for label, share in shares.items():
        right = (np.arange(200) < share * 200).astype(float)
        tasks.append(TaskResult(TASKS[label], np.stack([np.zeros(200), right], axis=1), 0))
    return CoreResult(tasks)


def test_every_task_has_one_group() -> None:
    assert sorted(label for labels in GROUPS.values() for label in labels) == sorted(TASKS)


def test_a_table_of_wins_and_losses() -> None:
    staged = result(piqa=0.74, jeopardy=0.04, copa=0.5, arc_easy=0.68, winograd=0.6)
    backprop = result(piqa=0.60, jeopardy=0.20, copa=0.5, arc_easy=0.70)
    found = polarisation(staged, backprop)
    by_task = {row["task"]: row for row in found["tasks"]}
    assert list(by_task) == ["piqa", "copa", "arc_easy", "jeopardy"], "the most won first"
    assert [row["verdict"] for row in found["tasks"]] == ["wins", "tie", "loses", "loses"]
    assert [row["paper"] for row in found["tasks"]] == ["wins", "tie", "tie", "loses"]
    assert found["polarised"]
    assert (found["wins"], found["losses"]) == (1, 2)
    assert found["groups"]["factual retrieval"] < -0.1 < 0 < found["groups"]["commonsense"]
    low, high = by_task["piqa"]["interval"]
    assert low < 0.14 < high


def test_equal_models_are_not_polarised() -> None:
    same = result(piqa=0.7, jeopardy=0.2)
    found = polarisation(same, same)
    assert not found["polarised"]
    assert [row["verdict"] for row in found["tasks"]] == ["tie", "tie"]


def test_few_items_decide_nothing() -> None:
    few = CoreResult([TaskResult(TASKS["copa"], np.array([[1.0], [0.0], [1.0], [1.0]]), 0)])
    other = CoreResult([TaskResult(TASKS["copa"], np.array([[0.0], [1.0], [1.0], [0.0]]), 0)])
    assert polarisation(few, other)["tasks"][0]["verdict"] == "undecided"
