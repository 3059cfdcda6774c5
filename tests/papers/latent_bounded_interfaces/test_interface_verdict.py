"""The verdict's arms, controls and order; the run itself in small."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from papers.latent_bounded_interfaces import interface_verdict as study
from papers.outcome import asked
from topograd.exec.forward import stage_logits
from topograd.runs.config import OptimizerConfig


def config(seed: int = 0):  # type: ignore[no-untyped-def]
    return study._config(asked("interface-verdict", "tiny"), seed)


def test_the_positive_control_is_the_dense_model() -> None:
    dense, plan = study.build(study.ARMS["dense"], config())
    control, joined = study.build(study.ARMS["residual, r = d"], config())
    inputs = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for (name, p), q in zip(dense.named_parameters(), control.parameters(), strict=False):
            assert torch.equal(p, q), name
            p.add_(0.3 * torch.randn_like(p))
            q.copy_(p)
        expected = stage_logits(dense, plan, 0, inputs)
        torch.testing.assert_close(stage_logits(control, joined, 2, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("arm", "of"), [("shallow", "dense"), ("hybrid, shallow", "hybrid, dense")])
def test_shallow_is_the_last_region_and_no_other_layers(arm: str, of: str) -> None:
    shallow, _ = study.build(study.ARMS[arm], config())
    dense, _ = study.build(study.ARMS[of], config())
    assert len(shallow.layers) == 2
    for own, whole in zip(shallow.layers, list(dense.layers)[-2:], strict=True):
        kinds = [type(module) for module in own.modules()]
        assert kinds == [type(module) for module in whole.modules()]
        for p, q in zip(own.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p, q)


def test_every_arm_has_controls_of_its_kind_that_are_run_before_it() -> None:
    order = study.order(2, "long")
    places = {(arm.name, seed): i for i, (arm, seed) in enumerate(order)}
    for (name, seed), place in places.items():
        if study.ARMS[name].interface is not None:
            assert all(places[control, seed] < place for control in study.controls(study.ARMS[name]))
    assert {arm.name for arm, _ in order} == set(study.ARMS)


def test_shares_are_of_the_same_seed_and_reading() -> None:
    rows = [
        {"arm": arm, "seed": seed, "ce": ce, "honest": ce + 1}
        for seed, values in enumerate([(1.0, 2.0, 1.25), (1.5, 2.5, 2.0)])
        for arm, ce in zip(("dense", "shallow", "residual, r = d/2"), values, strict=True)
    ]
    assert study.kept(rows, "residual, r = d/2") == pytest.approx([0.75, 0.5])
    assert study.kept(rows[:5], "residual, r = d/2", "honest") == pytest.approx([0.75])


def test_the_published_interface_is_read_from_prefixes() -> None:
    found = study.measure(study.ARMS["published"], config(), study.first_rates(study.ARMS["published"]))
    assert found["sample"] != found["honest"]
    assert "shuffled" in found
    dense = study.measure(study.ARMS["dense"], config(), study.first_rates(study.ARMS["dense"]))
    assert dense["sample"] == dense["honest"]


@pytest.mark.parametrize("optimum", [0.0025, 0.02, 0.08])
def test_rates_are_moved_until_both_neighbours_are_worse(optimum: float) -> None:
    asked_for: list[float] = []

    def loss(rates: OptimizerConfig) -> float:
        assert rates.lr_matrix is not None
        asked_for.append(rates.lr_matrix)
        return abs(math.log(rates.lr_matrix / optimum))

    arm = study.ARMS["dense"]
    best = study.climb(study.first_rates(arm), loss, partial(study._moved, which="lr_matrix"), 2)
    assert best.lr_matrix is not None
    assert best.lr_matrix == pytest.approx(optimum)
    assert min(asked_for) < best.lr_matrix < max(asked_for)
