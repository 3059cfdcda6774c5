"""Slopes, their windows, and when none is reported."""

from __future__ import annotations

import math

import pytest
import torch

from topograd.errors import GeometryError
from topograd.geometry.rates import Rate, fit_rate, log_grid

GRID = log_grid(1e-4, 1e-1, 13)


@pytest.mark.parametrize("slope", [0.0, 2.0, 10.0, -2.0, 0.5])
def test_a_power_law_gives_its_exponent_and_coefficient(slope: float) -> None:
    rate = fit_rate(GRID, 3.5 * GRID**slope)
    assert rate.slope == pytest.approx(slope, abs=1e-10)
    assert rate.coefficient == pytest.approx(3.5, rel=1e-9)
    assert rate.r_squared == pytest.approx(1.0, abs=1e-9)
    assert (rate.points, rate.refused) == (13, None)
    assert rate.window == pytest.approx((1e-4, 1e-1))


def test_the_order_of_points_does_not_matter() -> None:
    shuffled = GRID[torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    assert fit_rate(shuffled, shuffled**3 + shuffled**5) == fit_rate(GRID, GRID**3 + GRID**5)


def test_the_window_ends_where_the_next_order_begins() -> None:
    rate = fit_rate(GRID, GRID**2 + 500 * GRID**4)
    assert rate.slope == pytest.approx(2.0, abs=0.1)
    assert rate.window[1] < 5e-2
    assert rate.window[0] == pytest.approx(1e-4)


def test_a_straight_run_higher_up_is_not_the_limit() -> None:
    """σ² + t⁴: slope 4 over decades, but the limit is the constant."""
    rate = fit_rate(GRID, 1e-10 + GRID**4)
    assert rate.slope == pytest.approx(0.0, abs=0.1)


def test_a_bend_at_the_smallest_points_is_refused() -> None:
    rate = fit_rate(GRID, 1e-16 + GRID**4)
    assert rate.slope is None
    assert "not asymptotic" in str(rate.refused)


def test_a_given_window_is_used_and_still_judged() -> None:
    assert fit_rate(GRID, 1e-16 + GRID**4, window=(1e-3, 1e-1)).slope == pytest.approx(4.0, abs=0.01)
    assert fit_rate(GRID, GRID**2 + 500 * GRID**4, window=(1e-3, 1e-1)).slope is None


def test_values_under_the_floor_are_left_out() -> None:
    values = GRID**4
    values[:3] = 1e-17
    assert fit_rate(GRID, values, floor=2e-17).slope == pytest.approx(4.0, abs=1e-9)
    assert fit_rate(GRID, torch.zeros(13)).refused == "0 values are above the floor; a rate needs 5"


def test_low_alignment_suppresses_the_slope() -> None:
    rate = fit_rate(GRID, GRID**2, alignment=0.98)
    assert rate.slope is None
    assert rate.coefficient is None
    assert "alignment 0.980" in str(rate)
    with pytest.raises(GeometryError, match="alignment"):
        _ = rate.order


def test_scatter_is_refused() -> None:
    wild = torch.tensor([1.0, -1.0] * 6 + [1.0], dtype=torch.float64).exp() * GRID**2
    rate = fit_rate(GRID, wild)
    assert rate.slope is None
    assert "scatter" in str(rate.refused)


def test_a_rate_carries_its_labels() -> None:
    rate = fit_rate(GRID, GRID**2, estimator="expected Fisher", noise="noise-free")
    assert isinstance(rate, Rate)
    assert "t^2.000" in str(rate)
    assert "expected Fisher, labels noise-free, alignment 1.000" in str(rate)
    assert rate.order == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("t", "values", "said"),
    [
        ([1.0, 2.0], [1.0], "as many of each"),
        ([], [], "as many of each"),
        ([0.0, 1.0], [1.0, 1.0], "different positive"),
        ([1.0, 1.0], [1.0, 1.0], "different positive"),
        ([1.0, 2.0], [1.0, math.nan], "nan is among the values"),
        ([1.0, 2.0], [1.0, -1.0], "-1.0 is among the values"),
    ],
)
def test_bad_series_are_named(t: list[float], values: list[float], said: str) -> None:
    with pytest.raises(GeometryError, match=said):
        fit_rate(t, values)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (1.0, 0.1), (1.0, math.inf)])
def test_bad_grids_are_named(ends: tuple[float, float]) -> None:
    with pytest.raises(GeometryError, match="0 < low < high"):
        log_grid(*ends)
    with pytest.raises(GeometryError, match="alignment of 1"):
        fit_rate(GRID, GRID, alignment=1.5)
