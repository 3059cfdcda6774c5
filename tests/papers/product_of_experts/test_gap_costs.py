"""What steps cost: the closed forms, and a measurement in small."""

import pytest
import torch

from papers.product_of_experts import gap_costs
from papers.product_of_experts.gap_arms import ARMS, SAVING
from papers.product_of_experts.gap_costs import costs, shape, traffic
from papers.staged_runs import Sizes
from topograd.topology.dag import Topology

NAMED = {arm.name: arm for arm in (*ARMS, *SAVING)}


def test_traffic_counts_borders_there_and_back() -> None:
    assert traffic(NAMED["backprop"].topology) == 4
    assert traffic(NAMED["staged"].topology) == 2
    assert traffic(NAMED["next"].topology) == traffic(NAMED["hierarchical"].topology) == 4
    assert traffic(NAMED["staged, decoders"].topology) == 2, "a decoder stays on its stage's device"
    assert traffic(Topology.chain("3,3")) == 1
    assert shape(NAMED["staged, λ 1 → 0"])["traffic"] == 3, "λ > 0 in two of four quarters"


def test_what_follows_from_the_topology() -> None:
    assert shape(NAMED["next"]) == {"gradient_depth": 4, "activation_layers": 4, "traffic": 4}
    assert shape(NAMED["staged"])["activation_layers"] == 2
    assert shape(NAMED["staged, late"])["gradient_depth"] == 6


def test_steps_are_measured_beside_backprop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_costs, "ROUNDS", 2)
    config = Sizes(width=32, context=32, batch=4, steps=4, soft_steps=0, eval_bytes=100, seeds=1).config(0)
    batch = torch.randint(257, (4, 32)), torch.randint(257, (4, 32))
    names = ("backprop", "staged", "next", "staged, batch × 2", "staged, late", *(arm.name for arm in SAVING))
    found = costs([NAMED[name] for name in names], config, batch)
    memory = {name: found[name]["memory_ratio"] for name in names}
    assert memory["backprop"] == 1
    assert memory["staged"] < 0.6
    assert memory["staged"] < memory["next"] < 0.95
    assert 1.8 < memory["staged, batch × 2"] / memory["staged"] < 2.2
    assert memory["backprop, recomputed"] < 0.6
    assert memory["backprop, 4 parts"] < memory["backprop, 2 parts"] < 0.7
    assert memory["staged, late"] > memory["staged"], "the largest of the training counts"
    assert found["backprop"]["step_time"]["median"] == 1
    assert all(found[name]["step_time"]["median"] > 0 for name in names)
