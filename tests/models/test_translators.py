"""Exits on a frozen trunk: they start as the logit lens and are fitted to the last stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from topograd.models.own_text import OwnText
from topograd.models.translators import Translator, _fit, exit_readings
from topograd.runs.session import Session


@pytest.mark.parametrize("kind", ["lens", "low-rank", "affine", "swiglu"])
def test_a_translator_starts_as_the_identity(kind: Any) -> None:
    u = torch.randn(3, 8)
    assert torch.equal(Translator(kind, 8)(u), u)


def test_every_exit_is_read(session: Session, text: OwnText) -> None:
    session.stack.requires_grad_(False)
    found = {(row["stage"], row["kind"]): row for row in exit_readings(session, text)}
    assert set(found) == {(1, "lens"), (1, "affine"), (2, "lens"), (2, "affine")}
    assert all(0 <= row["agreement"] <= 1 for row in found.values())
    assert found[1, "affine"]["parameters"] == 16 * 17


def test_fitting_comes_nearer_to_the_last_stage(session: Session, text: OwnText) -> None:
    session.stack.requires_grad_(False)
    stack, states = session.stack, text.take(list(range(16))).states[:, 1:].flatten(0, 1)
    vocab = torch.arange(257)
    wanted = stack.readout(states[:, -1], stack.last_stage, vocab).softmax(-1)

    def loss(translator: Translator) -> float:
        with torch.no_grad():
            said = stack.readout(translator(states[:, 0]), stack.last_stage, vocab)
        return float(F.cross_entropy(said, wanted))

    torch.manual_seed(0)
    fitted = Translator("swiglu", 16)
    before = loss(fitted)
    _fit(stack, fitted, text, range(16), 0, vocab, 40)
    assert loss(fitted) < before - 0.05
