"""CORE benchmark at every depth: items, choices, a log of items, and the centred mean.

    accuracy_k    share of a task's items that depth k answers as its file says
    centred_k     (accuracy_k - b) / (1 - b)                             `tasks.py`
    CORE_k        mean of centred_k over the labels; called CORE-n unless all 22 were there

One pass over the items gives every depth (`scoring.py`). Intervals are of a bootstrap over items
(`intervals.py`): they say how far another sample of items would move a number, and nothing of another
training; seven identical trainings of nanochat span 0.2512 to 0.2677.

Items are scored in blocks that depend on nothing but their place, and each block is logged when it is done
(`item_log.py`): an evaluation that was killed resumes at the block that it was in, to the same numbers.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from topograd.decode.model import Model
from topograd.errors import DataError
from topograd.evaluation.intervals import core_interval, mean_interval
from topograd.evaluation.item_log import ItemLog, Record
from topograd.evaluation.prompts import bundle_of
from topograd.evaluation.scoring import BATCH_TOKENS, Score, Scorer, TokenRow
from topograd.evaluation.tasks import (
    Baselines,
    Item,
    Task,
    chosen_tasks,
    core_name,
    examples,
    find_files,
    read_items,
)
from topograd.files import sha256

BLOCK = 32
"""Items that are scored and logged together; batches are cut from them."""
OnTask = Callable[[str, int, int], None]
"""Called with a label, how many of its items are done, and of how many."""


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What a model made of a task's items."""

    task: Task
    correct: np.ndarray
    """(items, depths) of 0 and 1."""
    cut: int
    """Items of which a prompt was longer than the model's context."""

    @property
    def accuracy(self) -> list[float]:
        return [float(x) for x in self.correct.mean(0)]

    def as_dict(self, baselines: Baselines) -> dict[str, Any]:
        """Plain numbers, an entry for each depth."""
        accuracy = self.accuracy
        return {
            "accuracy": accuracy,
            "centered": [self.task.centred(x, baselines) for x in accuracy],
            "interval": [list(pair) for pair in mean_interval(self.correct)],
            "items": len(self.correct),
            "cut": self.cut,
            "shots": self.task.shots,
            "kind": self.task.kind,
            "baseline": self.task.baseline(baselines),
        }


@dataclass(frozen=True, eq=False)
class CoreResult:
    """Every task that had a file, and the labels that had none."""

    tasks: list[TaskResult]
    absent: list[str] = field(default_factory=list)

    def core(self, baselines: Baselines = "v1") -> list[float]:
        """The mean of the centred accuracies, for each depth."""
        rows = [[r.task.centred(x, baselines) for x in r.accuracy] for r in self.tasks]
        return [float(x) for x in np.mean(rows, axis=0)]

    def as_dict(self, baselines: Baselines = "v1") -> dict[str, Any]:
        """What `eval core --json` prints."""
        chance = [r.task.baseline(baselines) for r in self.tasks]
        return {
            "name": core_name(len(self.tasks)),
            "core": self.core(baselines),
            "interval": [list(pair) for pair in core_interval([r.correct for r in self.tasks], chance)],
            "tasks": {r.task.label: r.as_dict(baselines) for r in self.tasks},
            "absent": self.absent,
            "baselines": baselines,
        }


@dataclass(frozen=True)
class CoreRequest:
    """Which tasks are to be scored, and how."""

    folder: Path
    only: tuple[str, ...] = ()
    limit: int | None = None
    depth: str | None = None
    batch_tokens: int = BATCH_TOKENS
    added: tuple[tuple[str, str, float], ...] = ()
    """Specialists that are active in the model: name, digest and weight, for the log."""


def evaluate_core(
    model: Model, request: CoreRequest, log: Path | None = None, on_task: OnTask | None = None
) -> CoreResult:
    """Score a model on the tasks whose files are in the folder; what `log` holds of them is taken from it."""
    tasks = chosen_tasks(request.only)
    files = find_files(request.folder, tasks)
    if not files:
        problem = f"{request.folder} holds no file of these tasks"
        remedy = f"it should hold some such as {', '.join(task.file for task in tasks[:4])}"
        raise DataError(problem, setting="folder", given=request.folder, remedy=remedy)
    absent = [task.label for task in tasks if task.label not in files]
    items = {task.label: read_items(task, files[task.label]) for task in tasks if task.label in files}
    scorer = Scorer(model.engine, request.depth, batch_tokens=request.batch_tokens, session=model.session)
    header = _header(model, request, files)
    with ItemLog(log, header) as items_done:
        results = [
            _evaluate_task(model, scorer, task, items[task.label], request.limit, items_done, on_task)
            for task in tasks
            if task.label in files
        ]
    return CoreResult(results, absent)


def _evaluate_task(
    model: Model,
    scorer: Scorer,
    task: Task,
    items: Sequence[Item],
    limit: int | None,
    log: ItemLog,
    on_task: OnTask | None,
) -> TaskResult:
    count = len(items) if limit is None else min(limit, len(items))
    for start in range(0, count, BLOCK):
        block = range(start, min(start + BLOCK, count))
        if not log.has(task.label, block):
            log.write(_score_block(model, scorer, task, items, limit, block))
        if on_task is not None:
            on_task(task.label, block.stop, count)
    records = [log.done[task.label, index] for index in range(count)]
    correct = np.array([record["correct"] for record in records], dtype=np.float64)
    return TaskResult(task, correct, sum(record["cut"] for record in records))


def _score_block(
    model: Model, scorer: Scorer, task: Task, items: Sequence[Item], limit: int | None, block: range
) -> list[Record]:
    tokenizer = model.session.tokenizer
    each = [
        bundle_of(task, items[i], examples(task, items, i, limit), tokenizer, scorer.context) for i in block
    ]
    scores = scorer.score([bundle for bundle, _ in each])
    return [
        {"task": task.label, "item": i, **judged(task, items[i], bundle, each_score), "cut": bool(cut)}
        for i, (bundle, cut), each_score in zip(block, each, scores, strict=True)
    ]


def judged(task: Task, item: Item, bundle: Sequence[TokenRow], scores: Sequence[Score]) -> dict[str, Any]:
    """Which depths answer an item right; and by what numbers, depth by depth."""
    tokens = [len(row.tokens) - row.start for row in bundle]
    if task.kind == "language_modeling":
        [score] = scores
        right = [bool(x) for x in score.greedy.all(-1)]
        return {"correct": right, "logprob": score.total, "tokens": tokens}
    losses = [list(each) for each in zip(*(score.mean_loss for score in scores), strict=True)]
    answers = [each.index(min(each)) for each in losses]
    right = [answer == item["gold"] for answer in answers]
    return {"correct": right, "answer": answers, "losses": losses, "tokens": tokens}


def _header(model: Model, request: CoreRequest, files: dict[str, Path]) -> dict[str, Any]:
    """What a log is of: the same header means the same numbers, but for the last bits."""
    session = model.session
    digests = {label: sha256(path) for label, path in files.items()}
    added = {"specialists": [list(each) for each in request.added]} if request.added else {}
    return {
        "log": "topograd core 1",
        "weights": session.weights,
        "tokenizer": session.tokenizer.digest,
        "context": model.engine.context,
        "topology": str(session.config.topology),
        "depth": request.depth,
        "limit": request.limit,
        "files": digests,
        **added,
    }


def log_name(model: Model, request: CoreRequest) -> str:
    """A name for the log of a request: others have others."""
    files = find_files(request.folder, chosen_tasks(request.only))
    text = json.dumps(_header(model, request, files), sort_keys=True)
    return f"core-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
