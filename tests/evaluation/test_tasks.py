"""The table of CORE, and files that are checked before anything runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from raising import refused
from topograd.errors import ConfigError, DataError
from topograd.evaluation.tasks import TASKS, chosen_tasks, core_name, examples, find_files, read_items


def test_the_table_is_cores() -> None:
    assert len(TASKS) == 22
    assert core_name(22) == "CORE"
    assert core_name(18) == "CORE-18"
    by_kind: dict[str, int] = {}
    for task in TASKS.values():
        by_kind[task.kind] = by_kind.get(task.kind, 0) + 1
    assert by_kind == {"multiple_choice": 11, "schema": 2, "language_modeling": 9}
    changed = {label for label, task in TASKS.items() if task.chance != task.chance_v2}
    assert changed == {"commonsense_qa", "agi_eval_lsat_ar", "bigbench_language_identification"}


def test_accuracies_are_centred_by_chance() -> None:
    assert TASKS["copa"].centred(0.75) == pytest.approx(0.5)
    assert TASKS["copa"].centred(0.5) == 0
    assert TASKS["jeopardy"].centred(0.3) == pytest.approx(0.3)
    assert TASKS["boolq"].centred(0.5) == pytest.approx((0.5 - 0.62) / 0.38)
    assert TASKS["commonsense_qa"].centred(0.5, "v2") == pytest.approx((0.5 - 0.403) / 0.597)


def test_a_text_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    """JSON allows them inside of strings: only a line feed ends an item."""
    item = {"query": "a\u2028b\x85c", "choices": ["x", "y"], "gold": 1}
    file = tmp_path / "copa.jsonl"
    file.write_text(json.dumps(item, ensure_ascii=False) + "\r\n\n", encoding="utf-8", newline="")
    assert read_items(TASKS["copa"], file)[0]["query"] == item["query"]


def test_tasks_are_chosen_by_label() -> None:
    assert [task.label for task in chosen_tasks(["piqa", "copa"])] == ["copa", "piqa"]
    with refused(ConfigError, setting="task", given="copi"):
        chosen_tasks(["copa", "copi"])


def test_files_are_found_wherever_they_lie(tasks: Path) -> None:
    found = find_files(tasks, chosen_tasks())
    assert set(found) == {"copa", "winograd", "lambada_openai", "bigbench_qa_wikidata"}
    with refused(DataError, setting="folder"):
        find_files(tasks / "none", chosen_tasks())


def test_items_are_shuffled_and_examples_drawn_as_nanochat_does(tasks: Path) -> None:
    task = TASKS["bigbench_qa_wikidata"]
    path = find_files(tasks, [task])[task.label]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(1337).shuffle(lines)
    items = read_items(task, path)
    assert items == lines
    places = random.Random(1234 + 3).sample([i for i in range(14) if i != 3], 10)
    assert examples(task, items, 3) == [lines[i] for i in places]
    places = random.Random(1234 + 3).sample([i for i in range(12) if i != 3], 10)
    assert examples(task, items, 3, limit=12) == [lines[i] for i in places]
    few = examples(task, items, 1, limit=2)
    assert all(example in lines[:11] for example in few), "as many as are needed are in use"
    assert examples(TASKS["copa"], items, 0) == []


@pytest.mark.parametrize(
    ("item", "setting", "given"),
    [
        ({"query": "q", "choices": ["a", "b"]}, "gold", None),
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, "gold", 2),
        ({"query": "q", "choices": ["a", "b"], "gold": True}, "gold", True),
        ({"choices": ["a", "b"], "gold": 0}, "query", None),
        ({"query": "q", "choices": ["a"], "gold": 0}, "choices", 1),
        ({"query": "q", "choices": "ab", "gold": 0}, "choices", None),
        ([1], "line", None),
    ],
)
def test_an_item_that_cannot_be_scored_is_named(
    tmp_path: Path, item: Any, setting: str, given: object
) -> None:
    good = {"query": "q", "choices": ["a", "b"], "gold": 0}
    file = tmp_path / "copa.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(item)}\n", encoding="utf-8")
    with refused(DataError, setting=setting) as caught:
        read_items(TASKS["copa"], file)
    assert "line 2" in str(caught.value)
    if setting != "line":
        assert getattr(caught.value, "given", None) == given


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "copa.jsonl"
    file.write_text("{", encoding="utf-8")
    with refused(DataError, setting="line"):
        read_items(TASKS["copa"], file)
    file.write_bytes(b"\xff\xfe")
    with refused(DataError, setting="file"):
        read_items(TASKS["copa"], file)
    file.write_text("", encoding="utf-8")
    with refused(DataError, setting="items", given=0):
        read_items(TASKS["copa"], file)
    file.write_text('{"context": "a", "continuation": " "}\n', encoding="utf-8")
    with refused(DataError, setting="continuation"):
        read_items(TASKS["lambada_openai"], file)
