import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.search.utility import (
    DEPLOYMENTS,
    Terms,
    Weights,
    bandwidth_cost,
    calibration_cost,
    capability,
    coordination,
    deployment,
    hard,
    head_cost,
    structural_capability,
    utility,
)
from topograd.topology import closed_forms
from topograd.topology.composition import Composition, enumerate_compositions
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan


def test_each_term_enters_with_its_sign() -> None:
    base = Terms(bpb=2.0)
    weights = Weights(coupling=1, head=2, capability=4, bandwidth=8, calibration=16)
    assert utility(base, weights) == 2.0
    one = {"coupling": 1, "head": 2, "capability": -4, "bandwidth": 8, "calibration": 16}
    for name, change in one.items():
        assert utility(Terms(bpb=2.0, **{name: 1.0}), weights) == 2.0 + change


def test_the_terms() -> None:
    assert coordination([1, 1, 1]) == 1.0
    assert coordination([0.5, 0.0], [3.0, 7.0]) == 0.15
    assert coordination([]) == coordination([1.0], [0.0]) == 0.0
    assert head_cost([0.0, 1.0], "shared", 100, 10) == 0.0
    assert head_cost([0.0, 1.0], "per-stage", 100, 10) == 2.0
    assert head_cost([0.0, 1.0], "per-stage", 100, 10, rank=2) == pytest.approx(2 * 2 * 110 / 1000)
    assert bandwidth_cost([0.0, 0.5, 1.0], [0.1, 0.2, 0.0], 0.3) == pytest.approx(0.2 + 0.05)
    assert bandwidth_cost([0.0], [0.9], 0.3) == 0.0
    assert calibration_cost([0.1, 0.3]) == pytest.approx(0.2)
    assert capability(prefix_exit=1, wand=0, specialist=0.5, composition=0.1) == pytest.approx(0.4)
    assert hard(Composition.parse("2,1")) == [1.0, 0.0]


def test_coupling_has_one_definition() -> None:
    """Of a plan and of grad_scales; the cost counts joints, the coordination is a share of them."""
    assert coordination(hard(Composition.parse("2,2,2"))) == 0.6
    for pi in enumerate_compositions(6):
        plan = Plan.of(Topology.chain(pi), 6)
        assert coordination(hard(pi)) == pytest.approx(closed_forms.coordination(plan))
        assert closed_forms.coupling_cost(plan) == sum(hard(pi)) == pi.layers - pi.stages
    soft = [0.1, 0.9, 0.5]
    plan = Plan.of(Topology.soft(soft), 4)
    assert coordination(soft) == pytest.approx(closed_forms.coordination(plan))


def test_the_structural_capability_vanishes_at_both_ends() -> None:
    scores = {pi: structural_capability(pi, 3) for pi in enumerate_compositions(12)}
    assert scores[Composition.bottom(12)] == scores[Composition.top(12)] == 0
    assert max(scores, key=scores.__getitem__) == Composition.parse("3,3,3,3")
    assert all(0 <= score <= 1 for score in scores.values())


def test_deployments_choose_different_partitions() -> None:
    """With bits per byte that grow with every boundary, only the datacenter keeps backprop."""

    def best(name: str) -> Composition:
        def score(pi: Composition) -> float:
            terms = Terms(
                bpb=1.0 + 0.05 * (pi.stages - 1),
                coupling=coordination(hard(pi)),
                capability=structural_capability(pi, 2),
            )
            return utility(terms, deployment(name))

        return min(enumerate_compositions(8), key=score)

    assert best("datacenter") == Composition.bottom(8)
    for name in set(DEPLOYMENTS) - {"datacenter"}:
        assert 1 < best(name).stages < 8


def test_bad_input() -> None:
    with refused(ConfigError, setting="deployment", given="moon"):
        deployment("moon")
    with refused(ConfigError, setting="head", given=-1):
        Weights(head=-1)
    with refused(ConfigError, setting="grad_scales", given=1.5):
        coordination([0.0, 1.5])
    with refused(ConfigError, setting="ranks", given=[1.0]):
        bandwidth_cost([0.0, 0.0], [1.0], 1.0)
    with refused(ConfigError, setting="costs", given=-1.0):
        coordination([0.0], [-1.0])
    with refused(ConfigError, setting="heads", given="two"):
        head_cost([0.0], "two", 10, 10)
    with refused(ConfigError, setting="errors"):
        calibration_cost([])
    with refused(ConfigError, setting="composition", given=1.5):
        capability(prefix_exit=0, wand=0, specialist=0, composition=1.5)
