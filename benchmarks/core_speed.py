"""CORE's items scored by `topograd` and by lm-eval with transformers: speed, and agreement to the item.

    python benchmarks/core_speed.py RUN TASKS [--items 3] [--only copa,piqa] [--batch 4] [--json]

RUN is an imported model and TASKS a folder of task files. Both get the same requests: contexts with their
examples, and continuations, as lm-eval hands them to a model; it splits them into tokens for both. Ours
reads a context once for all its choices (`evaluation/lm_eval_adapter.py`); lm-eval's HFLM runs every choice
with its context, but one-token choices of a context together. They take turns, task by task, in one process
with as many threads; the model is loaded before, in float32, and contexts are cut to the same length.

A ratio is of times: above 1, ours is faster. Limits: few items; HFLM's batch size is given and not tuned.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from topograd.convert.export import export_model
from topograd.decode.model import load
from topograd.evaluation.lm_eval_adapter import RunLM
from topograd.evaluation.tasks import Item, Task, chosen_tasks, examples, find_files, read_items


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    run: tyro.conf.Positional[Path]
    tasks: tyro.conf.Positional[Path]
    items: int = 3
    """Items of each task."""
    only: str = ""
    batch: int = 4
    threads: int = 2
    json: bool = False


def requests_of(task: Task, items: list[Item], count: int) -> list[Instance]:
    """The items of a task as lm-eval asks them: a request for each choice."""
    pairs = []
    for index in range(min(count, len(items))):
        item = items[index]
        before = "".join(f"{_whole(task, shown)}\n\n" for shown in examples(task, items, index))
        if task.kind == "multiple_choice":
            pairs += [(before + item["query"], task.delimiter + choice) for choice in item["choices"]]
        elif task.kind == "schema":
            end = task.delimiter + item["continuation"]
            pairs += [(before + context, end) for context in item["context_options"]]
        else:
            pairs.append((before + item["context"].strip(), task.delimiter + item["continuation"]))
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def _whole(task: Task, item: Item) -> str:
    if task.kind == "multiple_choice":
        return f"{item['query']}{task.delimiter}{item['choices'][item['gold']]}"
    if task.kind == "schema":
        return f"{item['context_options'][item['gold']]}{task.delimiter}{item['continuation']}"
    return f"{item['context'].strip()}{task.delimiter}{item['continuation']}"


def timed(model: Any, requests: list[Instance]) -> tuple[float, list[tuple[float, bool]]]:
    """Seconds, and the answers."""
    began = time.perf_counter()
    found = model.loglikelihood(requests, disable_tqdm=True)
    return time.perf_counter() - began, found


def measure(settings: Settings) -> dict[str, Any]:
    """Every task by both, taking turns."""
    torch.set_num_threads(settings.threads)
    logging.disable(logging.WARNING)
    model = load(settings.run, runtime="torch")
    ours = RunLM(model)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        export_model(settings.run, folder, "hf")
        theirs = HFLM(
            pretrained=str(folder),
            device="cpu",
            dtype="float32",
            batch_size=settings.batch,
            max_length=ours.max_length,
        )
        rows = []
        tasks = chosen_tasks(tuple(filter(None, settings.only.split(","))))
        files = find_files(settings.tasks, tasks)
        warm = [Instance("loglikelihood", {}, ("warm", " up"), 0)]
        timed(ours, warm), timed(theirs, warm)
        for place_, task in enumerate(task for task in tasks if task.label in files):
            requests = requests_of(task, read_items(task, files[task.label]), settings.items)
            order = [ours, theirs] if place_ % 2 else [theirs, ours]
            found = {id(each): timed(each, requests) for each in order}
            rows.append(_row(task.label, requests, found[id(ours)], found[id(theirs)]))
    total, other = (sum(row[key] for row in rows) for key in ("seconds", "lm_eval_seconds"))
    return {
        "tasks": rows,
        "seconds": total,
        "lm_eval_seconds": other,
        "ratio": other / total,
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "largest_difference": max(row["largest_difference"] for row in rows),
        "greedy_differs": sum(row["greedy_differs"] for row in rows),
        "requests": sum(row["requests"] for row in rows),
        "threads": settings.threads,
        "batch": settings.batch,
    }


def _row(
    label: str,
    requests: list[Instance],
    ours: tuple[float, list[tuple[float, bool]]],
    theirs: tuple[float, list[tuple[float, bool]]],
) -> dict[str, Any]:
    pairs = list(zip(ours[1], theirs[1], strict=True))
    return {
        "task": label,
        "requests": len(requests),
        "seconds": ours[0],
        "lm_eval_seconds": theirs[0],
        "ratio": theirs[0] / ours[0],
        "largest_difference": max(abs(a[0] - b[0]) for a, b in pairs),
        "greedy_differs": sum(a[1] != b[1] for a, b in pairs),
    }


def main() -> None:
    """Print the table, or one JSON object."""
    settings = tyro.cli(Settings)
    found = measure(settings)
    if settings.json:
        print(json.dumps(found))
        return
    for row in found["tasks"]:
        print(
            f"{row['task']:34} {row['seconds']:7.2f} s  lm-eval {row['lm_eval_seconds']:7.2f} s  "
            f"ratio {row['ratio']:5.2f}  largest difference {row['largest_difference']:.1e}"
        )
    print(f"all: ratio {found['ratio']:.2f}, greedy differs in {found['greedy_differs']}")


if __name__ == "__main__":
    main()
