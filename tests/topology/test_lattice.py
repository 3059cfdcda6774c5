"""The lattice laws, for compositions and for configurations: both are Boolean (Cor. 3.3, Prop. 3.6)."""

from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from lattice import from_bits
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration, Heads

Triple: TypeAlias = tuple[Any, Any, Any]
"""Three compositions or three configurations of one L."""


@st.composite
def compositions(draw: st.DrawFn) -> Triple:
    size = draw(st.integers(0, 24))
    vector = st.lists(st.integers(0, 1), min_size=size, max_size=size)
    a, b, c = (from_bits(draw(vector)) for _ in range(3))
    return a, b, c


@st.composite
def configurations(draw: st.DrawFn) -> Triple:
    a, b, c = (Configuration(pi, draw(st.sampled_from(Heads))) for pi in draw(compositions()))
    return a, b, c


triples = compositions() | configurations()
small = settings(deadline=None, max_examples=100)


def complement(x: Any) -> Any:
    if isinstance(x, Composition):
        return from_bits([1 - bit for bit in x.boundary_vector])
    flipped = Heads.SHARED if x.heads is Heads.PER_STAGE else Heads.PER_STAGE
    return Configuration(complement(x.composition), flipped)


@small
@given(triples)
def test_commutative_associative_idempotent(triple: Triple) -> None:
    a, b, c = triple
    assert a | b == b | a == a.join(b)
    assert a & b == b & a == a.meet(b)
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert a | a == a & a == a


@small
@given(triples)
def test_absorption_and_distributivity(triple: Triple) -> None:
    a, b, c = triple
    assert a | (a & b) == a
    assert a & (a | b) == a
    assert a & (b | c) == (a & b) | (a & c)
    assert a | (b & c) == (a | b) & (a | c)


@small
@given(triples)
def test_bounds_and_complement(triple: Triple) -> None:
    a, b, _ = triple
    layers = a.layers if isinstance(a, Composition) else a.composition.layers
    bottom, top = type(a).bottom(layers), type(a).top(layers)
    assert bottom <= a <= top
    assert a | bottom == a & top == a
    assert a | top == top
    assert a & bottom == bottom
    assert a | complement(a) == top
    assert a & complement(a) == bottom
    assert complement(a | b) == complement(a) & complement(b)


@small
@given(triples)
def test_the_order_is_a_partial_order(triple: Triple) -> None:
    a, b, c = triple
    assert a <= a
    assert not a < a
    assert (a <= b and b <= a) == (a == b)
    assert a & b & c <= a & b <= a  # a chain, on which transitivity has something to say
    assert a & b & c <= a
    assert (a < b) == (b > a) == (a <= b and a != b)
    assert (a <= b) == (b >= a)


@small
@given(triples)
def test_order_join_and_meet_agree(triple: Triple) -> None:
    a, b, c = triple
    assert (a <= b) == (a | b == b) == (a & b == a)
    assert a <= a | b
    assert a & b <= a
    assert (a <= c and b <= c) == (a | b <= c)  # the join is the least upper bound
    assert (c <= a and c <= b) == (c <= a & b)  # the meet is the greatest lower bound
    assert a | b <= a | b | c
    assert a & b & c <= a & b


@small
@given(compositions())
def test_compositions_are_the_subsets_of_the_boundaries(triple: Triple) -> None:
    a, b, _ = triple
    assert (a | b).boundaries == a.boundaries | b.boundaries
    assert (a & b).boundaries == a.boundaries & b.boundaries
    assert (a <= b) == b.refines(a) == (a.boundaries <= b.boundaries)
    assert (a <= b) == all(x <= y for x, y in zip(a.boundary_vector, b.boundary_vector, strict=True))
