"""Preservation: nothing where nothing moved, and the damage where a head was trained on."""

from __future__ import annotations

from pathlib import Path

import torch

from topograd.runs.session import Session
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.preservation import QUESTIONS, Preservation


def test_a_moved_head_is_seen(gpt: Session, tmp_path: Path) -> None:
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


def test_questions_are_answered_by_the_likeliest(gpt: Session) -> None:
    """A model that knows the first token of every right answer answers them all."""
    reading = Preservation(gpt)
    assert 0 <= reading.read(gpt.stack, gpt.plan).base_choices <= 1
    assert all(len(set(choices)) == 3 for _, choices in QUESTIONS)
