"""CORE as computed the slow way, at every depth; a kill loses nothing; both conventions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raising import refused
from tests.oracles.scoring import least_loss, token_logprobs
from topograd.decode.model import Model
from topograd.errors import DataError
from topograd.evaluation import core
from topograd.evaluation.core import CoreRequest, CoreResult, TaskResult, evaluate_core, log_name
from topograd.evaluation.prompts import bundle_of
from topograd.evaluation.tasks import TASKS, examples, find_files, read_items


def test_answers_are_those_of_the_slow_way(model: Model, tasks: Path) -> None:
    found = evaluate_core(model, CoreRequest(tasks))
    stack, plan = model.session.stack, model.session.plan
    assert [result.task.label for result in found.tasks] == [
        label for label in TASKS if label in ("copa", "winograd", "lambada_openai", "bigbench_qa_wikidata")
    ]
    for result in found.tasks:
        task = result.task
        items = read_items(task, find_files(tasks, [task])[task.label])
        assert result.correct.shape == (len(items), 2)
        for index, item in enumerate(items):
            rows, _ = bundle_of(task, item, examples(task, items, index), model.session.tokenizer, 16)
            for k, stage in enumerate(plan.predicting()):
                terms = plan.prediction.after(stage)
                if task.kind == "language_modeling":
                    slow = token_logprobs(stack, plan, rows[0].tokens, rows[0].start, terms)
                    right = all(rank == 1 for _, rank in slow)
                else:
                    right = (
                        least_loss([(r.tokens, r.start) for r in rows], stack, plan, stage) == item["gold"]
                    )
                assert result.correct[index, k] == right
    assert len(found.absent) == 18
    answer = found.as_dict()
    assert answer["name"] == "CORE-4"
    means = [task["centered"] for task in answer["tasks"].values()]
    assert answer["core"] == pytest.approx(np.mean(means, axis=0))
    assert answer["tasks"]["copa"]["centered"][0] == pytest.approx(
        (answer["tasks"]["copa"]["accuracy"][0] - 0.5) / 0.5
    )
    assert answer["tasks"]["bigbench_qa_wikidata"]["cut"] == 14, "ten examples are more than 16 tokens"


def test_a_killed_evaluation_goes_on_to_the_same_numbers(
    model: Model, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "BLOCK", 3)
    request = CoreRequest(tasks)
    whole = tmp_path / "whole.jsonl"
    expected = evaluate_core(model, request, whole).as_dict()
    cut = tmp_path / "cut.jsonl"
    data = whole.read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    scored = []
    score = core.Scorer.score

    def counted(self: core.Scorer, bundles: list[list[core.TokenRow]]) -> list[list[core.Score]]:
        scored.append(len(bundles))
        return score(self, bundles)

    monkeypatch.setattr(core.Scorer, "score", counted)
    assert evaluate_core(model, request, cut).as_dict() == expected
    assert 0 < sum(scored) < 29
    again = {(r["task"], r["item"]): r for r in map(json.loads, cut.read_text().splitlines()[1:])}
    assert again == {(r["task"], r["item"]): r for r in map(json.loads, whole.read_text().splitlines()[1:])}
    scored.clear()
    evaluate_core(model, request, cut)
    assert not scored


def test_a_limit_takes_the_first_of_the_shuffle(model: Model, tasks: Path) -> None:
    request = CoreRequest(tasks, ("copa", "winograd"))
    whole = evaluate_core(model, request)
    some = evaluate_core(model, CoreRequest(tasks, ("copa", "winograd"), limit=2))
    for a, b in zip(whole.tasks, some.tasks, strict=True):
        assert np.array_equal(a.correct[:2], b.correct)
    assert some.absent == []
    assert log_name(model, request) != log_name(model, CoreRequest(tasks, ("copa",)))
    assert log_name(model, request) == log_name(model, CoreRequest(tasks, ("winograd", "copa")))


def test_one_depth_is_one_column(model: Model, tasks: Path) -> None:
    every = evaluate_core(model, CoreRequest(tasks, ("winograd",)))
    first = evaluate_core(model, CoreRequest(tasks, ("winograd",), depth="prefix:1"))
    assert np.array_equal(first.tasks[0].correct[:, 0], every.tasks[0].correct[:, 0])


def test_conventions_and_names() -> None:
    half = np.tile([[1.0], [0.0]], (5, 1))
    some = CoreResult([TaskResult(TASKS[label], half, 0) for label in ("commonsense_qa", "copa")])
    assert some.core("v1") == pytest.approx([(0.3 / 0.8) / 2])
    assert some.core("v2") == pytest.approx([(0.097 / 0.597) / 2])
    every = CoreResult([TaskResult(task, half, 0) for task in TASKS.values()])
    assert every.as_dict()["name"] == "CORE"


def test_a_folder_without_tasks_is_refused(model: Model, tmp_path: Path) -> None:
    with refused(DataError, setting="folder"):
        evaluate_core(model, CoreRequest(tmp_path, ("copa",)))
