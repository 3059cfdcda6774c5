"""Shares of layers: against finite differences in float64, adding up to what was learned and forgotten."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from topograd.exec.forward import Predictor
from topograd.nn.gpt import GPT
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.runs.tune_config import TuneConfig
from topograd.training.forgetting import Sequences
from topograd.training.layer_shares import ELSEWHERE, has_old_text, layer_shares, shares
from topograd.training.runs import start

Model = tuple[Predictor, dict[str, torch.Tensor], Sequences]


@pytest.fixture
def model() -> Model:
    """A model in float64, weights that it had before, and some text."""
    torch.manual_seed(0)
    stack = GPT(layers=3, width=8, heads=2, vocab=11, context=6).double()
    before = Predictor(copy.deepcopy(stack), "3").state_dict()
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "layers.1" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    inputs, targets = torch.randint(11, (2, 5, 6)).unbind(0)
    return Predictor(stack, "3").requires_grad_(False), before, Sequences(inputs, targets, 40)


def test_shares_are_slopes_along_the_way(model: Model) -> None:
    tuned, before, text = model
    after = {name: p.clone() for name, p in tuned.named_parameters()}
    found = shares(tuned, before, text, points=3)
    assert list(found) == ["1", "2", "3", ELSEWHERE, "rest"]
    assert found["2"] == 0.0
    assert all(torch.equal(p, after[n]) for n, p in tuned.named_parameters()), "it is as it was"

    def bpb(s: float, layer: str, more: float) -> float:
        """With one layer a little further along the way than the others."""
        values = {}
        for name, value in after.items():
            own = name.startswith(f"stack.layers.{int(layer) - 1}.")
            values[name] = before[name] + (s + more * own) * (value - before[name])
        place = copy.deepcopy(tuned)
        place.load_state_dict(values, strict=False)
        nats = F.cross_entropy(place(text.inputs).mT, text.targets, reduction="sum")
        return float(nats) / (math.log(2) * text.nbytes)

    for layer in ("1", "3"):
        slopes = [
            (bpb(s, layer, 1e-5) - bpb(s, layer, -1e-5)) / 2e-5 for s in ((i + 0.5) / 3 for i in range(3))
        ]
        assert found[layer] == pytest.approx(sum(slopes) / 3, rel=1e-4)
    place = copy.deepcopy(tuned)
    place.load_state_dict(before)
    change = text.bits_per_byte(tuned) - text.bits_per_byte(place)
    assert sum(found.values()) == pytest.approx(change, abs=1e-12)
    fine = shares(tuned, before, text, points=48)
    assert abs(fine["rest"]) < 0.1 * abs(found["rest"]), "more points leave less"


def test_a_run_that_was_tuned(straight: Run, tmp_path: Path) -> None:
    """The bars add up to the numbers of the training; a run without old text has none."""
    base = TrainConfig.from_dict(straight.read_config())
    (tmp_path / "new.txt").write_text("ZQ#9 XW%7 " * 200)
    (tmp_path / "old.txt").write_text("Stages predict, and no gradient crosses between them.\n" * 30)
    tune = TuneConfig(lora_rank=2, lora_directions="safe", old_text=str(tmp_path / "old.txt"))
    config = replace(
        base, init=str(straight.folder), data=str(tmp_path / "new.txt"), steps=6, eval_every=0,
        eval_bytes=300, optimizer=replace(base.optimizer, name="adamw", lr_matrix=0.05), tune=tune,
    )  # fmt: skip
    results = start(config, tmp_path / "run").train()
    assert not has_old_text(straight.folder)
    assert has_old_text(tmp_path / "run")
    found = layer_shares(tmp_path / "run")
    assert [row["layer"] for row in found["layers"]] == ["1", "2"]
    for kind in ("learned", "forgotten"):
        assert found[kind] == pytest.approx(results[kind], abs=1e-4)
        assert sum(row[kind] for row in found["layers"]) + found["rest"][kind] == pytest.approx(found[kind])
    assert open_session(tmp_path / "run").step == 6
