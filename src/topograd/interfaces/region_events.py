"""The span of a step over bounded interfaces on P ranks, event by event, as `parallel/region_scan.py` runs.

Every rank has one region and a core, unless there are fewer; a step has M micro-batches. A rank runs
P - 1 - p of them forward before its first backward, then both in turns (1F1B). Behind the forwards, for each:

    scan      ranks 1..P-2 build a Jacobian, the last one runs its backward, whose row g and the others'
              products go to earlier ranks by recursive doubling; then every rank's own backward
    hybrid    the last `carried` inner ranks hand the row on by their own backwards; the scan is of the others
    handed    all do: a backprop pipeline whose messages are the interfaces'
    dense     the same pipeline with whole hidden states in its messages: the layers without interfaces

Times in seconds, sizes as seconds on a link: `wire` of a message or a row, `product` of a matrix. A message
arrives `latency` after it has left. Law: with f a forward, J = r c f and b = 2.1 f, a scan is shorter than a
pipeline iff M r c < 2.1 (P - 1), where latency counts for nothing (`benchmarks/region_events.py`).

Cost: O(P M log P); a plan asks P times. Limits: links carry all that is sent at once; a sender does not wait
for the receiver; with fewer ranks than regions every rank has as many as the fullest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

Key = tuple[str, int, int]
"""What is sent, to which rank, of which micro-batch."""
Events = Generator[Key | float, float, None]


@dataclass(frozen=True, kw_only=True)
class RegionTimes:
    """Seconds of one region on one micro-batch."""

    forward: float
    backward: float
    jacobian: float
    head: float = 0.0
    """The loss and its backward, on the last rank."""
    extra: float = 0.0
    """Embedding and bookkeeping of a micro-batch, on every rank."""
    wire: float = 0.0
    product: float = 0.0
    latency: float = 0.0


def region_span(
    ranks: int, microbatches: int, times: RegionTimes, carried: int | None = 0, cores: int | None = None
) -> float:
    """Seconds until all ranks are done; `carried` None hands everything on, which builds no Jacobian.

    With fewer `cores` than ranks, what is ready waits for one, first come first served.
    """
    last = ranks - 1 - (ranks - 1 if carried is None else carried)
    arrived: dict[Key, float] = {}
    tasks = [_rank(p, ranks, microbatches, last, times, arrived) for p in range(ranks)]
    ready = [(0.0, p) for p in range(ranks)]
    free, asleep = [0.0] * (cores or ranks), dict[Key, tuple[float, int]]()
    begun, end = set[int](), 0.0
    while ready:
        now, p = heapq.heappop(ready)
        try:
            wanted = tasks[p].send(now) if p in begun else next(tasks[p])
        except StopIteration:
            end = max(end, now)
            continue
        finally:
            begun.add(p)
            for key in [key for key in asleep if key in arrived]:
                since, waiting = asleep.pop(key)
                heapq.heappush(ready, (max(since, arrived[key]), waiting))
        if not isinstance(wanted, tuple):
            done = max(now, heapq.heappop(free)) + wanted
            heapq.heappush(free, done)
            heapq.heappush(ready, (done, p))
        elif wanted in arrived:
            heapq.heappush(ready, (max(now, arrived[wanted]), p))
        else:
            asleep[wanted] = now, p
    return end


def _order(place: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    ahead = ranks - 1 - place
    for i in range(microbatches):
        yield "F", i
        if i >= ahead:
            yield "B", i - ahead
    for i in range(max(microbatches - ahead, 0), microbatches):
        yield "B", i


def _rank(
    p: int, ranks: int, microbatches: int, last: int, t: RegionTimes, arrived: dict[Key, float]
) -> Events:
    """One rank: yields what it waits for or the seconds that it computes, and is sent when that is done."""
    for kind, i in _order(p, ranks, microbatches):
        if kind == "F":
            if p > 0:
                yield "forward", p, i
            now = yield t.extra + t.forward
            arrived["forward", p + 1, i] = now + t.wire + t.latency
            continue
        if p >= last:  # hands on, or begins the scan
            if p < ranks - 1:
                yield "row", p, i
            now = yield t.backward + (t.head if p == ranks - 1 else 0.0)
            name = "row" if p > last else "first"
            arrived[name, p - 1, i] = now + t.wire + t.latency
            continue
        yield from _doubled(p, i, last, t, arrived, (yield t.jacobian if p > 0 else 0.0))
        yield t.backward


def _doubled(p: int, i: int, last: int, t: RegionTimes, arrived: dict[Key, float], now: float) -> Events:
    """The exchange of products, as `RegionScan._doubled`; ends when this rank knows its row."""
    arrived["first", p - 1, i] = now + t.product + t.latency
    now = yield "first", p, i
    reach = 1
    while reach < last:
        size = t.wire if p + reach >= last else t.product
        arrived[f"by {reach}", p - reach, i] = now + size + t.latency
        if p + reach < last:
            now = yield f"by {reach}", p, i
        reach *= 2


def plan_schedules(
    ranks: int, microbatches: int, times: RegionTimes, dense_wire: float
) -> dict[str, tuple[float, int | None]]:
    """Seconds of a step by each schedule and what it carries; the hybrid's is the best number of ranks."""
    spans = {n: region_span(ranks, microbatches, times, n) for n in range(max(ranks - 1, 1))}
    best = min(spans, key=lambda carried: spans[carried])
    dense = replace(times, wire=dense_wire)
    return {
        "dense": (region_span(ranks, microbatches, dense, None), None),
        "handed": (region_span(ranks, microbatches, times, None), None),
        "scan": (spans[0], 0),
        "hybrid": (spans[best], best),
    }


def planned(
    owners: Sequence[int],
    microbatches: int,
    times: RegionTimes,
    sizes: tuple[int, int, int],
    mbit: float,
    latency: float,
    alike: bool = True,
) -> dict[str, Any]:
    """The spans of all schedules, and the shortest that can be run as words of `train`.

    `owners` has the rank of each region. `times` are of one region without links, `sizes` the bytes of a
    message, a product and a hidden state. Interfaces that are not `alike` are scanned on one rank only.
    """
    ranks = owners[-1] + 1
    most = max(owners.count(rank) for rank in range(ranks))
    wire, product, hidden = (8 * size / (mbit * 1e6) for size in sizes)
    here = replace(
        times,
        forward=most * times.forward,
        backward=most * times.backward,
        jacobian=most * times.jacobian,
        wire=wire,
        product=product,
        latency=latency,
    )
    found = plan_schedules(ranks, microbatches, here, hidden)
    runnable = ("handed", "scan", "hybrid") if alike or ranks == 1 else ("handed",)
    best = min(runnable, key=lambda name: found[name][0])  # of equal ones the first
    begins = ranks - 1 - (found["hybrid"][1] or 0)  # the rank at which the scan begins
    words = {
        "handed": "--backward autograd",
        "scan": "--backward scan",
        "hybrid": f"--backward hybrid --carried {len(owners) - 1 - owners.index(begins)}",
    }
    parallel = f" --parallel stages={ranks}" if ranks > 1 else ""
    accumulate = f" --accumulate {microbatches}" if microbatches > 1 else ""
    return {
        "workers": ranks,
        "microbatches": microbatches,
        "seconds": {name: span if span < math.inf else None for name, (span, _) in found.items()},
        "best": best,
        "train": words[best] + parallel + accumulate,
    }
