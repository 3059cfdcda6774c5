"""The verdict's arms, controls and order; the run itself in small."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from papers.kept import Kept, NotMeasured
from papers.latent_bounded_interfaces import interface_verdict as study
from papers.outcome import asked
from raising import refused
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


def test_what_is_there_is_judged(tmp_path: Path) -> None:
    file, given = tmp_path / "rows.jsonl", asked("interface-verdict", "tiny", seeds=3)
    kept = Kept(file, {})
    row = {"rates": ["adamw", 0.1, 0.1], "parameters": 9, "honest": 1.7, "sample": 1.4}
    late = {"sample_late": 1.4, "honest_late": 1.6, "shuffled": 1.9}
    for seed in range(3):
        for arm, ce in {"dense": 1.0, "shallow": 2.0, "published": 1.5}.items():
            if (arm, seed) != ("published", 2):
                found = row | late | {"ce": ce + seed / 100}
                if arm != "published":
                    found |= {"honest": found["ce"], "sample": found["ce"]}
                kept.row({"arm": arm, "seed": seed}, partial(dict, found))
    result = study.run(replace(given, kept=Kept(file, {}, measure=False)))
    assert result.findings[0] == "8 of 12 trainings."
    cells = {cell[0]: cell[1] for cell in result.tables[0].rows}
    assert cells == {"dense": "3", "shallow": "3", "published": "2"}
    verdicts = {claim.name: claim.verdict for claim in result.claims}
    assert verdicts["depth is worth something: dense"] == "held"
    assert verdicts["published beats shallow"] == "held"
    with refused(NotMeasured, setting="judge"):
        study.run(replace(given, kept=Kept(file, {"steps": 7}, measure=False)))


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
