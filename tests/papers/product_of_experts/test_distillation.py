"""The study of teachers: what its students see, and how facts are read."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from papers.outcome import asked
from papers.product_of_experts import distillation as study
from papers.product_of_experts.facts import COUNTRIES


@pytest.fixture(scope="module")
def given() -> study.Given:
    config = study.config_of(asked("distillation", "tiny"), 3)
    return study.Given(config, study.School(config))


def _texts(given: study.Given, batches: list[tuple[Tensor, Tensor]]) -> str:
    return " ".join(bytes(t for t in inputs[-1].tolist() if t < 256).decode() for inputs, _ in batches)


def test_hidden_facts_are_the_teachers_alone(given: study.Given) -> None:
    told = _texts(given, given.school.batches(60, ("common", "rare"), 0))
    every = _texts(given, given.school.batches(60, study.KINDS, 0))
    subjects = {kind: [fact.subject for fact in facts] for kind, facts in given.school.facts.items()}
    assert not any(name in told for name in subjects["hidden"])
    assert any(name in every for name in subjects["hidden"])
    counts = {kind: sum(told.count(name) for name in subjects[kind]) for kind in ("common", "rare")}
    assert counts["common"] > 2 * counts["rare"] > 0


def test_targets_follow_inputs(given: study.Given) -> None:
    for inputs, targets in given.school.batches(2, ("common",), 0):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


class _Knows(nn.Module):
    """Writes one text whatever it reads: the next byte has probability 1/2, the rest is spread."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, inputs: Tensor) -> Tensor:
        logits = torch.full((*inputs.shape, 257), math.log(0.5 / 256))
        for place in range(min(inputs.shape[1], len(self.tokens) - 1)):
            logits[:, place, self.tokens[place + 1]] = math.log(0.5)
        return logits


def test_the_likeliest_answer_is_the_one_that_a_model_writes(given: study.Given) -> None:
    fact = given.school.facts["rare"][0]
    model = _Knows(given.school.tokens(f"{fact.prompt} {fact.answer}."))
    table = given.school.answers(model, fact)
    assert COUNTRIES[table.index(max(table))] == fact.answer
    assert max(table) == pytest.approx((len(fact.answer) + 2) * math.log(0.5), abs=1e-5)


def test_a_taught_student_differs_and_the_longer_one_sees_the_same_first(given: study.Given) -> None:
    steps = given.config.steps
    assert len(given.lessons) == round(study.LONGER * steps)
    rows = {arm.name: given.learn(arm, 1.0) for arm in study.ARMS if arm.name in (study.STAGED, study.TAUGHT)}
    assert rows[study.STAGED]["bpb"] != rows[study.TAUGHT]["bpb"]
    alike = partial(given.learn, study.ARMS[0], 1.0)
    assert alike()["bpb"] == rows[study.STAGED]["bpb"]
