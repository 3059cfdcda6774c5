"""`from_bits`: the inverse of `Composition.boundary_vector`."""

from __future__ import annotations

from collections.abc import Sequence

from topograd.topology.composition import Composition


def from_bits(vector: Sequence[int]) -> Composition:
    """The composition with a boundary after layer i where entry i - 1 is set."""
    return Composition.from_boundaries(len(vector) + 1, [i + 1 for i, bit in enumerate(vector) if bit])
