"""A task file of lm-eval's kind, made here: questions with choices, read without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUESTIONS: list[dict[str, Any]] = [
    {"query": "stage", "choices": ["loss", "relay", "of"], "gold": 0},
    {"query": "relay and", "choices": ["a", "the loss"], "gold": 1},
]


def local_task(folder: Path) -> dict[str, Any]:
    """The task over QUESTIONS, whose file is written to a folder."""
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return {
        "task": "local_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1},
    }


def samples_of(model: Any, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """What lm-eval kept of each item, in order, and the accuracy that it reports."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[local_task(folder)],
        task_manager=TaskManager(include_defaults=False),  # none of its own thousands
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
    return samples, found["results"]["local_choices"]["acc,none"]
