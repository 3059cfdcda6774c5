"""Fits find the best weights, confidence is read as it says, and the study judges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from papers.outcome import asked
from papers.product_of_experts.composition import (
    ARMS,
    PLAIN,
    POOLS,
    SHARED,
    SHRUNK,
    claims,
    fit_weights,
    run,
    surer_share,
)
from papers.staged_runs import PRESETS


def logits_of(weights: list[float], tokens: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Stages whose pool with these weights is the truth that the targets are drawn from."""
    torch.manual_seed(0)
    z = torch.randn(len(weights), tokens, 11, dtype=torch.float64)
    truth = torch.einsum("k,knv->nv", torch.tensor(weights, dtype=torch.float64), z).softmax(-1)
    return z, torch.multinomial(truth, 1)[:, 0]


@pytest.mark.parametrize("weights", [[0.3, 1.2], [2.0, 0.0, 0.7], [1.5]])
def test_newton_finds_the_weights_that_drew_the_text(weights: list[float]) -> None:
    z, targets = logits_of(weights)
    found = fit_weights(z, targets)
    assert found.tolist() == pytest.approx(weights, abs=0.12)
    z.requires_grad_(False)
    w = found.clone().requires_grad_()
    F.cross_entropy(torch.einsum("k,knv->nv", w, z), targets).backward()
    assert w.grad is not None
    assert float(w.grad.abs().max()) < 1e-6, "nothing is left to gain"


def test_on_the_simplex_weights_sum_to_one() -> None:
    z, targets = logits_of([0.25, 0.75])
    found = fit_weights(z, targets, simplex=True)
    assert float(found.sum()) == pytest.approx(1)
    assert found.tolist() == pytest.approx([0.25, 0.75], abs=0.08)


def test_the_surer_of_two_stages() -> None:
    right, wrong = [4.0, 0.0], [0.0, 2.0]
    z = torch.tensor([[right, right, wrong], [wrong, wrong, [9.0, 0.0]]], dtype=torch.float64)
    assert surer_share(z, torch.tensor([0, 0, 0])) == 1.0
    z = torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]], dtype=torch.float64)
    assert surer_share(z, torch.tensor([0])) == 0.0
    assert surer_share(z[:1].repeat(2, 1, 1), torch.tensor([0])) == 0.5, "they never differ"


def test_the_study_pools_in_every_way_and_judges() -> None:
    found = run(PRESETS["tiny"], asked("composition", "tiny"))
    assert [arm.name for arm in ARMS] == [PLAIN, SHARED, SHRUNK]
    assert len(found.rows) == 6
    for row in found.rows:
        assert all(0 < row[name] < 12 for name in POOLS)
        assert row["weights + temperature"] < row["last"] + 0.5
        assert 0 <= row["right is surer"] <= 1
    assert len(found.claims) == len(claims(found.rows)) == 5
    assert [cells[0] for cells in found.cells][: len(POOLS)] == list(POOLS)
