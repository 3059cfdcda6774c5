"""Closed constants against sampling and against known values."""

import math

import pytest
import torch

from papers.dead_directions.catalogue.constants import (
    layernorm_leak,
    leak_coefficients,
    measured_leak,
    measured_share,
)
from papers.dead_directions.families.two_layer import relu_schur_fraction
from raising import refused
from topograd.errors import GeometryError

T = torch.tensor([1e-3, 0.1, 1.0, 3.0], dtype=torch.float64)


def test_the_share_is_measured_within_two_percent() -> None:
    assert measured_share(8, 20_000) == pytest.approx(relu_schur_fraction(8), rel=0.02)


def test_leak_coefficients_are_the_expansion_of_the_leak() -> None:
    for width in (3, 8, 64):
        alpha, beta = leak_coefficients(width)
        t = torch.tensor([1e-3, 2e-3], dtype=torch.float64)
        first = layernorm_leak(width, t, noise=0.0) / t.square()
        assert float(first[0]) == pytest.approx(alpha, rel=1e-4)
        assert float((first[1] - first[0]) / 3e-6) == pytest.approx(beta, rel=1e-3)
    assert leak_coefficients(3)[0] == pytest.approx(math.sqrt(3) - 1, rel=1e-12)
    assert leak_coefficients(1024)[0] == pytest.approx(1023 / (1024 * 1020), rel=1e-2), "the form at large d"


def test_the_leak_is_that_of_the_network() -> None:
    found, expected = measured_leak(8, T, 40_000), layernorm_leak(8, T)
    assert torch.allclose(found, expected, rtol=0.03)
    assert float(expected[2]) == pytest.approx(2, rel=1e-12), (
        "noise 1, and LN of isotropic x has unit variance"
    )


@pytest.mark.parametrize(("width", "steepest"), [(8, 3.18), (64, 3.89), (1024, 3.99)])
def test_slope_four_needs_a_large_width(width: int, steepest: float) -> None:
    t = torch.logspace(-2, 4, 400, dtype=torch.float64)
    local = layernorm_leak(width, t, noise=0.0).log().diff() / t.log().diff()
    assert float(local.max()) == pytest.approx(steepest, abs=0.005)
    assert float(local[-1]) == pytest.approx(2, abs=0.01)


def test_too_narrow() -> None:
    with refused(GeometryError, setting="width", given=2):
        leak_coefficients(2)
