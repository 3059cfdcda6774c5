"""Ratios and next orders: closed forms, and exact families."""

import math

import pytest
import torch

from papers.dead_directions.expansion import (
    Moments,
    leading_ratio,
    mixture_moments,
    mixture_next_ratio,
    next_coefficient,
    ratio_of_order,
)
from papers.dead_directions.families.gaussian import Gaussian
from papers.dead_directions.families.mixture import Merge
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import log_grid

WEIGHTS = (0.5, 0.3, 0.2, 0.1)
POLE = (1 - math.sqrt(0.5)) / 2


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_leading_ratio_of_a_gaussian_is_exact(k: int) -> None:
    t, family = log_grid(1e-3, 1e-1), Gaussian(k)
    read = leading_ratio(t, family.fisher(t), family.kl(t))
    assert read.value == pytest.approx(ratio_of_order(k), abs=1e-12)
    assert read.spread < 1e-12
    assert read.order == pytest.approx(k)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_leading_ratio_of_a_merge_is_8_and_not_12(weight: float) -> None:
    t, family = log_grid(1e-3, 2e-2), Merge((1 - weight, weight))
    read = leading_ratio(t, family.fisher(t), family.kl(t))
    assert read.value == pytest.approx(8, abs=1e-4)
    assert 0 < read.spread < 1e-3


def test_a_window_keeps_the_rest_out() -> None:
    t, family = log_grid(1e-3, 1.0), Merge()
    whole = leading_ratio(t, family.fisher(t), family.kl(t))
    inner = leading_ratio(t, family.fisher(t), family.kl(t), window=(1e-3, 1e-2))
    assert whole.spread > 0.5 > 1e-3 > inner.spread
    assert inner.window == pytest.approx((1e-3, 1e-2))
    assert whole.value == inner.value, "the value is that of the smallest t"


def test_ratios_that_have_no_limit_are_refused() -> None:
    t = log_grid(1e-3, 1e-1)
    with refused(GeometryError, setting="kl"):
        leading_ratio(t, t, torch.zeros_like(t))
    with refused(GeometryError, setting="t"):
        leading_ratio(t, t[1:], t)
    with refused(GeometryError, setting="window"):
        leading_ratio(t, t, t, window=(1.0, 2.0))


@pytest.mark.parametrize(("weight", "expected"), [(0.5, 12.00), (0.3, 10.59), (0.2, 4.29), (0.1, 25.71)])
def test_next_coefficients_of_a_merge(weight: float, expected: float) -> None:
    t, family, moments = log_grid(1e-2, 1e-1), Merge((1 - weight, weight)), mixture_moments(weight)
    fisher = next_coefficient(t, family.fisher(t), 2, moments.fisher[0])
    kl = next_coefficient(t, family.kl(t), 4, moments.kl[0])
    assert fisher == pytest.approx(moments.fisher[1], rel=2e-3)
    assert kl == pytest.approx(moments.kl[1], rel=2e-3)
    assert fisher / kl == pytest.approx(expected, rel=0.01)
    assert mixture_next_ratio(weight) == pytest.approx(expected, abs=0.005)
    assert mixture_next_ratio(weight) == pytest.approx(moments.fisher[1] / moments.kl[1])


def test_the_next_ratio_has_a_pole_between_its_ends() -> None:
    assert mixture_next_ratio(1e-9) == pytest.approx(18, abs=1e-5)
    assert mixture_next_ratio(POLE - 1e-3) > 100
    assert mixture_next_ratio(POLE + 1e-3) < -100
    with refused(GeometryError, setting="weight"):
        mixture_next_ratio(POLE)
    assert mixture_moments(POLE).kl[1] == pytest.approx(0, abs=1e-16), (
        "the coefficients themselves are finite"
    )


def test_moments_with_all_their_terms() -> None:
    # p_t / p_0 on three points, k = 2: F and K as plain sums, against their expansion.
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    r2 = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    r3 = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)  # E r2 r3 = 0
    r4 = torch.tensor([0.6, -0.2, -0.2], dtype=torch.float64)
    moments = Moments(*(float(q @ product) for product in (r2 * r2, r3 * r3, r2 * r4, r2**3)))
    t = log_grid(1e-2, 5e-2)[:, None]
    density = 1 + r2 * t**2 + r3 * t**3 + r4 * t**4
    fisher = ((2 * r2 * t + 3 * r3 * t**2 + 4 * r4 * t**3) ** 2 / density) @ q
    kl = (density - 1 - torch.log(density)) @ q
    assert [float(q @ r) for r in (r2, r3, r4, r2 * r3)] == pytest.approx([0, 0, 0, 0], abs=1e-16)
    assert next_coefficient(t[:, 0], fisher, 2, moments.fisher[0]) == pytest.approx(
        moments.fisher[1], rel=1e-2
    )
    assert next_coefficient(t[:, 0], kl, 4, moments.kl[0]) == pytest.approx(moments.kl[1], rel=1e-2)


def test_bad_orders_and_weights_are_named() -> None:
    with refused(GeometryError, setting="order", given=0):
        ratio_of_order(0)
    with refused(GeometryError, setting="weight", given=1.0):
        mixture_moments(1.0)
    with refused(GeometryError, setting="values"):
        next_coefficient(torch.ones(2), torch.ones(2), 2, 1.0)
