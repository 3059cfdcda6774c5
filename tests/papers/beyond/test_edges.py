"""The study of edges: rates that lie between others, gaps by seed, and what each arm is."""

from __future__ import annotations

import pytest

from papers.beyond.edges import (
    BACKPROP,
    BOTH,
    CORE,
    CUT,
    LATE,
    THIN,
    WHOLE,
    add_gaps,
    losses_gap,
    next_rate,
    of,
    topologies,
)
from topograd.topology.plan import Plan


def test_the_arms_differ_in_their_edges() -> None:
    plans = {name: Plan.of(topology, 6) for name, topology in topologies().items()}
    assert tuple(plans)[: len(CORE)] == CORE
    assert plans[LATE].lateness == plans[BOTH].lateness == (2, 1, 0)
    assert plans["late by layer"].lateness == (5, 4, 3, 2, 1, 0)
    assert plans[CUT].groups() == [[0], [1], [2]]
    assert plans[WHOLE].groups() == [[0, 1, 2]]
    bits = {
        name: {e.grad_bits for p in plan.stages for e in p.stage.sources[:1] if p.index}
        for name, plan in plans.items()
    }
    assert bits[THIN[3]] == {3}
    assert bits[BOTH] == bits[THIN[4]] == {4}
    assert bits[WHOLE] == bits[LATE] == {32}


def test_a_rate_at_an_end_is_followed_by_the_one_beyond() -> None:
    assert next_rate({0.005: 3.0, 0.01: 2.0, 0.02: 1.0}) == 0.04
    assert next_rate({0.0025: 2.0, 0.005: 1.0, 0.01: 2.0, 0.02: 3.0}) is None
    assert next_rate({0.08: 1.0, 0.04: 2.0}) is None  # the widest


def test_gaps_are_of_the_same_seed() -> None:
    points = [{"losses": [None, 2.0]}, {"losses": [None, 1.0]}]
    later = [{"losses": [None, 2.2]}, {"losses": [None, 1.0]}]
    rows = [
        {"arm": arm, "seed": seed, "bpb": bpb, "trajectory": later if arm == LATE else points}
        for seed, numbers in enumerate(((2.0, 1.0, 2.5), (4.0, 5.0, 5.0)))
        for arm, bpb in zip((BACKPROP, WHOLE, LATE), numbers, strict=True)
    ]
    add_gaps(rows)
    assert of(rows, LATE) == [25.0, 25.0]
    assert of(rows, LATE, "price") == [150.0, 0.0]
    assert losses_gap(rows, LATE) == [[pytest.approx(10.0)] * 2, [0.0] * 2]
