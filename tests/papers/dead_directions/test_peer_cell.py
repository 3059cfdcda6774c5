"""Shampoo, SOAP and K-FAC at a dead direction: one keeps it, one turns it, one leaves the line."""

from typing import Any

import pytest
import torch

from papers.dead_directions.ablations import NOISE, WIDTH
from papers.dead_directions.peer_cell import _reading, peers
from raising import refused
from topograd.errors import OptimError


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["driver"]: row for row in peers(300)}


def test_shampoo_keeps_the_direction_and_has_the_slope_of_the_loss(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["Shampoo"]
    assert row["alignment"] == 1.0
    least, most = (2 + 4 * t**4 / (NOISE**2 + t**4) for t in (row["t_last"], row["t_late"]))
    assert least < row["slope"] < most
    assert row["other"] == pytest.approx(row["t_last"], rel=1e-3)


def test_soap_turns_it(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["SOAP"]["alignment"] < 0.99
    assert rows["SOAP"]["slope"] is None


def test_kfac_takes_one_layer_to_zero_and_leaves_the_other(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["KFAC"]["t_last"] < 1e-9
    assert rows["KFAC"]["other"] > 1e-3


def test_a_reading_by_hand() -> None:
    t = 0.2
    target = torch.eye(WIDTH, dtype=torch.float64)
    target[-1, -1] = 0
    W = target.clone()
    W[-1, -1] = t
    size, entry, alignment, other = _reading(W, W, target)
    assert (size.item(), alignment.item(), other.item()) == (t, 1.0, t)
    assert entry.item() == pytest.approx(t**2 * (NOISE**2 + t**4), rel=1e-12)


def test_too_few_steps_are_refused() -> None:
    with refused(OptimError, setting="steps", given=299):
        peers(299)
