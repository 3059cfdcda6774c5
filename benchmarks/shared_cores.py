"""When the last rank of a pipeline is done, where ranks are more than cores: event by event.

Ranks that compute share the cores evenly, as a time-slicing kernel makes them: with n of them on C cores each
goes at the rate min(1, C/n). A rank that waits for a message leaves its share to the others. Messages travel
meanwhile, one after another on each link and direction.

All ranks that run have the same rate, so a task is done when the work v that one rank would have done since
the start, v(t) = ∫ rate, has grown by its cost: one heap of such marks is enough. With C >= P ranks the times
are those of `simulator.py`, which is the test of both.

Symbols: P ranks, N tasks in all. Cost: O(N log P). Limits: equal shares, no cost of a switch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

Order = Sequence[tuple[str, int]]
"""Tasks of one rank: (kind, micro-batch). F hears the rank before and speaks to the one behind, B the other
way, L is local."""


def shared_span(
    orders: Sequence[Order],
    cost: Callable[[int, str], float],
    cores: int,
    wires: tuple[float, float],
    latency: float,
) -> float:
    """Seconds until all tasks are done; `cost(rank, kind)` and the times of a message on a link, forward and
    back, in seconds."""
    run = _Run(orders, cost, wires, latency)
    for rank in range(len(orders)):
        run.start(rank)
    while run.running or run.arriving:
        rate = min(1.0, cores / len(run.running)) if run.running else 0.0
        done = run.now + (run.running[0][0] - run.work) / rate if run.running else math.inf
        if run.arriving and run.arriving[0][0] < done:
            arrival, rank, task = heappop(run.arriving)
            run.work += rate * (arrival - run.now)
            run.now = arrival
            run.heard.add((rank, task))
        else:
            run.work, rank = heappop(run.running)
            run.now = done
            run.finish(rank)
        run.start(rank)
    return run.now


class _Run:
    """Where everything is at one moment."""

    def __init__(
        self,
        orders: Sequence[Order],
        cost: Callable[[int, str], float],
        wires: tuple[float, float],
        latency: float,
    ) -> None:
        self.orders, self.cost, self.latency = orders, cost, latency
        self.wires = {"F": wires[0], "B": wires[1]}
        self.now = self.work = 0.0
        self.at, self.busy = [0] * len(orders), [False] * len(orders)
        self.running: list[tuple[float, int]] = []
        self.arriving: list[tuple[float, int, tuple[str, int]]] = []
        self.heard: set[tuple[int, tuple[str, int]]] = set()
        self.links: dict[tuple[int, int], float] = {}

    def start(self, rank: int) -> None:
        """Begin the next task of a rank that is free, if what it needs is there."""
        if self.busy[rank] or self.at[rank] == len(self.orders[rank]):
            return
        task = self.orders[rank][self.at[rank]]
        alone = (
            task[0] == "L"
            or (task[0] == "F" and rank == 0)
            or (task[0] == "B" and rank == len(self.orders) - 1)
        )
        if alone or (rank, task) in self.heard:
            self.busy[rank] = True
            heappush(self.running, (self.work + self.cost(rank, task[0]), rank))

    def finish(self, rank: int) -> None:
        """A task is done: its rank is free, and what it says is on the way."""
        task = self.orders[rank][self.at[rank]]
        self.busy[rank] = False
        self.at[rank] += 1
        peer = rank + {"F": 1, "B": -1, "L": 0}[task[0]]
        if peer != rank and 0 <= peer < len(self.orders):
            gone = max(self.links.get((rank, peer), 0.0), self.now) + self.wires[task[0]]
            self.links[rank, peer] = gone
            heappush(self.arriving, (gone + self.latency, peer, task))


def pipeline_order(name: str, rank: int, ranks: int, batches: int) -> list[tuple[str, int]]:
    """The forwards F and backwards B of a rank, in the order of the schedule "gpipe" or "1f1b".

    >>> "".join(kind for kind, _ in pipeline_order("1f1b", 0, 2, 4))
    'FFBFBFBB'
    """
    if name == "gpipe":
        return [("F", i) for i in range(batches)] + [("B", i) for i in range(batches)]
    warmup = min(ranks - 1 - rank, batches)
    order = [("F", i) for i in range(warmup)]
    for i in range(batches - warmup):
        order += [("F", warmup + i), ("B", i)]
    return order + [("B", i) for i in range(batches - warmup, batches)]
