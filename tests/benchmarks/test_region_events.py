"""Spans of regions on ranks: closed forms, the pipeline's own events, and the law of when a scan pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared_cores import pipeline_order
from simulator import Machine, Times, Work, _both_ways, simulate_step
from topograd.interfaces.region_events import RegionTimes, plan_schedules, region_span

TIMES = RegionTimes(forward=1.0, backward=2.1, jacobian=5.0)


@pytest.mark.parametrize("jacobian", [0.5, 3.0, 9.0])
def test_three_ranks_by_hand(jacobian: float) -> None:
    t = replace(TIMES, jacobian=jacobian, head=0.5, latency=0.25)
    forward = 3 * 1.0 + 2 * 0.25
    row = forward + 2.1 + 0.5 + 0.25  # at rank 1
    knows = max(2 * 1.0 + 0.25 + jacobian, row)
    assert region_span(3, 1, t) == pytest.approx(knows + 0.25 + 2.1)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 6), (8, 3)])
def test_what_is_handed_on_is_1f1b(ranks: int, count: int) -> None:
    t = replace(TIMES, latency=0.7)
    orders = [pipeline_order("1f1b", p, ranks, count) for p in range(ranks)]
    expected = _both_ways(orders, lambda _, kind: 1.0 if kind == "F" else 2.1, (0.0, 0.0), 0.7)
    assert region_span(ranks, count, t, None) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "count"), [(8, 1), (16, 1), (32, 4), (64, 8), (8, 8), (16, 16), (32, 32)])
def test_a_scan_pays_where_the_law_says_so(ranks: int, count: int) -> None:
    rows = 4.0  # r c
    pays = count * rows < 2.1 * (ranks - 1)
    times = replace(TIMES, jacobian=rows)
    assert (region_span(ranks, count, times) < region_span(ranks, count, times, None)) == pays


def test_a_mixture_is_no_worse_than_both_at_the_best_number_of_ranks() -> None:
    times = replace(TIMES, jacobian=9.0)
    spans = [region_span(16, 1, times, carried) for carried in range(15)]
    assert min(spans) < spans[0] < region_span(16, 1, times, None)


def test_a_product_has_n_squared_numbers_for_each_sample() -> None:
    """64 samples of 16 numbers: 65 KB, where a product of all their numbers would be 4.2 MB."""
    slow = Machine(mbit=8.0, latency=0.0)  # a megabyte a second
    work = Work(
        microbatches=1, shared=0.0, head=0.0, machine=slow, times=Times(head=0.0, embed=0.0, optimizer=0.0)
    )
    fast = replace(work, machine=Machine(mbit=1e9, latency=0.0))
    more = simulate_step("scan", 4, work).seconds - simulate_step("scan", 4, fast).seconds
    assert 0.065 < more < 0.4


def test_forwards_are_pipelined() -> None:
    work = Work(microbatches=64, shared=0.0, head=0.0, interface_rank=1)
    assert simulate_step("scan", 8, work).seconds < 64 * 8 * work.times.forward


def test_a_plan_has_the_spans_and_the_best_number_of_ranks() -> None:
    times = replace(TIMES, jacobian=9.0, wire=0.1)
    found = plan_schedules(16, 1, times, dense_wire=0.5)
    assert found["scan"] == (region_span(16, 1, times, 0), 0)
    assert found["handed"] == (region_span(16, 1, times, None), None)
    assert found["dense"][0] == pytest.approx(found["handed"][0] + 2 * 15 * 0.4)
    span, carried = found["hybrid"]
    assert span == min(region_span(16, 1, times, n) for n in range(15)) == region_span(16, 1, times, carried)
    assert plan_schedules(1, 2, times, 0.5)["hybrid"] == (pytest.approx(6.2), 0)


def test_ranks_without_a_core_wait_for_one() -> None:
    whole = 4 * (1.0 + 2.1)
    assert region_span(4, 3, TIMES, None, cores=1) == pytest.approx(3 * whole)
    assert region_span(4, 1, TIMES, 0, cores=1) == pytest.approx(whole + 2 * 5.0)
    assert region_span(4, 1, TIMES, 0, cores=2) > region_span(4, 1, TIMES, 0)
    assert region_span(4, 3, TIMES, 0, cores=4) == region_span(4, 3, TIMES, 0)
    slow = replace(TIMES, latency=100.0)
    assert region_span(4, 1, slow, None, cores=1) == pytest.approx(whole + 6 * 100)
