"""Pareto fronts, ranks of fronts, and the room that points of a front have.

Statement. A point p dominates q when p_i ≤ q_i for every objective i and p ≠ q: smaller is better. The front
is what nothing dominates; equal points are all on it. The rank of a point is the number of fronts that must
be taken away before it is on one.

Symbols and shapes. points (N, M): N points, M objectives.
Cost: the front O(N log N) for M ≤ 2. For more, O(F S) with F the size of the front and S the mean number of
points left when one of its points is met, which falls fast: 2^20 points with random objectives take about 1 s
for two or three of them, 2 s for four, 4 s for six.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.1
(Remark 10.3), §10.6; ranks and crowding as in Deb and others, "A fast and elitist multiobjective genetic
algorithm: NSGA-II".
Limits. For M ≥ 3, points that are nearly all undominated cost O(N²): a million such points take hours.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from topograd.errors import ConfigError

Numbers = NDArray[np.float64]


def pareto_front(points: Any) -> NDArray[np.bool_]:
    """Which of the points (N, M) no other dominates; every objective is to be small.

    >>> pareto_front([[1, 3], [2, 2], [3, 3], [2, 2]]).tolist()
    [True, True, False, True]
    """
    values = _checked(points)
    if not len(values):
        return np.zeros(0, dtype=bool)
    return _staircase(values) if values.shape[1] == 2 else _sieve(values)


def front_ranks(points: Any) -> NDArray[np.int64]:
    """For each point (N, M) the number of its front, 0 for the undominated ones."""
    values = _checked(points)
    ranks = np.zeros(len(values), dtype=np.int64)
    left = np.arange(len(values))
    rank = 0
    while len(left):
        front = pareto_front(values[left])
        ranks[left[front]] = rank
        left = left[~front]
        rank += 1
    return ranks


def crowding(points: Any) -> Numbers:
    """How much room each point (N, M) of one front has: the sum over objectives of its neighbours' distance.

    Each objective counts as a share of its range; the ends of a range have infinite room.
    """
    values = _checked(points)
    room = np.zeros(len(values))
    for column in values.T:
        order = np.argsort(column, kind="stable")
        low, high = column[order[0]], column[order[-1]]
        room[order[[0, -1]]] = np.inf
        if high > low:
            room[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / (high - low)
    return room


def best_first(points: Any) -> NDArray[np.int64]:
    """Indices of the points (N, M), lower fronts first and within a front those with more room first."""
    values = _checked(points)
    ranks = front_ranks(values)
    room = np.zeros(len(values))
    for rank in np.unique(ranks):
        room[ranks == rank] = crowding(values[ranks == rank])
    return np.lexsort((-room, ranks))


def _staircase(points: Numbers) -> NDArray[np.bool_]:
    """The front of points (N, 2): in order of the first objective, the second must fall."""
    order = np.lexsort((points[:, 1], points[:, 0]))
    x, y = points[order].T
    fresh = np.concatenate(([True], (x[1:] > x[:-1]) | (y[1:] > y[:-1])))
    lowest = np.minimum.accumulate(y)
    falls = np.concatenate(([True], y[1:] < lowest[:-1]))
    on_front = np.empty(len(points), dtype=bool)
    on_front[order] = falls[
        np.flatnonzero(fresh)[np.cumsum(fresh) - 1]
    ]  # equal points share their first's fate
    return on_front


def _sieve(points: Numbers) -> NDArray[np.bool_]:
    """The front of points: keep the one of least sum and its equals, drop what it dominates, and so on.

    Objectives are first replaced by their ranks, so that no scale counts and sums are exact. A point of least
    sum among those left is undominated: whatever dominates it has a smaller sum and would have been met.
    """
    ranks = np.stack([np.unique(column, return_inverse=True)[1] for column in points.T])
    left = np.argsort(ranks.sum(0), kind="stable")
    columns = ranks[:, left]
    on_front = np.zeros(len(points), dtype=bool)
    while len(left):
        better, equal = columns[0] < columns[0, 0], columns[0] == columns[0, 0]
        for column in columns[1:]:
            better |= column < column[0]
            equal &= column == column[0]
        on_front[left[equal]] = True
        left, columns = left[better], columns[:, better]
    return on_front


def _checked(points: Any) -> Numbers:
    values: Numbers = np.asarray(points, dtype=np.float64)
    if values.ndim != 2 or (len(values) and not values.shape[1]):
        raise ConfigError(setting="points", given=values.shape, allowed="of shape (points, objectives)")
    if np.isnan(values).any():
        raise ConfigError(
            "points has an objective that is not a number", setting="points", remedy="leave that point out"
        )
    return values
