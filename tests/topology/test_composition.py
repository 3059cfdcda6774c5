"""Compositions: parsing, the bijections with boundary sets and vectors, covers, enumeration, counts."""

import itertools
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lattice import from_bits
from raising import refused
from topograd.errors import TopologyError
from topograd.topology.composition import (
    MAX_LAYERS,
    Composition,
    count_compositions,
    enumerate_compositions,
)

parts_lists = st.lists(st.integers(1, 9), min_size=1, max_size=12)
small = settings(deadline=None, max_examples=60)


def brute_force(layers: int) -> Iterator[tuple[int, ...]]:
    """All compositions, straight from Def. 2.1: a first part, then a composition of what is left."""
    if layers == 0:
        yield ()
    for first in range(1, layers + 1):
        for rest in brute_force(layers - first):
            yield (first, *rest)


def test_a_worked_example() -> None:
    pi = Composition.parse("4,2,6")
    assert pi.parts == (4, 2, 6)
    assert (pi.layers, pi.stages, len(pi)) == (12, 3, 3)
    assert pi.terminals == (4, 6, 12)
    assert pi.boundaries == {4, 6}
    assert pi.boundary_vector == (0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0)
    assert pi.intervals == [(0, 4), (4, 6), (6, 12)]
    assert str(pi) == "4,2,6"


@pytest.mark.parametrize("text", ["4,4,4", "4, 4,4", " 4 ,4,  4 ", "04,4,4"])
def test_parse_forgives_spaces(text: str) -> None:
    assert Composition.parse(text) == Composition((4, 4, 4))


def test_parse_takes_compositions_and_sequences() -> None:
    pi = Composition.parse("12")
    assert pi == Composition((12,))
    assert Composition.parse(pi) is pi
    assert Composition.parse([3, 9]) == Composition.of(iter([3, 9])) == Composition((3, 9))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "4,,4",
        "4,4,",
        "4,0,4",
        "4,-4",
        "four",
        "4.0",
        "4;4",
        "4,\n4\n4",
        "٤",
        "²",
        f"{MAX_LAYERS},1",
        pytest.param("9" * 5000, id="digits"),
        pytest.param("1," * MAX_LAYERS + "1", id="parts"),
    ],
)
def test_bad_text_is_one_clear_line(text: str) -> None:
    with refused(TopologyError, setting="composition") as caught:
        Composition.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert "e.g. 4,4,4" in message


@pytest.mark.parametrize(
    "parts",
    [[], [4, 0], [4, -1], [4, 2.0], [True, 1], ["4"], [None], [10**5000], [-(10**5000)], [MAX_LAYERS, 1], 4],
)
def test_bad_parts_are_one_clear_line(parts: list[int]) -> None:
    with refused(TopologyError, setting="composition") as caught:
        Composition.of(parts)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_endless_parts_are_refused() -> None:
    with refused(TopologyError, setting="composition"):
        Composition.of(itertools.repeat(1))


def test_the_constructor_keeps_values_hashable_and_fixed() -> None:
    with refused(TopologyError, setting="composition"):
        Composition([4, 4])  # type: ignore[arg-type]
    pi = Composition((4, 4))
    with pytest.raises(FrozenInstanceError):
        pi.parts = (8,)  # type: ignore[misc]
    assert {pi: "found"}[Composition.parse("4,4")] == "found"
    assert pi != Composition((4, 4, 4))


@small
@given(parts_lists)
def test_the_bijections_return(parts: list[int]) -> None:
    pi = Composition.of(parts)
    assert Composition.parse(str(pi)) == pi
    assert Composition.from_boundaries(pi.layers, pi.boundaries) == pi
    assert from_bits(pi.boundary_vector) == pi
    assert len(pi.boundary_vector) == pi.layers - 1
    assert {i + 1 for i, bit in enumerate(pi.boundary_vector) if bit} == pi.boundaries
    assert [stop - start for start, stop in pi.intervals] == parts
    assert [i for start, stop in pi.intervals for i in range(start, stop)] == list(range(sum(parts)))


@small
@given(st.lists(st.integers(0, 1), max_size=40))
def test_every_boundary_vector_is_reached(bits: list[int]) -> None:
    assert from_bits(bits).boundary_vector == tuple(bits)


@pytest.mark.parametrize("boundary", [0, 4, -1, 1.0, "1", True, pytest.param(10**5000, id="huge")])
def test_a_boundary_outside_is_refused(boundary: int) -> None:
    with refused(TopologyError, setting="boundaries"):
        Composition.from_boundaries(4, [2, boundary])


def test_bad_boundary_input_is_refused() -> None:
    with refused(TopologyError, setting="boundaries", given=1):
        Composition.from_boundaries(1, [1])
    with refused(TopologyError, setting="layers", given=0):
        Composition.from_boundaries(0, [])


def test_the_order_is_partial_and_stays_within_one_lattice() -> None:
    a, b = Composition.parse("4,8"), Composition.parse("8,4")
    assert [a <= b, a < b, a >= b, a > b] == [False] * 4
    fine = Composition.parse("4,4,4")
    assert fine.refines(a)
    assert a < fine
    assert fine > b
    assert not fine <= a
    with refused(TopologyError, setting="layers", given=8):
        a.join(Composition.parse("4,4"))
    with refused(TopologyError, setting="layers", given=12):
        _ = a <= Composition.parse("4,4")
    with refused(TopologyError, setting="other", given="4,8"):
        a.meet("4,8")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _ = a <= (4, 8)  # type: ignore[operator]


@pytest.mark.parametrize("layers", range(1, 7))
def test_covers_are_the_steps_without_anything_between(layers: int) -> None:
    everything = [Composition(parts) for parts in brute_force(layers)]
    for pi in everything:
        above = [x for x in everything if pi < x]
        covers = {x for x in above if not any(y < x for y in above)}
        assert set(pi.refinements()) == covers
        assert len(pi.refinements()) == layers - pi.stages
        assert all(pi in x.coarsenings() for x in covers)
        assert len(pi.coarsenings()) == pi.stages - 1


@pytest.mark.parametrize("layers", range(1, 7))
def test_moves_shift_one_layer_between_two_adjacent_stages(layers: int) -> None:
    everything = [Composition(parts) for parts in brute_force(layers)]
    for pi in everything:
        expected = set()
        for other in everything:
            if other.stages == pi.stages:
                change = [q - p for p, q in zip(pi.parts, other.parts, strict=True)]
                moved = [k for k, c in enumerate(change) if c]
                if len(moved) == 2 and moved[1] == moved[0] + 1 and abs(change[moved[0]]) == 1:
                    expected.add(other)
        assert set(pi.moves()) == expected
        assert len(pi.moves()) == len(expected)


def test_the_ends_of_the_lattice() -> None:
    assert Composition.bottom(5) == Composition((5,))
    assert Composition.top(5) == Composition((1, 1, 1, 1, 1))
    assert [str(x) for x in Composition.atoms(4)] == ["1,3", "2,2", "3,1"]
    assert [str(x) for x in Composition.top(4).coarsenings()] == ["2,1,1", "1,2,1", "1,1,2"]
    assert Composition.bottom(1) == Composition.top(1)
    assert Composition.atoms(1) == []
    with refused(TopologyError, setting="layers", given=10001):
        Composition.top(MAX_LAYERS + 1)


@pytest.mark.parametrize("layers", range(1, 11))
def test_enumeration_is_complete_ordered_and_counted(layers: int) -> None:
    everything = sorted(brute_force(layers), key=lambda parts: (len(parts), parts))
    assert [x.parts for x in enumerate_compositions(layers)] == everything
    assert count_compositions(layers) == len(everything) == 2 ** (layers - 1)
    for min_depth in range(1, layers + 2):
        deep = [parts for parts in everything if min(parts) >= min_depth]
        assert [x.parts for x in enumerate_compositions(layers, min_depth=min_depth)] == deep
        assert count_compositions(layers, min_depth=min_depth) == len(deep)
        for stages in range(1, layers + 2):
            chosen = [parts for parts in deep if len(parts) == stages]
            assert [x.parts for x in enumerate_compositions(layers, stages, min_depth)] == chosen
            assert count_compositions(layers, stages, min_depth) == len(chosen)


def test_enumeration_is_lazy_and_direct_at_a_hundred_layers() -> None:
    first = itertools.islice(enumerate_compositions(100), 5)
    assert [str(x) for x in first] == ["100", "1,99", "2,98", "3,97", "4,96"]
    middle = itertools.islice(enumerate_compositions(100, stages=50), 5)
    assert all(x.stages == 50 and x.layers == 100 for x in middle)
    # 35 of 2^99: a filtered stream would not reach the end.
    rare = list(enumerate_compositions(100, stages=4, min_depth=24))
    assert len(rare) == len(set(rare)) == count_compositions(100, 4, 24) == 35
    assert count_compositions(100) == 2**99


@pytest.mark.parametrize(
    ("layers", "stages", "min_depth"), [(0, None, 1), (4, 0, 1), (4, -1, 1), (4, None, 0), (4.0, None, 1)]
)
def test_bad_ranges_are_refused_at_the_call(layers: int, stages: int | None, min_depth: int) -> None:
    wrong = (
        "layers" if layers != 4 or isinstance(layers, float) else "min_depth" if stages is None else "stages"
    )
    with refused(TopologyError, setting=wrong):
        enumerate_compositions(layers, stages, min_depth)
    with refused(TopologyError, setting=wrong):
        count_compositions(layers, stages, min_depth)
