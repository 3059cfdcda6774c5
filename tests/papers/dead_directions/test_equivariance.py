"""The experiment meets its goals, and tells an equivariant optimizer from another."""

from typing import Any

import pytest
import torch

from papers.dead_directions.equivariance import (
    BROKEN,
    GOAL32,
    GOAL64,
    adam_w,
    cases,
    distance,
    equivariance,
    residual_and_drift,
)


def test_every_gauge_meets_the_goals() -> None:
    """Twenty-five steps; the whole experiment has two hundred."""
    results = equivariance(steps=25)
    assert [row["name"] for row in results["gauges"]] == [case.name for case in cases()]
    for row in results["gauges"]:
        assert max(row["frozen64"], row["sgd64"]) <= GOAL64, row
        assert row["frozen32"] <= GOAL32, row
        if row["multiplicative"]:
            assert row["adamw64"] > BROKEN, row
            assert row["drift"] < row["adamw_drift"] / 4, row
        else:
            assert row["adamw64"] <= 1e-14, row
            assert row["drift"] <= 1e-14, row
            assert row["adamw_drift"] > 1e-2, row
        _check_peers(row)


def _check_peers(row: dict[str, Any]) -> None:
    """What the formulas say: K-FAC respects a factor for a layer, the others none; shifts commute."""
    kfac, shampoo, soap = (row["peers"][name] for name in ("K-FAC", "Shampoo", "SOAP"))
    if row["multiplicative"]:
        assert min(shampoo["residual"], soap["residual"]) > BROKEN, row
        if row["name"] != "LNScale":  # a factor for each channel, and a gain that Adam moves
            assert kfac["residual"] <= GOAL64, row
            assert kfac["drift"] > BROKEN, "commuting is not staying in place"
    else:
        assert max(kfac["residual"], shampoo["residual"]) <= 1e-12, row
    if row["name"] == "CEShiftRowShift":
        assert max(peer["drift"] for peer in (kfac, shampoo, soap)) <= 1e-8, "L's kernel is not left"


def test_one_step_of_adamw_already_leaves_the_orbit() -> None:
    (case,) = [case for case in cases() if case.name == "LNScale"]
    assert residual_and_drift(case, adam_w(0.01), torch.float64, 1, 0)[0] > 1e-3


def test_no_steps_no_residual() -> None:
    for case in cases():
        residual, drift = residual_and_drift(case, adam_w(0.01), torch.float64, 0, 0)
        assert residual == drift == 0.0


def test_distance_is_relative_over_all_tensors() -> None:
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    two = {"a": torch.tensor([3.0]), "b": torch.tensor([4.5])}
    assert distance(two, one) == pytest.approx(0.1)
