"""Polarisation of two models: task-by-task differences of accuracy, and their spread.

    Δ_t          accuracy of the first minus that of the other on task t
    interval     of Δ_t, over items drawn for both alike (`intervals.py`): both were asked the same
    verdict      wins or loses where the interval excludes 0; tie where it lies within ± TIE; else undecided
    polarised    one task is won and another lost, each by that rule

"Product of Experts" §5.5 reads such a table without intervals, with thresholds on Δ: 0.06 for a loss, 0.03
for a win, less is a near-tie; `paper` is the word that it would use. Tasks are grouped by what it says of
them. Limits: of 22 tasks about one is outside its 95 % interval by chance, so one win is no polarisation.
"""

from typing import Any

import numpy as np

from topograd.evaluation.core import CoreResult, TaskResult
from topograd.evaluation.intervals import mean_interval

TIE = 0.03
LOSS = 0.06
GROUPS = {
    "factual retrieval": ("jeopardy", "squad", "coqa", "bigbench_qa_wikidata"),
    "long-range completion": ("lambada_openai", "hellaswag", "hellaswag_zeroshot"),
    "knowledge": ("winograd", "winogrande", "boolq", "arc_easy", "arc_challenge", "openbook_qa"),
    "commonsense": ("commonsense_qa", "piqa", "copa"),
    "algorithmic": ("bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic"),
    "structural": ("bigbench_dyck_languages", "agi_eval_lsat_ar", "bigbench_language_identification"),
}


def polarisation(first: CoreResult, other: CoreResult) -> dict[str, Any]:
    """The table at full depth, over the tasks that both have, with as many items; the most won first."""
    others = {result.task.label: result for result in other.tasks}
    rows = [_row(result, others[result.task.label]) for result in first.tasks if result.task.label in others]
    rows.sort(key=lambda row: -row["difference"])
    verdicts = [row["verdict"] for row in rows]
    return {
        "tasks": rows,
        "groups": _groups({row["task"]: row["difference"] for row in rows}),
        "wins": verdicts.count("wins"),
        "losses": verdicts.count("loses"),
        "polarised": "wins" in verdicts and "loses" in verdicts,
    }


def _row(first: TaskResult, other: TaskResult) -> dict[str, Any]:
    a, b = first.correct[:, -1:], other.correct[:, -1:]
    difference = float(a.mean() - b.mean())
    [(low, high)] = mean_interval(a - b)
    verdict = "tie" if low > -TIE and high < TIE else "undecided"
    return {
        "task": first.task.label,
        "group": group_of(first.task.label),
        "accuracy": float(a.mean()),
        "other": float(b.mean()),
        "difference": difference,
        "interval": [low, high],
        "verdict": "wins" if low > 0 else "loses" if high < 0 else verdict,
        "paper": "loses" if difference <= -LOSS else "wins" if difference >= TIE else "tie",
    }


def group_of(label: str) -> str:
    """The group of a task."""
    return next(group for group, labels in GROUPS.items() if label in labels)


def _groups(differences: dict[str, float]) -> dict[str, float]:
    """The mean difference of each group that has a task."""
    by_group = {
        group: [differences[label] for label in labels if label in differences]
        for group, labels in GROUPS.items()
    }
    return {group: float(np.mean(values)) for group, values in by_group.items() if values}
