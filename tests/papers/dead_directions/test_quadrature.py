"""Gaussian moments, and functions near their zeros, against integers and 50 digits of decimal arithmetic."""

from decimal import Decimal, localcontext

import pytest
import torch

from papers.dead_directions.quadrature import REACH, excess_log, normal_rule, points
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.paths import excess_exp

CPU = torch.device("cpu")
SIGNED = [sign * 10.0**e for e in (-200, -150, -20, -8, -3, -1) for sign in (1, -1)]


def test_moments_of_the_normal() -> None:
    x, weights = normal_rule(-REACH, REACH, CPU)
    moments = [float(weights @ x**power) for power in range(9)]
    assert moments == pytest.approx([1, 0, 1, 0, 3, 0, 15, 0, 105], rel=1e-14, abs=1e-12)


def test_half_lines_are_as_exact_as_lines() -> None:
    x, weights = normal_rule(-REACH, REACH, CPU)
    assert float(weights @ (x > 0).double()) == pytest.approx(0.5, abs=1e-15)
    assert float(weights @ torch.relu(x) ** 2) == pytest.approx(0.5, abs=1e-15)


def test_a_factor_that_moves_the_mass_needs_the_range_to_follow() -> None:
    for high, close in ((REACH + 8, True), (8, False)):
        x, weights = normal_rule(-REACH, high, CPU)
        mean = float(weights @ torch.exp(8 * x - 32))  # E e^{8x - 32} = 1, all of it around x = 8
        assert (abs(mean - 1) < 1e-13) == close


@pytest.mark.parametrize("a", [*SIGNED, 0.9, -0.9, 0.999999, -0.999999, 1.1, -1.1, 30.0, -30.0])
def test_excess_exp(a: float) -> None:
    with localcontext() as context:
        context.prec = 500
        exact = float(Decimal(a).exp() - 1 - Decimal(a))
    assert excess_exp(torch.tensor(a, dtype=torch.float64)).item() == pytest.approx(exact, rel=2e-15)


@pytest.mark.parametrize("r", [*SIGNED, 0.6, -0.39, 0.7, -0.45, -0.999, 50.0])
def test_excess_log(r: float) -> None:
    with localcontext() as context:
        context.prec = 500
        exact = float(Decimal(r) - (1 + Decimal(r)).ln())
    # Where the series ends, the plain difference has lost less than a digit.
    assert excess_log(torch.tensor(r, dtype=torch.float64)).item() == pytest.approx(exact, rel=4e-15)


def test_plain_differences_would_be_lost() -> None:
    r = torch.tensor(1e-17, dtype=torch.float64)
    assert (r - torch.log1p(r)).item() == 0
    assert excess_log(r).item() == pytest.approx(5e-35, rel=1e-15)


@pytest.mark.parametrize(
    "bad", [torch.zeros(2), torch.ones(2, 2), torch.ones(0), torch.tensor([1.0, torch.nan])]
)
def test_points_that_are_no_approach(bad: torch.Tensor) -> None:
    with refused(GeometryError, setting="t"):
        points(bad)
