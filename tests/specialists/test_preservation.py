"""Preservation: nothing where nothing moved, and the damage where a head was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from topograd.data.loader import IGNORED
from topograd.exec.forward import Predictor
from topograd.runs.session import Held, LoadedTextRun, build_stack
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.preservation import QUESTIONS, Preservation


def test_a_moved_head_is_seen(gpt: LoadedTextRun, tmp_path: Path) -> None:
    before = Preservation(gpt)
    attached = attach(gpt, [new_specialist(tmp_path / "s", gpt)])
    base, on = composed(attached, {}), composed(attached, {"s": 1.0})
    same = before.read(attached.stack, base, on)
    assert same.base_max_abs_logit_delta == 0.0
    assert same.base_bit_identical
    assert same.bpb == same.base_bpb
    head = attached.stack.head
    weight = head.weight.detach().clone()  # type: ignore[union-attr, operator]
    weight[3, 0] += 1e-3
    head.weight = torch.nn.Parameter(weight)  # type: ignore[union-attr]
    moved = before.read(attached.stack, base, on)
    assert moved.base_max_abs_logit_delta > 0
    assert not moved.base_bit_identical
    assert before.read(gpt.stack, gpt.plan).base_bit_identical, "the base's own head is another tensor"


@pytest.fixture
def wide(gpt: LoadedTextRun) -> LoadedTextRun:
    """A base of the same kind that reads every question whole."""
    torch.manual_seed(0)
    model = gpt.config.model.changed(context=64)
    stack, plan = build_stack(replace(gpt.config, model=model))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return replace(gpt, config=replace(gpt.config, model=model), read_stack=Held(stack), plan=plan)


@torch.no_grad()
def test_questions_are_answered_by_the_likeliest(wide: LoadedTextRun) -> None:
    """The choice with the highest mean log-probability, each read by itself."""
    predictor, tokenizer = Predictor(wide.stack, wide.plan), wide.tokenizer
    right = 0
    for question, choices in QUESTIONS:
        begin, means = len(tokenizer.encode(question)), []
        for choice in choices:
            ids = torch.tensor([tokenizer.separator, *tokenizer.encode(question + choice)])
            said = predictor(ids[None, :-1])[0].log_softmax(-1)
            means.append(float(said[range(len(ids) - 1), ids[1:]][begin:].mean()))
        right += max(means) == means[0]
    assert 0 < right < len(QUESTIONS), "else nothing is shown"
    assert Preservation(wide).read(wide.stack, wide.plan).base_choices == right / len(QUESTIONS)


def test_a_model_that_knows_answers_them_all_and_what_is_not_seen_is_not_answered(
    wide: LoadedTextRun, gpt: LoadedTextRun
) -> None:
    short = sum(len(question) < gpt.config.model.context for question, _ in QUESTIONS)
    assert 0 < short < len(QUESTIONS), "of bytes"
    for base, share in ((wide, 1.0), (gpt, short / len(QUESTIONS))):
        reading = Preservation(base)
        row, column = (reading.choice_targets != IGNORED).nonzero(as_tuple=True)
        known = F.one_hot(reading.choice_targets[row, column], len(base.tokenizer.pieces)).float()
        assert reading.answered(torch.where(row[:, None] % 3 == 0, 9 * known, -9 * known)) == share
        assert reading.answered(torch.where(row[:, None] % 3 == 1, 9 * known, -9 * known)) == 0.0
