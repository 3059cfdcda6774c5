"""The singular fluctuation: known values, a grid as the other witness, and where the paper's text is off."""

import math

import pytest

from raising import refused
from tests.oracles.posterior import data_free_fluctuation, fluctuation_on_a_grid
from topograd.errors import GeometryError
from topograd.geometry.singular.invariants import singular_fluctuation

VALUES = {1: 0.5, 2: 0.1730, 3: 0.2784, 4: 0.1379, 5: 0.2061, 6: 0.1167}
DATA_FREE = {1: 0.1817, 2: 0.1358, 3: 0.1075, 4: 0.0887, 5: 0.0755, 6: 0.0657}


@pytest.mark.parametrize("k", VALUES)
def test_known_values(k: int) -> None:
    assert singular_fluctuation(k) == pytest.approx(VALUES[k], abs=5e-5)
    assert data_free_fluctuation(k) == pytest.approx(DATA_FREE[k], abs=5e-5)
    assert singular_fluctuation(k) > data_free_fluctuation(k)


def test_the_regular_case_is_a_half_at_every_temperature() -> None:
    for beta in (0.1, 1.0, 20.0):
        assert singular_fluctuation(1, beta) == pytest.approx(0.5, abs=1e-10)


@pytest.mark.parametrize(
    ("k", "beta", "prior"), [(2, 1.0, 0), (3, 0.5, 0), (2, 4.0, 1), (5, 1.0, 2), (4, 2.0, 0)]
)
def test_against_sums_over_a_grid(k: int, beta: float, prior: int) -> None:
    assert singular_fluctuation(k, beta, prior) == pytest.approx(
        fluctuation_on_a_grid(k, beta, prior), abs=2e-4
    )


def test_it_depends_on_the_temperature() -> None:
    """The text of §13.4 has one value for all β."""
    assert [singular_fluctuation(2, b) for b in (0.5, 1, 2)] == pytest.approx([0.157, 0.173, 0.193], abs=6e-4)
    assert [singular_fluctuation(3, b) for b in (0.5, 1, 2)] == pytest.approx([0.226, 0.278, 0.346], abs=6e-4)


def test_priors() -> None:
    assert singular_fluctuation(2, prior=1) == pytest.approx(0.2022, abs=5e-5)
    assert data_free_fluctuation(2, prior=1) == pytest.approx(data_free_fluctuation(1), abs=1e-15)
    # |s|^{k-1} turns s^k into x with a flat weight: a regular direction on the line, a half of one for even k
    assert singular_fluctuation(3, prior=2) == pytest.approx(0.5, abs=1e-10)
    assert singular_fluctuation(4, prior=3) == pytest.approx(singular_fluctuation(2, prior=1), abs=1e-10)


def test_large_orders_go_as_the_variance_of_a_point_mass() -> None:
    for k in (9, 10, 11, 12):
        assert data_free_fluctuation(k) < singular_fluctuation(k) < 0.2
    assert (
        singular_fluctuation(12)
        < singular_fluctuation(10)
        < singular_fluctuation(11)
        < singular_fluctuation(9)
    )
    assert 2 * 400 * data_free_fluctuation(400) == pytest.approx(1, abs=0.01)  # 1/(2k), not 1/(4k)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_without_data_on_the_whole_line(k: int) -> None:
    """√β → 0 removes the tilt."""
    unfolded = 1 / (2 * k) if k % 2 else data_free_fluctuation(k)
    assert singular_fluctuation(k, 1e-10) == pytest.approx(unfolded, abs=1e-9)
    assert (unfolded > data_free_fluctuation(k)) == (k % 2 == 1), "only odd orders unfold"


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "2"])
def test_an_order_is_a_positive_integer(k: int) -> None:
    with refused(GeometryError, setting="k"):
        singular_fluctuation(k)


@pytest.mark.parametrize("beta", [0, -1, math.nan, math.inf])
def test_a_temperature_is_positive(beta: float) -> None:
    with refused(GeometryError, setting="beta"):
        singular_fluctuation(2, beta)


@pytest.mark.parametrize("prior", [-1, -2.5, math.nan, math.inf])
def test_a_prior_has_mass(prior: float) -> None:
    with refused(GeometryError, setting="prior"):
        singular_fluctuation(2, prior=prior)
