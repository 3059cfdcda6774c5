"""The masked encoder: what is hidden, who sees whom, an exact scan, and the study in miniature."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from papers.latent_bounded_interfaces import masked_encoder as study
from papers.latent_bounded_interfaces.masked_encoder import MODELS, build, kept, scan_error
from papers.outcome import asked
from papers.run import run_study
from papers.staged_runs import Sizes
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.data.masked import hide
from topograd.exec.forward import stage_outputs
from topograd.exec.gradient import Autograd, GradientEngine
from topograd.exec.train_step import train_step


def test_hidden_bytes_are_the_targets() -> None:
    inputs = torch.randint(256, (50, 40))
    given, targets = hide(inputs, 257, torch.Generator().manual_seed(0))
    hidden = given == 257
    assert torch.equal(targets != -100, hidden)
    assert torch.equal(targets[hidden], inputs[hidden])
    assert torch.equal(given[~hidden], inputs[~hidden])
    assert 0.12 < hidden.double().mean() < 0.19
    assert hide(inputs[:, :1], 257, torch.Generator())[0].eq(257).all(), "one in a row at least"


def test_all_positions_are_seen(sizes: Sizes) -> None:
    config = sizes.config(0).gpt.changed(context=8)
    for model in MODELS:
        stack, plan = build(model, config, 0)
        for p in stack.parameters():
            torch.nn.init.normal_(p, std=0.3)
        last = len(plan.stages) - 1
        inputs = torch.randint(256, (1, 8))
        other = inputs.clone()
        other[0, 7] += 1
        moved = (
            stage_outputs(stack, plan, other, [last])[last] - stage_outputs(stack, plan, inputs, [last])[last]
        )
        assert moved[0, 0].any(), "the first position hears the last"


def test_the_scan_is_exact_both_ways_and_its_error_is_seen(
    sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, plan = build(MODELS[2], sizes.config(0).gpt.changed(context=8), 0)
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.3)
    inputs, targets = hide(torch.randint(256, (2, 8)), 257, torch.Generator().manual_seed(1))
    assert scan_error(stack.double(), plan, inputs, targets) < 1e-12

    def wrong(*given: Any, gradient: GradientEngine) -> None:
        train_step(*given, scale=1.0 if isinstance(gradient, Autograd) else 1.01)

    monkeypatch.setattr(study, "train_step", wrong)
    assert scan_error(stack, plan, inputs, targets) == pytest.approx(0.01, abs=1e-6)


def made_up(**loss: float) -> list[dict[str, Any]]:
    """Dense 1.0, shallow 2.0, and the joined models as they are said to be."""
    base = {"dense": 1.0, "shallow": 2.0} | dict.fromkeys(study.JOINED, 1.9)
    rows = []
    for seed in range(3):
        for name, ce in (base | {study.JOINED[int(key[1])]: value for key, value in loss.items()}).items():
            noisy = ce + 1e-3 * seed * len(name)
            rows.append({"model": name, "seed": seed, "ce": noisy, "shuffled": noisy + 0.1 + 0.01 * seed})
    return rows


def test_verdicts() -> None:
    found = {claim.name: claim.verdict for claim in study._claims(made_up(j2=1.2))}
    assert found == {
        "depth": HELD,
        "a whole state is heard": HELD,
        "a whole state helps": HELD,
        "a whole state carries depth": FAILED,
        "positions carry more": HELD,
    }
    assert kept(made_up(j0=1.5), study.JOINED[0]) == pytest.approx([0.5] * 3, abs=0.02)
    better = {claim.name: claim.verdict for claim in study._claims(made_up(j0=1.2))}
    assert better["a whole state carries depth"] == HELD


def test_the_study_in_miniature(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(sizes, width=8, context=16, batch=2, steps=2)
    monkeypatch.setattr(study, "_config", lambda asked, seed: small.config(seed))
    told: list[tuple[int, int]] = []
    record = run_study(asked("masked-encoder", "tiny", seeds=1, on_more=lambda *done: told.append(done)))
    assert record["verdict"] == UNDECIDED, "one seed"
    assert told[-1] == (5, 5)
    assert any("float64" in words for words in record["findings"])
    json.dumps(record)
