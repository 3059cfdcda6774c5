import numpy as np
import pytest

from raising import refused
from tests.oracles.partitions import undominated_by_pairs
from topograd.errors import ConfigError
from topograd.search.front import best_first, crowding, front_ranks, pareto_front


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@pytest.mark.parametrize("values", [3, 1000])
def test_the_front_agrees_with_comparing_all_pairs(objectives: int, values: int) -> None:
    for seed in range(5):
        points = np.random.default_rng(seed).integers(0, values, (60, objectives))
        assert pareto_front(points).tolist() == undominated_by_pairs(points.tolist())


def test_infinite_objectives_and_no_points() -> None:
    assert pareto_front([[np.inf, 0, 1], [np.inf, 0, 0], [1, 1, 1]]).tolist() == [False, True, True]
    assert pareto_front(np.zeros((0, 2))).tolist() == []


def test_ranks_peel_front_after_front() -> None:
    points = np.random.default_rng(0).integers(0, 6, (50, 3)).tolist()
    ranks = front_ranks(points)
    left = list(range(50))
    for rank in range(int(ranks.max()) + 1):
        front = undominated_by_pairs([points[i] for i in left])
        assert [i for i, on in zip(left, front, strict=True) if on] == np.flatnonzero(ranks == rank).tolist()
        left = [i for i, on in zip(left, front, strict=True) if not on]
    assert left == []


def test_room_on_a_front() -> None:
    room = crowding([[0, 10], [1, 8], [2, 4], [10, 0]])
    assert room.tolist() == [np.inf, 0.2 + 0.6, 0.9 + 0.8, np.inf]
    assert best_first([[5, 5], [0, 10], [1, 8], [2, 4], [10, 0], [11, 11]]).tolist() == [1, 4, 3, 2, 0, 5]


def test_a_million_points_at_once() -> None:
    """Compared each with each, they would take 10^12 comparisons."""
    points = np.random.default_rng(0).integers(0, 20, (2**20, 4))
    front = pareto_front(points)
    assert (front == (points == 0).all(axis=1)).all()
    assert 0 < front.sum() < 200


def test_bad_points() -> None:
    with refused(ConfigError, setting="points"):
        pareto_front([[1.0, float("nan")]])
    with refused(ConfigError, setting="points"):
        pareto_front([1, 2, 3])
