import math

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.phase import read_phase, weight_norm

UP = [1.0 * 1.05**i for i in range(8)]
DOWN = UP[::-1]
FLAT = [1.0, 1.001, 0.999, 1.0, 1.001, 1.0, 0.999, 1.0]
NOISY = [1.0, 1.6, 0.7, 1.5, 0.6, 1.7, 0.8, 1.6]


@pytest.mark.parametrize(
    ("norms", "sigmas", "phase"),
    [
        (UP, UP, "accumulation"),
        (UP, FLAT, "accumulation"),
        (DOWN, DOWN, "compression"),
        (UP, DOWN, "undecided"),
        (DOWN, UP, "undecided"),
        (DOWN, FLAT, "undecided"),
        (FLAT, FLAT, "undecided"),
        (DOWN, NOISY, "undecided"),
        (NOISY, DOWN, "undecided"),
        (DOWN[:4], DOWN[:4], "undecided"),
    ],
)
def test_the_rule(norms: list[float], sigmas: list[float], phase: str) -> None:
    assert read_phase(norms, sigmas).phase == phase


def test_the_changes_are_those_of_the_logarithms() -> None:
    found = read_phase(DOWN, UP)
    assert found.norm_change == pytest.approx(-7 * math.log(1.05))
    assert found.sigma_change == pytest.approx(7 * math.log(1.05))
    assert found.norm_error < 1e-12
    assert str(found).startswith("undecided: log ‖w‖ -0.342 ± 0.000")


def test_the_norm_counts_a_shared_weight_once() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    assert weight_norm(nn.Sequential(first, second)) == 5
    with refused(GeometryError, setting="model"):
        weight_norm(nn.ReLU())


@pytest.mark.parametrize(
    ("norms", "sigmas", "setting"),
    [
        ([1.0], [1.0, 2.0], "sigmas"),
        ([], [], "sigmas"),
        ([1.0, 0.0], [1.0, 1.0], "norms"),
        ([1.0, 1.0], [1.0, float("nan")], "sigmas"),
    ],
)
def test_bad_series_are_refused(norms: list[float], sigmas: list[float], setting: str) -> None:
    with refused(GeometryError, setting=setting):
        read_phase(norms, sigmas)
