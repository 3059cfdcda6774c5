"""Crossings on N(Π x_i^{k_i}, 1): orders from lines, the volume law, and what must be refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from papers.dead_directions.crossings import crossing_from_rates, recover_crossing, rlct
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, local_slope, log_grid

PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 3)]


def product_model(
    orders: tuple[int, ...], normals: Tensor | None = None, skew: float = 0.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """vᵀF(w)v of N(u Π x_i^{k_i}, 1) with x = normals · w and the unit u = 1 + skew · Σ w."""

    def mean(w: Tensor) -> Tensor:
        x = w if normals is None else normals @ w
        value = 1 + skew * w.sum()
        for xi, k in zip(x, orders, strict=False):
            value = value * xi**k
        return value

    return lambda w, v: torch.func.jvp(mean, (w,), (v,))[1] ** 2


@pytest.mark.parametrize("orders", [*PAIRS, (1, 2, 3), (2, 2, 2), (3,)])
def test_orders_come_back(orders: tuple[int, ...]) -> None:
    r = len(orders)
    found = recover_crossing(product_model(orders), torch.zeros(r).double(), torch.eye(r).double())
    assert found.orders == orders
    assert found.consistent
    for rate, k in zip(found.anchored, orders, strict=True):
        assert rate.slope == pytest.approx(2 * k - 2, abs=1e-4)
    assert found.generic.slope == pytest.approx(2 * sum(orders) - 2, abs=1e-4)
    assert (found.rlct, found.multiplicity) == (1 / (2 * max(orders)), orders.count(max(orders)))
    assert found.evaluations == 7 * (r + 1)


def test_slanted_components_and_a_factor_that_is_not_constant() -> None:
    normals = torch.tensor([[1.0, 0.4, 0.2], [-0.3, 2.0, 0.5]]).double()  # a third parameter is free
    fisher = product_model((1, 2), normals, skew=0.5)
    found = recover_crossing(fisher, torch.zeros(3).double(), normals)
    assert found.orders == (1, 2)
    assert found.consistent


def test_the_prefactor_carries_the_other_order() -> None:
    fisher = product_model((1, 3))
    zero, axes = torch.zeros(2).double(), torch.eye(2).double()
    coefficients = []
    anchors = log_grid(0.1, 1.0, 5)
    for anchor in anchors.tolist():
        first = recover_crossing(fisher, zero, axes, anchor=anchor).anchored[0]
        assert first.coefficient is not None
        coefficients.append(first.coefficient)
    assert local_slope(anchors, coefficients) == pytest.approx(2 * 3, abs=1e-6)


def volume(orders: tuple[int, int], priors: tuple[int, int], level: np.ndarray) -> np.ndarray:
    """∫∫ x^g y^h over {x^{2a} y^{2b} < level} in the unit square: x by hand, y on a log grid."""
    (a, b), (g, h) = orders, priors
    u = np.linspace(-60.0, 0.0, 60001)[:, None]  # y = e^u
    x = np.exp(np.minimum(0.0, (np.log(level) - 2 * b * u) / (2 * a)))
    inner = x ** (g + 1) / (g + 1) * np.exp(u * (h + 1))
    return inner.sum(0) * (u[1] - u[0])


@pytest.mark.parametrize(
    ("orders", "priors"), [((1, 2), (0, 0)), ((2, 2), (0, 0)), ((1, 2), (0, 2)), ((1, 3), (0, 0))]
)
def test_the_volume_law(orders: tuple[int, int], priors: tuple[int, int]) -> None:
    exponent, multiplicity = rlct(orders, priors)
    level = np.logspace(-16, -12, 9)
    values = volume(orders, priors, level) / np.log(1 / level) ** (multiplicity - 1)
    slope = np.polyfit(np.log(level), np.log(values), 1)[0]
    # with m = 2 the constant beside log(1/ε) still moves the slope a little
    assert slope == pytest.approx(exponent, abs=0.003 if multiplicity == 1 else 0.01)


def test_rlct_with_priors() -> None:
    assert rlct((1, 1), (2, 4)) == (1.5, 1)
    assert rlct((1, 3), (0, 2)) == (0.5, 2)
    for orders, priors in (((), None), ((0,), None), ((1,), (0, 0)), ((1,), (-1,)), ((1,), (math.nan,))):
        with pytest.raises(GeometryError):
            rlct(orders, priors)


def test_a_regular_point_is_refused() -> None:
    with refused(GeometryError, setting="point"):
        recover_crossing(product_model((1, 1)), torch.tensor([0.0, 1.0]).double(), torch.eye(2).double())
    with refused(GeometryError, setting="point", given=0.0):
        recover_crossing(product_model((1,)), torch.zeros(1).double(), torch.eye(1).double())


def test_a_normal_of_no_component_shows_in_the_sum() -> None:
    slanted = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()  # the second line never reaches y = 0
    found = recover_crossing(product_model((1, 2)), torch.zeros(2).double(), slanted)
    assert found.orders == (1, 1)
    assert found.generic.order == pytest.approx(3, abs=1e-3)
    assert not found.consistent
    with refused(GeometryError, setting="normals"):
        _ = found.rlct


def test_a_symmetric_direction_has_no_rate() -> None:
    with refused(GeometryError, setting="rates", given="directional Fisher, anchored line 1"):
        recover_crossing(lambda w, v: torch.zeros(()), torch.zeros(1).double(), torch.eye(1).double())


def test_an_order_that_is_no_integer_is_refused() -> None:
    t = log_grid(1e-4, 1e-2)
    with refused(GeometryError, setting="rates", given=1.3):
        crossing_from_rates([fit_rate(t, t**0.6), fit_rate(t, t**2)], fit_rate(t, t**4))


@pytest.mark.parametrize(
    ("point", "normals", "setting"),
    [
        (torch.zeros(2), torch.eye(3), "normals"),
        (torch.zeros(2), torch.zeros(0, 2), "normals"),
        (torch.zeros(2), torch.ones(2, 2), "normals"),
    ],
)
def test_bad_normals(point: Tensor, normals: Tensor, setting: str) -> None:
    with refused(GeometryError, setting=setting):
        recover_crossing(product_model((1, 1)), point.double(), normals.double())


def test_a_grid_that_reaches_the_anchor() -> None:
    with refused(GeometryError, setting="grid"):
        recover_crossing(
            product_model((1, 1)), torch.zeros(2).double(), torch.eye(2).double(), grid=log_grid(1e-3, 0.2)
        )
