import itertools

import pytest

from raising import refused
from topograd.errors import ConfigError, TopologyError
from topograd.runs.topology_config import TopologyConfig
from topograd.search.candidates import Candidate, Space
from topograd.topology.composition import Composition
from topograd.topology.dag import EMBEDDING

EVERYTHING = {
    "heads": ("shared", "per-stage"),
    "graph": ("chain", "forest"),
    "relay": ("identity", "gate"),
    "source": ("none", "embedding", "layer:1", "layer:2"),
    "join": ("identity", "low-rank"),
    "objective": ("cross-entropy", "residual"),
    "decoder": ("0", "1"),
}


@pytest.mark.parametrize(("min_depth", "max_stages"), [(1, None), (2, None), (1, 2), (2, 3)])
def test_bits_are_mended_into_the_space(min_depth: int, max_stages: int | None) -> None:
    space = Space(6, min_depth, max_stages, {"heads": ("shared", "per-stage")})
    inside = {candidate.key for candidate in space}
    assert len(inside) == space.size
    mended = {
        candidate.key
        for bits in itertools.product((False, True), repeat=5)
        for heads in ("shared", "per-stage")
        if (candidate := space.mended(bits, {"heads": heads})) is not None
    }
    assert mended == inside
    for candidate in space:  # what keeps the rules is left alone
        bits = [bool(b) for b in candidate.composition.boundary_vector]
        assert space.mended(bits, candidate.settings) == candidate


def test_mending_leaves_out_what_does_not_fit() -> None:
    def parts(space: Space, bits: list[bool]) -> Composition:
        candidate = space.mended(bits, {})
        assert candidate is not None
        return candidate.composition

    assert parts(Space(6, 2), [True, True, True, True, True]) == Composition.parse("2,2,2")
    assert parts(Space(6, 1, 2), [False, True, True, True, True]) == Composition.parse("2,4")


@pytest.mark.parametrize(("min_depth", "max_stages"), [(1, None), (2, None), (1, 2), (1, 3)])
def test_every_proposal_is_a_topology_or_nothing(min_depth: int, max_stages: int | None) -> None:
    """All bits and all settings: what is mended can be built, and no two candidates mean one topology."""
    space = Space(5, min_depth, max_stages, EVERYTHING)
    found, skipped = {}, 0
    for bits in itertools.product((False, True), repeat=4):
        for values in itertools.product(*EVERYTHING.values()):
            candidate = space.mended(bits, dict(zip(EVERYTHING, values, strict=True)))
            if candidate is None:
                skipped += 1
            else:
                found[candidate.key] = candidate
    assert skipped
    assert set(found) == {candidate.key for candidate in space}
    assert len(found) == space.size
    built = [candidate.topology(TopologyConfig()).build(5) for candidate in found.values()]
    assert len(set(built)) == len(built)


def test_what_a_candidate_means() -> None:
    chain = {"graph": "chain", "source": "embedding", "join": "gate", "decoder": "0"}
    topology = Candidate(Composition.parse("2,2"), chain).topology(TopologyConfig()).build(4)
    assert [edge.source for edge in topology.stages[1].sources] == [0, EMBEDDING]
    assert topology.stages[1].sources[1].relay.startswith("gate")
    forest = {"graph": "forest", "source": "none", "decoder": "1"}
    topology = Candidate(Composition.parse("2,2"), forest).topology(TopologyConfig()).build(4)
    assert topology.layers == 6, "two branches of two layers, and a private decoder of one layer each"
    assert len(topology.leaves()) == 2


def test_how_gradient_crosses_is_an_axis_of_its_own() -> None:
    choices = {"grad_scale": ("0", "0.5", "1"), "grad_delay": ("0", "1"), "grad_bits": ("32", "4")}
    space = Space(3, 1, 2, {**choices, "objective": ("cross-entropy", "residual")})
    built = {c.key: c.topology(TopologyConfig()).build(3) for c in space}
    assert len(built) == space.size == len(set(built.values()))
    # one stage; two partitions into two, each without gradient or with two λ and two bits, late or not;
    # the residual objective has no delay, and on one stage it is the other one
    assert space.size == 1 + 2 * (1 + 2 * 2 * 2) + 2 * (1 + 2 * 2)
    late = Candidate(Composition.parse("1,2"), {"grad_scale": "0.5", "grad_delay": "1", "grad_bits": "4"})
    (edge,) = late.topology(TopologyConfig()).build(3).stages[1].sources
    assert (edge.grad_scale, edge.delay, edge.grad_bits) == (0.5, 1, 4)


def test_a_large_space_is_counted_without_walking_through_it() -> None:
    assert Space(200, 1, None, {"heads": ("shared", "per-stage")}).size == 2**200
    assert Space(60, 2, 5, {"source": ("none", "layer:9")}).size > 10**5


def test_impossible_spaces() -> None:
    with refused(TopologyError, setting="stages", given=1):
        Space(4, 5)
    with refused(TopologyError, setting="max_stages", given=0):
        Space(4, 1, 0)
    with refused(ConfigError, setting="choices", given=["live", "live"]):
        Space(4, choices={"bus": ("live", "live")})
    with refused(ConfigError, setting="choices", given="stage_heads"):
        Space(4, choices={"stage_heads": ("shared",)})
    with refused(ConfigError, setting="source", given="layer:4"):
        Space(4, choices={"source": ("layer:4",)})
