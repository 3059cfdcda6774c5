"""Slopes, their windows, and when none is reported."""

from __future__ import annotations

import math

import pytest
import torch

from raising import refused
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
    refused = fit_rate(GRID, torch.zeros(13)).refused
    assert refused == "0 values are above the floor and below t = 0.1; a rate needs 5"


def test_a_straight_line_over_less_than_a_decade_is_no_rate() -> None:
    """t from .026 to .030 gave t^4.44 with R² = 1, and t from .26 to .30 is not near the limit at all."""
    for low, high in ((0.026, 0.03), (0.02, 0.1)):
        t = log_grid(low, high)
        rate = fit_rate(t, t**4.44)
        assert rate.slope is None
        assert "a rate needs 10" in str(rate.refused)
    far = log_grid(0.26, 0.3)
    assert "0 values are above the floor and below" in str(fit_rate(far, far**4.44).refused)
    decade = log_grid(1e-2, 1e-1)
    assert fit_rate(decade, decade**4).slope == pytest.approx(4.0)


def test_points_above_the_upper_bound_are_left_out() -> None:
    t = log_grid(1e-3, 1.0, 13)
    rate = fit_rate(t, t**2 * (1 + (t > 0.2)))
    assert rate.slope == pytest.approx(2.0)
    assert rate.window[1] <= 0.1 + 1e-9


def test_the_alignment_error_must_be_small_beside_the_dead_path() -> None:
    """A chain of three layers with a part a beside the diagonal: G = t⁴ + (a t)², of slope 2 below t = a."""
    for a, held in ((1e-6, True), (1e-2, False)):
        rate = fit_rate(GRID, GRID**4 + (a * GRID) ** 2, alignment_error=a, depth=3)
        assert (rate.refused is None) is held
        if held:
            assert rate.slope == pytest.approx(4.0, abs=0.01)
    assert fit_rate(GRID, GRID**2, alignment_error=0.05, depth=2).slope == pytest.approx(2.0)


def test_the_interval_covers_the_slope_and_grows_with_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    widths = []
    for noise in (0.01, 0.1):
        values = GRID**2 * (noise * torch.randn(13, generator=generator, dtype=torch.float64)).exp()
        rate = fit_rate(GRID, values)
        assert rate.interval is not None
        assert rate.slope is not None
        assert rate.interval[0] < rate.slope < rate.interval[1]
        widths.append(rate.interval[1] - rate.interval[0])
    assert widths[1] > 3 * widths[0] > 0


def test_a_large_alignment_error_suppresses_the_slope() -> None:
    rate = fit_rate(GRID, GRID**2, alignment_error=0.2)
    assert rate.slope is None
    assert rate.coefficient is None
    assert "alignment error 0.2 is above 0.1" in str(rate)
    with refused(GeometryError, setting="slope"):
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
    assert "expected Fisher, labels noise-free, alignment error 0" in str(rate)
    assert rate.order == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("t", "values", "setting"),
    [
        ([1.0, 2.0], [1.0], "values"),
        ([], [], "values"),
        ([0.0, 1.0], [1.0, 1.0], "t"),
        ([1.0, 1.0], [1.0, 1.0], "t"),
        ([1.0, 2.0], [1.0, math.nan], "values"),
        ([1.0, 2.0], [1.0, -1.0], "values"),
    ],
)
def test_bad_series_are_named(t: list[float], values: list[float], setting: str) -> None:
    with refused(GeometryError, setting=setting):
        fit_rate(t, values)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (1.0, 0.1), (1.0, math.inf)])
def test_bad_grids_are_named(ends: tuple[float, float]) -> None:
    with refused(GeometryError, setting="low"):
        log_grid(*ends)
    with refused(GeometryError, setting="alignment_error", given=-1.0):
        fit_rate(GRID, GRID, alignment_error=-1.0)
