"""Losses of compositions: those of the composed model, with the base run once."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from topograd.exec.forward import Predictor
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.interference import default_compositions, interference, token_losses


@torch.no_grad()
def test_losses_are_those_of_the_composed_model(gpt: LoadedTextRun, tmp_path: Path) -> None:
    attached = attach(gpt, [new_specialist(tmp_path / name, gpt, seed=ord(name)) for name in ("a", "b")])
    for name in attached.stages:
        for parameter in attached.part(name).parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    inputs = torch.randint(200, (5, 9), generator=torch.Generator().manual_seed(0))
    targets = inputs.roll(-1, 1)
    targets[:, 6:] = targets[1] = -100
    weights = {"a": 0.4, "b": 1.0}
    chosen = default_compositions(attached, weights)
    assert list(chosen) == ["base", "a", "b", "together"]
    found = token_losses(attached, list(chosen.values()), inputs, targets, batch=2)
    for each, losses in zip(chosen.values(), found, strict=True):
        logits = Predictor(attached.stack, composed(attached, each))(inputs)
        expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    (row,) = interference(attached, {"t": (inputs, targets)}, chosen)
    assert row["tokens"] == 24
    assert row["nats"]["together"] > 0
