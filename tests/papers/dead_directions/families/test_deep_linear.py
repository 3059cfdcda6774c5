"""Coefficients of deep linear networks: against reduced rank, products of numbers, and symmetry."""

import itertools

import pytest

from papers.dead_directions.families.deep_linear import deep_linear_coefficient
from papers.dead_directions.families.reduced_rank import learning_coefficient
from topograd.errors import GeometryError


def test_two_layers_are_reduced_rank_regression() -> None:
    cases = 0
    for first, hidden, last in itertools.product(range(1, 6), repeat=3):
        sizes = (first, hidden, last)
        for rank in range(min(sizes) + 1):
            assert deep_linear_coefficient(sizes, rank) == learning_coefficient(first, hidden, last, rank)
            cases += 1
    assert cases > 300


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_a_product_of_numbers_and_a_regular_map(depth: int) -> None:
    assert deep_linear_coefficient((1,) * (depth + 1), 0) == (0.5, depth)
    assert deep_linear_coefficient((4, 3), 2)[0] == 6, "one matrix is regular whatever the truth"
    full = deep_linear_coefficient((3, *(3,) * depth), 3)
    assert full == (4.5, 1), "at full rank only the product counts"


def test_depth_and_width_never_add_and_order_within_does_not_matter() -> None:
    for widths in itertools.product((1, 2, 4), repeat=4):
        value, _ = deep_linear_coefficient(widths, 1)
        assert value <= widths[0] * widths[-1] / 2
        assert deep_linear_coefficient((widths[0], widths[2], widths[1], widths[3]), 1)[0] == value
        assert deep_linear_coefficient((*widths[:-1], 5, widths[-1]), 1)[0] <= value


@pytest.mark.parametrize(("widths", "rank"), [((3,), 0), ((3, 0), 0), ((3, 2), 3), ((3, 2), -1)])
def test_bad_shapes(widths: tuple[int, ...], rank: int) -> None:
    with pytest.raises(GeometryError, match=r"widths|rank"):
        deep_linear_coefficient(widths, rank)
