"""CORE tasks: labels, files, few-shot counts, baselines and items.

CORE ("DataComp-LM", its low-variance set of 22 tasks) as nanochat computes it: the mean over labels of

    centred = (accuracy - b) / (1 - b),        b the baseline of the label

Two conventions of b. v1 has chance, or what always naming the commonest answer gives; v2 changes three.

A folder of task files is given by the user; a file is found by its name, wherever it lies in the folder.
Every line is checked before anything runs.

An item is one of three kinds:

    multiple choice      {"query", "choices", "gold"}                    which choice has the least mean loss
    schema               {"context_options", "continuation", "gold"}     which context makes it likelier
    language modelling   {"context", "continuation"}                     whether every token is the argmax
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from topograd.errors import ConfigError, DataError
from topograd.files import read_bytes

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Item = dict[str, Any]
Baselines = Literal["v1", "v2"]

SHUFFLE_SEED = 1337
SHOT_SEED = 1234
MAX_CHOICES = 100
ANSWER = "\nAnswer: "


@dataclass(frozen=True)
class Task:
    """One label of CORE."""

    label: str
    kind: Kind
    file: str
    shots: int
    chance: float
    """Baseline in v1, in per cent."""
    chance_v2: float
    delimiter: str = " "

    def baseline(self, convention: Baselines = "v1") -> float:
        """b, as a share."""
        return 0.01 * (self.chance if convention == "v1" else self.chance_v2)

    def centred(self, accuracy: float, convention: Baselines = "v1") -> float:
        """(accuracy - b) / (1 - b)."""
        b = self.baseline(convention)
        return (accuracy - b) / (1 - b)


def _choice(label: str, shots: int, chance: float, v2: float | None = None, **more: str) -> Task:
    file = more.pop("file", f"{label}.jsonl")
    return Task(label, "multiple_choice", file, shots, chance, chance if v2 is None else v2, **more)


def _language(label: str, shots: int, **more: str) -> Task:
    file = more.pop("file", f"{label}.jsonl")
    return Task(label, "language_modeling", file, shots, 0.0, 0.0, **more)


_ALL = (
    _choice("hellaswag_zeroshot", 0, 25.0, file="hellaswag.jsonl"),
    _language("jeopardy", 10, file="jeopardy_all.jsonl", delimiter=ANSWER),
    _language("bigbench_qa_wikidata", 10),
    _choice("arc_easy", 10, 25.0, delimiter=ANSWER),
    _choice("arc_challenge", 10, 25.0, delimiter=ANSWER),
    _choice("copa", 0, 50.0),
    _choice("commonsense_qa", 10, 20.0, 40.3),
    _choice("piqa", 10, 50.0, delimiter=ANSWER),
    _choice("openbook_qa", 0, 25.0),
    _language("lambada_openai", 0),
    _choice("hellaswag", 10, 25.0),
    Task("winograd", "schema", "winograd_wsc.jsonl", 0, 50.0, 50.0),
    Task("winogrande", "schema", "winogrande.jsonl", 0, 50.0, 50.0),
    _language("bigbench_dyck_languages", 10),
    _choice("agi_eval_lsat_ar", 3, 20.0, 25.0),
    _language("bigbench_cs_algorithms", 10),
    _language("bigbench_operators", 10),
    _language("bigbench_repeat_copy_logic", 10),
    _language("squad", 10),
    _language("coqa", 0),
    _choice("boolq", 10, 62.0, delimiter=ANSWER),
    _choice("bigbench_language_identification", 10, 9.1, 25.0),
)
TASKS: Mapping[str, Task] = {task.label: task for task in _ALL}


def chosen_tasks(only: Sequence[str] = ()) -> list[Task]:
    """The tasks with these labels, in CORE's order, or all."""
    for label in only:
        if label not in TASKS:
            raise ConfigError(setting="task", given=label, allowed=f"some of {', '.join(TASKS)}")
    return [task for label, task in TASKS.items() if not only or label in only]


def core_name(tasks: int) -> str:
    """What a mean over this many labels may be called."""
    return "CORE" if tasks == len(TASKS) else f"CORE-{tasks}"


def find_files(folder: Path, tasks: Sequence[Task]) -> dict[str, Path]:
    """The file of each task that has one in the folder, by label."""
    if not folder.is_dir():
        remedy = "give one that holds task files such as copa.jsonl"
        raise DataError(f"{folder} is no folder", setting="folder", given=folder, remedy=remedy)
    wanted = {task.file for task in tasks}
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if path.name in wanted and path.is_file():
            files.setdefault(path.name, path)
    return {task.label: files[task.file] for task in tasks if task.file in files}


def read_items(task: Task, path: Path) -> list[Item]:
    """Every item of a task's file, in nanochat's order; one that cannot be scored is refused."""
    try:
        lines = read_bytes(path).decode().split("\n")  # a text may hold other ends of lines
    except OSError as problem:
        raise DataError(f"{path} cannot be read ({problem.strerror})", setting="file", given=path) from None
    except UnicodeDecodeError:
        remedy = "give a task file in JSON lines"
        raise DataError(f"{path} is not UTF-8", setting="file", given=path, remedy=remedy) from None
    items = [_item(task, path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if len(items) <= task.shots:
        message = f"{path} has {len(items)} items and {task.label} shows {task.shots} of them before each"
        raise DataError(message, setting="items", given=len(items), remedy=f"give at least {task.shots + 1}")
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items


def examples(task: Task, items: Sequence[Item], index: int, limit: int | None = None) -> list[Item]:
    """The items that are shown before item `index`: drawn, with a seed of its own, from those in use.

    Where the limit leaves too few to draw from, as many as are needed are in use.
    """
    if not task.shots:
        return []
    pool = len(items) if limit is None else min(len(items), max(limit, task.shots + 1))
    others = [i for i in range(pool) if i != index]
    return [items[i] for i in random.Random(SHOT_SEED + index).sample(others, task.shots)]


def _item(task: Task, path: Path, number: int, line: str) -> Item:
    where = f"{path} line {number}"
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        remedy = f"an item of {task.label} is one"
        raise DataError(f"{where} is no JSON object", setting="line", given=where, remedy=remedy)
    texts, options = _KEYS[task.kind]
    for key in texts:
        if not isinstance(item.get(key), str) or (key == "continuation" and not item[key].strip()):
            remedy = f"an item of {task.label} needs that text"
            raise DataError(f"{where} has no {key!r}", setting=key, remedy=remedy)
    if options is not None:
        _check_gold(task, where, item, options)
    return item


_KEYS: Mapping[Kind, tuple[tuple[str, ...], str | None]] = {
    "multiple_choice": (("query",), "choices"),
    "schema": (("continuation",), "context_options"),
    "language_modeling": (("context", "continuation"), None),
}
"""The texts of an item of each kind, and its list of options."""


def _check_gold(task: Task, where: str, item: Item, options: str) -> None:
    given, gold = item.get(options), item.get("gold")
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        remedy = f"an item of {task.label} needs a list of texts"
        raise DataError(f"{where} has no {options!r}", setting=options, remedy=remedy)
    if not 2 <= len(given) <= MAX_CHOICES:
        problem, remedy = f"{where} has {len(given)} {options}", f"give 2 to {MAX_CHOICES}"
        raise DataError(problem, setting=options, given=len(given), remedy=remedy)
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(given):
        problem = f"{where} has no gold answer (gold is {gold!r})"
        remedy = f"give one of 0 to {len(given) - 1}, or leave the item out"
        raise DataError(problem, setting="gold", given=gold, remedy=remedy)
