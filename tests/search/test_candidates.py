import itertools

import pytest

from topograd.errors import ConfigError, TopologyError
from topograd.search.candidates import Space
from topograd.topology.composition import Composition


@pytest.mark.parametrize(("min_depth", "max_stages"), [(1, None), (2, None), (1, 2), (2, 3)])
def test_bits_are_mended_into_the_space(min_depth: int, max_stages: int | None) -> None:
    space = Space(6, min_depth, max_stages, {"stage_heads": ("shared", "per-stage")})
    inside = {candidate.key for candidate in space}
    assert len(inside) == len(space)
    mended = {
        space.mended(bits, {"stage_heads": heads}).key
        for bits in itertools.product((False, True), repeat=5)
        for heads in ("shared", "per-stage")
    }
    assert mended == inside
    for candidate in space:  # what keeps the rules is left alone
        bits = [bool(b) for b in candidate.composition.boundary_vector]
        assert space.mended(bits, candidate.settings) == candidate


def test_mending_leaves_out_what_does_not_fit() -> None:
    assert Space(6, 2).mended([True, True, True, True, True], {}).composition == Composition.parse("2,2,2")
    assert Space(6, 1, 2).mended([False, True, True, True, True], {}).composition == Composition.parse("2,4")


def test_impossible_spaces() -> None:
    with pytest.raises(TopologyError, match="1 stages of at least 5 layers"):
        Space(4, 5)
    with pytest.raises(TopologyError, match="largest number of stages is 0"):
        Space(4, 1, 0)
    with pytest.raises(ConfigError, match="the choice bus has the values"):
        Space(4, choices={"bus": ("live", "live")})
