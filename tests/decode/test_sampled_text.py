"""Text that a model draws by itself follows its own probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch

from topograd.decode.sampled_text import sampled_text
from topograd.exec.forward import Predictor
from topograd.runs.session import LoadedTextRun


def test_rows_are_drawn_from_the_model(make_session: Callable[..., LoadedTextRun]) -> None:
    session = make_session(2)
    rows = sampled_text(session, 600, 3, seed=1)
    assert rows.shape == (600, 3)
    assert torch.equal(rows, sampled_text(session, 600, 3, seed=1))
    assert not torch.equal(rows, sampled_text(session, 600, 3, seed=2))
    with torch.no_grad():
        first = torch.full((1, 1), session.tokenizer.separator)
        wanted = Predictor(session.stack, session.plan)(first)[0, 0].softmax(-1)
        seen = torch.bincount(rows[:, 0], minlength=len(wanted)) / len(rows)
        # Three standard deviations of a share of 600 draws, for every token at once.
        assert ((seen - wanted).abs() <= 4 * (wanted * (1 - wanted) / 600).sqrt() + 2 / 600).all()
