"""Ranks that share cores, against what can be worked out by hand and against ranks that need not share."""

from dataclasses import replace

import pytest

import simulator
from shared_cores import pipeline_order, shared_span
from simulator import Machine, Times, Work, simulate_step

COSTS = {"F": 1.0, "B": 2.0, "L": 2.0}


def span(orders: list[list[tuple[str, int]]], cores: int, wire: float = 0.0, latency: float = 0.0) -> float:
    return shared_span(orders, lambda rank, kind: COSTS[kind], cores, (wire, wire), latency)


def test_two_ranks_on_one_core_take_turns() -> None:
    staged = [("F", 0), ("L", 0)]
    assert (
        span([staged, staged], 1) == 6
    )  # F at 1; then L and F together until 3; the rest of L at 4; L alone
    assert span([staged, staged], 2) == 4
    assert span([staged, staged], 1, wire=10.0) == 14  # the first is done before the second hears it
    assert span([staged], 1, latency=99.0) == 3


def test_messages_queue_on_their_link() -> None:
    orders = [[("F", 0), ("F", 1)], [("F", 0), ("F", 1)]]
    assert span(orders, 2, wire=5.0, latency=0.5) == 1 + 2 * 5 + 0.5 + 1


@pytest.mark.parametrize("method", ["staged", "gpipe", "1f1b"])
def test_with_a_core_for_each_rank_it_is_the_other_simulation(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times(forward=1.0, backward=2.3, head=0.7, embed=0.1, optimizer=0.5)
    work = Work(microbatches=7, message=1e5, times=times, machine=Machine(mbit=1.0, latency=0.02))
    for ranks in (1, 2, 3, 6):
        plain = simulate_step(method, ranks, work).seconds
        shared = replace(work, machine=replace(work.machine, cores=ranks))
        with monkeypatch.context() as patch:
            patch.setattr(simulator, "_shared", lambda P, work: True)
            assert simulate_step(method, ranks, shared).seconds == pytest.approx(plain, rel=1e-12)


def test_no_core_is_idle_while_a_rank_could_run() -> None:
    orders = [pipeline_order("1f1b", p, 4, 16) for p in range(4)]
    work = 4 * 16 * 3
    assert work / 2 < span(orders, 2) < 1.05 * work / 2
    assert span(orders, 1) == pytest.approx(work)
