"""The cheapest partition by trying them all, and dominance by comparing every pair: the definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topograd.topology.composition import Composition, enumerate_compositions


def cheapest_by_trying(
    costs: Mapping[tuple[int, int], float], layers: int, stages: Sequence[int], min_depth: int
) -> tuple[Composition, float]:
    """The composition with the least sum of costs, among those with one of these numbers of stages."""
    best: tuple[Composition, float] | None = None
    for count in stages:
        for composition in enumerate_compositions(layers, count, min_depth):
            total = 0.0
            for interval in composition.intervals:
                total += costs[interval]
            if best is None or total < best[1]:
                best = composition, total
    assert best is not None, "no composition fits"
    return best


def undominated_by_pairs(points: Sequence[Sequence[float]]) -> list[bool]:
    """For each point whether no other is at most as large everywhere and smaller somewhere."""
    return [
        not any(
            all(p <= q for p, q in zip(other, point, strict=True)) and tuple(other) != tuple(point)
            for other in points
        )
        for point in points
    ]
