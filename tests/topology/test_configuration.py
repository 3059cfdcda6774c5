"""Configurations: heads, neighbours, ends, counts, and the closed forms of the hard chain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lattice import from_bits
from raising import refused
from topograd.errors import TopologyError
from topograd.topology.composition import Composition, count_compositions, enumerate_compositions
from topograd.topology.configuration import Configuration, Heads, count_configurations


def configurations(layers: int, **limits: int) -> list[Configuration]:
    """Every configuration of so many layers."""
    return [Configuration(pi, heads) for pi in enumerate_compositions(layers, **limits) for heads in Heads]


@st.composite
def nested(draw: st.DrawFn) -> tuple[Configuration, Configuration]:
    """A configuration and one above it in the order: more boundaries, and heads at least as rich."""
    bits = draw(st.lists(st.sampled_from([(0, 0), (0, 1), (1, 1)]), max_size=30))
    low, high = draw(st.sampled_from([("shared",) * 2, ("shared", "per-stage"), ("per-stage",) * 2]))
    coarse = from_bits([first for first, _ in bits])
    fine = from_bits([second for _, second in bits])
    return Configuration.parse(coarse, low), Configuration.parse(fine, high)


def test_heads_are_ordered_by_the_paper_and_not_by_the_alphabet() -> None:
    shared, per_stage = Heads.SHARED, Heads.PER_STAGE
    assert shared < per_stage
    assert per_stage > shared
    assert shared <= shared
    assert per_stage >= per_stage
    assert [per_stage <= shared, shared >= per_stage, shared < shared, per_stage > per_stage] == [False] * 4
    assert max(shared, per_stage) is per_stage
    assert min(per_stage, shared) is shared
    assert shared < "per-stage"
    assert list(Heads) == ["shared", "per-stage"]
    for bad in ("both", "Shared", "", 1, None):
        with refused(TopologyError, setting="heads"):
            Heads(bad)  # type: ignore[arg-type]
    with refused(TopologyError, setting="heads", given="both"):
        _ = shared <= "both"


def test_parse_and_print() -> None:
    configuration = Configuration.parse("4,4,4", heads="per-stage")
    assert configuration == Configuration(Composition((4, 4, 4)), Heads.PER_STAGE)
    assert str(configuration) == "4,4,4 per-stage"
    assert Configuration.parse("12") == Configuration.parse([12], heads=Heads.SHARED)
    assert Configuration(Composition((2,)), "per-stage").heads is Heads.PER_STAGE  # type: ignore[arg-type]
    assert (
        len({configuration, Configuration.parse("4, 4, 4", "per-stage"), Configuration.parse("4,4,4")}) == 2
    )


def test_bad_input_is_refused() -> None:
    with refused(TopologyError, setting="heads", given="tied"):
        Configuration.parse("4,4", heads="tied")
    with refused(TopologyError, setting="composition", given="4,0"):
        Configuration.parse("4,0")
    with refused(TopologyError, setting="composition", given="4,4"):
        Configuration("4,4", Heads.SHARED)  # type: ignore[arg-type]
    configuration = Configuration.parse("4,4")
    with refused(TopologyError, setting="layers", given=4):
        _ = configuration | Configuration.parse("4")
    with refused(TopologyError, setting="other"):
        configuration.meet(Composition((8,)))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _ = configuration <= Composition((8,))  # type: ignore[operator]


def test_the_order_is_the_product_order() -> None:
    coarse, fine = Configuration.parse("4,8", "per-stage"), Configuration.parse("4,4,4", "shared")
    # One coordinate goes up, the other down.
    assert [coarse <= fine, coarse < fine, coarse >= fine, coarse > fine] == [False] * 4
    assert coarse | fine == Configuration.parse("4,4,4", "per-stage")
    assert coarse & fine == Configuration.parse("4,8", "shared")
    assert coarse & fine < coarse < coarse | fine


@settings(deadline=None, max_examples=60)
@given(nested())
def test_nested_pairs_compare(pair: tuple[Configuration, Configuration]) -> None:
    low, high = pair
    assert low <= high
    assert (low < high) == (low != high) == (high > low)
    assert (high <= low) == (low == high)


@pytest.mark.parametrize("layers", range(1, 6))
def test_neighbours_are_the_covers_both_ways(layers: int) -> None:
    everything = configurations(layers)
    for x in everything:
        above = [y for y in everything if x < y]
        below = [y for y in everything if y < x]
        covers = {y for y in above if not any(z < y for z in above)}
        covered = {y for y in below if not any(z > y for z in below)}
        assert set(x.neighbours()) == covers | covered
        assert len(x.neighbours()) == layers


@pytest.mark.parametrize("layers", range(1, 8))
def test_atoms_and_coatoms_are_those_of_proposition_3_8(layers: int) -> None:
    atoms, coatoms = Configuration.atoms(layers), Configuration.top(layers).neighbours()
    assert len(set(atoms)) == len(set(coatoms)) == layers
    splits = {Configuration.parse([d, layers - d], "shared") for d in range(1, layers)}
    assert set(atoms) == splits | {Configuration.parse([layers], "per-stage")}
    merges = {
        Configuration.parse([1] * i + [2] + [1] * (layers - 2 - i), "per-stage") for i in range(layers - 1)
    }
    assert set(coatoms) == merges | {Configuration.parse([1] * layers, "shared")}
    bottom, top = Configuration.bottom(layers), Configuration.top(layers)
    assert bottom == Configuration.parse([layers], "shared")
    assert top == Configuration.parse([1] * layers, "per-stage")
    assert all(bottom < x for x in atoms)
    assert all(x < top for x in coatoms)


@pytest.mark.parametrize("layers", range(1, 9))
def test_there_are_two_to_the_layers(layers: int) -> None:
    everything = configurations(layers)
    assert len(everything) == len(set(everything)) == count_configurations(layers) == 2**layers
    assert all(x.composition.layers == layers for x in everything)
    some = configurations(layers, stages=2, min_depth=2)
    assert some == [x for x in everything if x.composition.stages == 2 and min(x.composition.parts) >= 2]
    assert len(some) == count_configurations(layers, stages=2, min_depth=2)


def test_closed_forms_of_the_hard_chain() -> None:
    configuration = Configuration.parse("6,2,4", heads="per-stage")
    assert configuration.gradient_depth == 6
    assert configuration.pipeline_granularity == 3
    assert configuration.vocabulary_projections == 3
    bottom, top = Configuration.bottom(12), Configuration.top(12)
    assert (bottom.gradient_depth, top.gradient_depth) == (12, 1)
    assert (bottom.pipeline_granularity, top.pipeline_granularity) == (1, 12)
    assert (bottom.vocabulary_projections, top.vocabulary_projections) == (1, 12)


@settings(deadline=None, max_examples=100)
@given(nested())
def test_refinement_never_raises_depth_nor_lowers_granularity(
    pair: tuple[Configuration, Configuration],
) -> None:
    low, high = pair
    assert low.gradient_depth >= high.gradient_depth  # BP-descending, Def. 7.1
    assert low.pipeline_granularity <= high.pipeline_granularity  # local-ascending, Def. 7.2
    assert low.vocabulary_projections <= high.vocabulary_projections
    bottom, top = Configuration.bottom(low.composition.layers), Configuration.top(low.composition.layers)
    assert bottom.gradient_depth >= low.gradient_depth >= top.gradient_depth


def test_the_capability_region() -> None:
    paper = Configuration.parse("6,6,6,6", heads="shared")
    assert [d for d in range(1, 9) if paper.in_capability_region(d)] == [1, 2, 3, 4, 5, 6]
    assert Configuration.parse("2,10").in_capability_region()
    assert not Configuration.parse("1,11").in_capability_region()
    assert not Configuration.parse("12", heads="per-stage").in_capability_region(1)
    with refused(TopologyError, setting="min_depth", given=0):
        paper.in_capability_region(0)


@pytest.mark.parametrize("layers", range(1, 9))
@pytest.mark.parametrize("min_depth", [2, 3])
def test_the_capability_region_is_interior_and_convex(layers: int, min_depth: int) -> None:
    everything = configurations(layers)
    inside = [x for x in everything if x.in_capability_region(min_depth)]
    assert Configuration.bottom(layers) not in inside  # Remark 7.7
    assert Configuration.top(layers) not in inside
    one_stage = 1 if layers >= min_depth else 0
    assert len(inside) == 2 * (count_compositions(layers, min_depth=min_depth) - one_stage)
    for x in everything:
        below, above = any(y <= x for y in inside), any(x <= y for y in inside)
        assert (below and above) == (x in inside)
