"""The controls: the base's own head trained along, and LoRA on the base, move it; a dual head does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from papers.product_of_experts.controls import NAME, lora, read_by, single_head, train
from topograd.exec.forward import Predictor
from topograd.nn.transformer.parts import TransposedLinear
from topograd.runs.session import LoadedTextRun
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune

TOKENS = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))


def test_a_single_head_moves_the_base(imported: LoadedTextRun, chats: Path) -> None:
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


@pytest.mark.parametrize("which", ["gpt", "imported"])
def test_lora_moves_the_base_while_it_is_on(bases: dict[str, LoadedTextRun], which: str, chats: Path) -> None:
    base = bases[which]
    before = {name: p.clone() for name, p in base.stack.state_dict().items()}
    per_rank = sum(
        sum(m.weight.shape)
        for m in base.stack.layers.modules()
        if isinstance(m, nn.Linear | TransposedLinear)
    )
    control = lora(base, parameters=2 * per_rank + 1)
    learning = [p for p in control.stack.parameters() if p.requires_grad]
    assert sum(p.numel() for p in learning) == 2 * per_rank
    inputs, targets = rows_of(chats, control, 16)
    rows = train(control, inputs, targets, FineTune(steps=4, batch=3, save_every=2))
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["base_max_abs_logit_delta"] == 0.0
    assert rows[-1]["base_max_abs_logit_delta"] > 1e-4
    assert rows[-1]["bpb"] == rows[-1]["base_bpb"], "there is one path only"
    assert all(torch.equal(p, before[name]) for name, p in base.stack.state_dict().items())
    assert all(p.abs().max() > 0 for name, p in control.stack.named_parameters() if name.endswith("lora_b"))
