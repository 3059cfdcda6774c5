"""Sectional curvature: closed forms, the exponent 2k - 2 and not 2k - 1, planes where it stays finite."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from papers.dead_directions.curvature import curvature_rate, sectional_curvature, volume_exponents
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import log_grid

PLANE = torch.eye(2).double()
X = torch.linspace(-12, 12, 241, dtype=torch.float64)


def power_mean(k: int) -> Callable[[Tensor], Tensor]:
    """A Gaussian of mean (s(1+t), t^k, st): order k in t, and ∂_t g_ss is not 0."""
    return lambda w: torch.stack((w[1] * (1 + w[0]), w[0] ** k, w[1] * w[0]))


def mixture(w: Tensor, weight: Tensor | float) -> Tensor:
    """2√p of (1-π) N(m + π t, 1) + π N(m - (1-π) t, 1) for w = (t, m): the mean stays at m."""
    t, m = w[0], w[1]
    first = (1 - weight) * torch.exp(-((X - m - weight * t) ** 2) / 2)
    second = weight * torch.exp(-((X - m + (1 - weight) * t) ** 2) / 2)
    step = X[1] - X[0]
    return 2 * torch.sqrt((first + second) / math.sqrt(2 * math.pi) * step)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_exponent_is_2k_minus_2(k: int) -> None:
    rate = curvature_rate(power_mean(k), torch.zeros(2).double(), PLANE, grid=log_grid(1e-4, 1e-3))
    assert rate.slope == pytest.approx(-(2 * k - 2), abs=0.01)
    assert rate.slope is not None
    assert abs(rate.slope + (2 * k - 1)) > 0.9, "the text's 2k - 1"


@pytest.mark.parametrize(("k", "t"), [(1, 0.3), (2, 0.01), (3, 0.2), (3, 1e-3)])
def test_the_closed_form(k: int, t: float) -> None:
    found = sectional_curvature(power_mean(k), torch.tensor([t, 0.0], dtype=torch.float64), PLANE)
    exact = -1 / (k**2 * t ** (2 * k - 2) * (1 + 2 * t + 2 * t**2) ** 2)
    assert found.item() == pytest.approx(exact, rel=1e-9)


def test_it_does_not_depend_on_the_basis_of_the_plane_nor_on_coordinates() -> None:
    at = torch.tensor([0.4, 0.2]).double()
    change = torch.tensor([[2.0, 1.0], [0.5, -3.0]]).double()
    plain = sectional_curvature(power_mean(2), at, PLANE)
    assert torch.allclose(sectional_curvature(power_mean(2), at, change), plain, rtol=1e-10)
    inverse = torch.linalg.inv(change)
    moved = sectional_curvature(lambda w: power_mean(2)(change @ w), inverse @ at, PLANE)
    assert torch.allclose(moved, plain, rtol=1e-10)


@pytest.mark.parametrize(("weight", "limit"), [(0.5, -1 / 2), (0.3, -11 / 14)])
def test_a_merge_of_two_components_stays_finite(weight: float, limit: float) -> None:
    def embedding(w: Tensor) -> Tensor:
        return mixture(w, weight)

    near = sectional_curvature(embedding, torch.tensor([0.02, 0.0]).double(), PLANE)
    assert near.item() == pytest.approx(limit, abs=2e-3)
    rate = curvature_rate(embedding, torch.zeros(2).double(), PLANE, grid=log_grid(0.005, 0.05))
    assert rate.slope == pytest.approx(0, abs=0.01)


def test_a_free_weight_makes_the_merge_diverge_at_2k_minus_2() -> None:
    plane = torch.eye(3).double()[[0, 2]]  # separation and weight, the mean held
    rate = curvature_rate(
        lambda w: mixture(w[:2], w[2]),
        torch.tensor([0.0, 0.0, 0.3]).double(),
        plane,
        grid=log_grid(0.01, 0.1),
    )
    assert rate.slope == pytest.approx(-2, abs=0.1)


@pytest.mark.parametrize("k", [2, 3])
def test_volumes_of_high_curvature(k: int) -> None:
    """|K| falls with t, so {|K| > κ} is t < t(κ); the Fisher volume is ∫ √det g, on the line s = 0."""
    t = log_grid(1e-5, 1e-1, 41)
    points = torch.stack((t, torch.zeros_like(t)), 1)
    curvature = torch.stack([sectional_curvature(power_mean(k), w, PLANE).abs() for w in points])
    jacobians = torch.stack([torch.func.jacfwd(power_mean(k))(w) for w in points])
    density = torch.linalg.svdvals(jacobians).prod(-1)
    volume = torch.cumulative_trapezoid(density, t)
    kappa, inside = curvature[1:].log().numpy(), slice(8, 30)  # away from both ends of the grid
    fisher = np.polyfit(kappa[inside], volume.log().numpy()[inside], 1)[0]
    lebesgue = np.polyfit(kappa[inside], t[1:].log().numpy()[inside], 1)[0]
    assert (fisher, lebesgue) == pytest.approx(volume_exponents(k), abs=0.02)


def test_refusals() -> None:
    at = torch.tensor([0.1, 0.0]).double()
    with refused(GeometryError, setting="plane"):
        sectional_curvature(power_mean(2), at, torch.eye(3).double())
    with refused(GeometryError, setting="point"):
        sectional_curvature(power_mean(2), torch.zeros(2).double(), PLANE)
    with refused(GeometryError, setting="plane"):
        sectional_curvature(power_mean(2), at, torch.tensor([[1.0, 0.0], [2.0, 0.0]]).double())
    with refused(GeometryError, setting="plane"):
        sectional_curvature(power_mean(2), at, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())
    for k in (1, 2.0):
        with refused(GeometryError, setting="k"):
            volume_exponents(k)  # type: ignore[arg-type]
