"""More peers of safe adapters in miniature: each is what its source says, and leaves the model as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from papers.beyond import adapter_peers as study
from papers.beyond.safe_adapters import Size, facts
from papers.outcome import asked
from papers.run import run_study
from topograd.nn.lora import corrected_maps, has_lora, merge_lora
from topograd.runs.folder import Run
from topograd.runs.session import open_session

SMALL = Size(length=8, old=6, judged=2, prose=1, new=4, tested=2, rank=2)
ARMS = {arm.name: arm for arm in study.ARMS}


@pytest.fixture(scope="module")
def small(straight: Run) -> study.PeerStudy:
    made = asked("adapter-peers", "tiny", steps=2)
    return study.PeerStudy("reference", open_session(straight.folder), SMALL, made)


def test_the_study_in_miniature(straight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "folders", lambda asked: {"reference": straight.folder})
    monkeypatch.setattr(study, "TINY", SMALL)
    monkeypatch.setattr("papers.beyond.safe_adapters.TEXTS", {"facts": facts, "german": facts})
    found = run_study(asked("adapter-peers", "tiny", steps=2))
    assert [row["arm"] for row in found["rows"] if row["base"] == "facts"] == list(ARMS)
    assert all(len(row["new"]) == len(row["old"]) == 3 for row in found["rows"])


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_learns_and_leaves_the_model_as_it_was(small: study.PeerStudy, name: str) -> None:
    before, model = {n: p.clone() for n, p in small.model.named_parameters()}, small.model
    row = small.learn(ARMS[name], "facts", 0, 1e-2)
    assert row["new"][-1] != row["new"][0]
    assert small.model is model
    assert not any(has_lora(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_fisher_is_the_mean_square_of_gradients_of_each_sequence(small: study.PeerStudy) -> None:
    old, (name, module) = small.old[0], next(iter(small.maps.items()))
    total = torch.zeros_like(module.weight)
    weight = module.weight.requires_grad_(True)
    for inputs, targets in zip(old.inputs, old.targets, strict=True):
        loss = F.cross_entropy(small.model(inputs[None])[0], targets, reduction="sum")
        total += torch.autograd.grad(loss, weight)[0] ** 2
    weight.requires_grad_(False)
    torch.testing.assert_close(small.fisher[name], total / old.targets.numel())


def test_a_large_factor_of_ewc_forgets_less(small: study.PeerStudy) -> None:
    def forgotten(factor: float) -> float:
        row = small.learn(replace(ARMS["ewc"], factor=factor), "facts", 0, 1e-2)
        return sum(row["old"][-1]) - sum(row["old"][0])

    assert abs(forgotten(1e6)) < abs(forgotten(0.0))


def test_distilling_without_new_text_has_no_gradient_at_first(small: study.PeerStudy) -> None:
    """The divergence is least where the model is what it was; the new text alone moves it."""
    small._place(ARMS["distil"], "facts", 0)
    try:
        learn, _ = small.new("facts", 0)
        losses = [small._distilled(factor, learn, torch.Generator().manual_seed(0)) for factor in (0.0, 1e3)]
        parameters = [module.get_parameter("lora_b") for module in corrected_maps(small.model).values()]
        first, second = (torch.autograd.grad(loss, parameters) for loss in losses)
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    finally:
        merge_lora(small.model)  # of corrections that are zero


def test_lopt_takes_the_task_from_the_lower_half(small: study.PeerStudy) -> None:
    with study.ExitStack() as small._closing:
        inputs, _ = small.new("facts", 0)
        decoder = small._cut_below()
        for p in small.model.stack.layers.parameters():
            p.requires_grad_(True)
        small.model(inputs.inputs).sum().backward()
        layers = small.model.stack.layers
        below = [p.grad for layer in layers[: len(layers) // 2] for p in layer.parameters()]
        assert all(grad is None for grad in below)
        assert all(p.grad is None for p in decoder)
        small._local.backward()
        assert all(p.grad is not None for p in decoder)
        assert any(p.grad is not None for layer in layers[: len(layers) // 2] for p in layer.parameters())
    for p in small.model.parameters():
        p.grad = None
        p.requires_grad_(False)


def test_corda_takes_the_least_components_over_the_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    X = torch.randn(30, 7, generator=generator, dtype=torch.float64)
    moment = X.T @ X / 30
    a, b = study.least_factors(W, moment, 2)
    C = moment + study.DAMPING * moment.diagonal().mean() * torch.eye(7, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(W @ C, full_matrices=False)
    leading = U[:, :3] * S[:3] @ Vh[:3] @ torch.linalg.inv(C)
    torch.testing.assert_close(W - b @ a, leading)
    torch.testing.assert_close(a.norm(), b.norm())


def test_a_specialist_switched_off_is_the_model(small: study.PeerStudy) -> None:
    row = small.learn(ARMS["specialist"], "facts", 0, 1e-1)
    assert row["off"] == 0.0
    assert row["old"][-1] != row["old"][0]
    assert row["half"]["old"] != pytest.approx(sum(row["old"][-1]) / 2)


def test_the_factor_is_named_where_it_was_not_chosen_anew() -> None:
    rows: list[dict[str, Any]] = [{"arm": "ewc"}, {"arm": "distil", "factor": 4.0}]
    assert list(study._more("smollm2", rows)) == [
        f"smollm2: λ of ewc is {study.FACTORS['ewc']:g}.",
        "smollm2: λ of distil is 4.",
    ]
