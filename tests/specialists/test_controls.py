"""The control: the same stage with the base's own head trained along moves the base; a dual head does not."""

from __future__ import annotations

from pathlib import Path

import torch

from topograd.runs.session import Session
from topograd.specialists.controls import NAME, read_by, single_head, train
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune
from topograd.training.forward import Predictor

TOKENS = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))


def test_a_single_head_moves_the_base(imported: Session, chats: Path) -> None:
    before = {name: p.clone() for name, p in imported.stack.state_dict().items()}
    control = single_head(imported, layers=1)
    with torch.no_grad():
        assert torch.equal(
            Predictor(control.stack, read_by(control, control.stages[NAME]))(TOKENS),
            Predictor(imported.stack, imported.plan)(TOKENS),
        ), "inserted, it changes nothing"
    inputs, targets = rows_of(chats, control, 16)
    rows = train(control, inputs, targets, FineTune(steps=4, batch=3, save_every=2, rate=1, head_rate=1))
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["base_max_abs_logit_delta"] == 0.0
    assert rows[-1]["base_max_abs_logit_delta"] > 0.01
    assert rows[-1]["loss"] < rows[1]["loss"]
    assert all(torch.equal(p, before[name]) for name, p in imported.stack.state_dict().items())
