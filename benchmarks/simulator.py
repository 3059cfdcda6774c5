"""How long a step takes on P ranks, what it sends and holds, and what failures cost: without the ranks.

Every rank has one stage; a step has M micro-batches. Times of one stage on one micro-batch, in seconds:
f `forward`, b `backward`, h `head` (loss and its backward), e `embed` (the embedding, which every rank runs,
and its backward), o `optimizer`, once a step. A message of a bytes takes a/bandwidth on its link, one after
another, and arrives `latency` later; links carry both directions at once.

    gpipe, 1f1b   every F and B starts when its rank is free and what it needs has arrived (event by event,
                  the order of `shared_cores.py`); the head is on the last rank, the embedding's copies
                  are added up at the end, where stages read x0
    whole         1F1B by the executor of stages: as 1f1b
    thin          the same; gradients come back in few bits, at the cost of rounding them
    late          gradients come back one step late at every border: F of one micro-batch and B of an earlier
                  step's in turns, nobody waits for a gradient but at the end of a step; thin-late: both
    staged        F, h, B of one micro-batch at a time; activations travel; gradients of the embedding and of
                  the head, which every stage has, are added up at the end
    free          the same with nothing shared: steps follow without a flush, so a step takes as long as the
                  slowest of a rank's work and a link's traffic
    scan          bounded interfaces: forwards as in 1f1b, Jacobians of r forwards, recursive doubling, local
                  backwards (event by event, `region_events.py`), and the sum of the canvas' gradient
    hybrid        the same, where the last ranks hand the adjoint on: as many as take a Jacobian's time
    handed        the same, where all do
    data          the whole model on every rank, max(1, M/P) micro-batches each, all gradients added up

At the end of a step, gpipe, 1f1b and data add up n bytes by a ring, where each hop asks before it sends:
2 (P - 1)/P n/bandwidth + 4 (P - 1) latency, or nothing where they share nothing. All others meet as
`parallel/ranks.Meeting` does, also where losses and norms are all: (P - 1) n/bandwidth + 1 latency of two
ranks and of few bytes, else 2 (P - 1)/P n/bandwidth + 2 latency.

Fewer `cores` than ranks: pipelines of up to 16 ranks a core are run event by event with shares of the cores
(`shared_cores.py`); else a step takes as long as it would on cores of their own, or as all the work shared
out over the cores, whichever is more.

Failures: each rank fails once in `mtbf` seconds, and is back after `restart` and half a checkpoint interval
τ. A job that must be whole stands still for that long when any rank fails. Of stages that live alone, those
behind the dead one stand still (`wait`, (P + 1)/2 of P on average), or the dead one alone (`replay`). With a
the share of the job that a failure stops, τ = √(2 save mtbf/(P a)) (Young). Goodput is the share of the time
that is left, to first order.

Cost: O(P M) for each method. Source: "Product of Experts" §§4.2, 4.4, 4.5, 8.5; LBI §6 and appendix C.
Limits: equal stages, links between neighbours, no contention but for cores; rings do not overlap compute; a
processor sends for nothing. GPipe holds M graphs: give it times that were taken so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from shared_cores import pipeline_order, shared_span
from topograd.errors import ConfigError
from topograd.interfaces.region_events import RegionTimes, region_span
from topograd.limits import check_numbers
from topograd.parallel.settings import FEW_NUMBERS

METHODS = (
    *("gpipe", "1f1b", "whole", "thin", "late", "thin-late", "staged", "free"),
    *("scan", "hybrid", "handed", "data"),
)
_SECONDS = (0.0, 1e9)
_NUMBER = (0.0, 1e18)
_MAX_TASKS = 2**23
"""Forwards of one step that are simulated."""
_RANKS_A_CORE = 16
"""Beyond this the fill of a pipeline is little beside all the work on its cores."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one stage on one micro-batch; the defaults are those of `bench pipeline` on one core."""

    forward: float = 0.020
    """f: the layers of a stage."""
    backward: float = 0.042
    """b: their backward."""
    head: float = 0.010
    """h: the loss of a stage and its backward."""
    embed: float = 0.002
    """e: the embedding and its backward."""
    optimizer: float = 0.012
    """o: the optimizer's step of a stage, once a step."""
    rounding: float = 0.004
    """Of a gradient at a boundary: to few bits, and back."""
    copies: float = 0.003
    """Of a late stage's weights, once a step."""

    def __post_init__(self) -> None:
        check_numbers(self, forward=(1e-9, _SECONDS[1]), backward=_SECONDS, head=_SECONDS, embed=_SECONDS)
        check_numbers(self, optimizer=_SECONDS, rounding=_SECONDS, copies=_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Links, memory and failures."""

    mbit: float = 10_000.0
    """Bandwidth of a link in Mbit/s, each way."""
    latency: float = 0.0001
    """Seconds until a message has arrived, beside its bytes."""
    mtbf: float = 1e6
    """Seconds after which a rank fails, on average."""
    restart: float = 120.0
    """Seconds until a failed rank is back."""
    save: float = 10.0
    """Seconds that a checkpoint takes."""
    cores: int = 2**20
    """Cores for all ranks; fewer than ranks slow them down."""

    def __post_init__(self) -> None:
        check_numbers(self, mbit=(1e-6, 1e12), latency=_SECONDS, mtbf=(1e-3, 1e12), restart=_SECONDS)
        check_numbers(self, save=_SECONDS, cores=(1, 2**30))

    def on_wire(self, size: float) -> float:
        """Seconds of `size` bytes on a link."""
        return size * 8 / (self.mbit * 1e6)

    def ring(self, size: float, ranks: int) -> float:
        """Seconds until `all_reduce` has added up `size` bytes on all ranks."""
        if ranks < 2 or size <= 0:
            return 0.0
        return 2 * (ranks - 1) / ranks * self.on_wire(size) + 4 * (ranks - 1) * self.latency

    def meeting(self, size: float, ranks: int) -> float:
        """Seconds until ranks have met and added up `size` bytes of float32."""
        if ranks < 2:
            return 0.0
        if ranks == 2 or size <= 4 * FEW_NUMBERS:
            return (ranks - 1) * self.on_wire(size) + self.latency
        return 2 * (ranks - 1) / ranks * self.on_wire(size) + 2 * self.latency


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained: sizes in bytes."""

    microbatches: int = 64
    """M."""
    message: float = 524_288.0
    """a: activations of one micro-batch at a boundary."""
    thin: float = 67_584.0
    """Their gradient in few bits."""
    shared: float = 1_048_576.0
    """Parameters that all stages read: the embeddings; 0 where only the first stage reads x0."""
    head: float = 524_288.0
    """Parameters of the head, which stages share where each has a loss."""
    stage: float = 6_300_000.0
    """Parameters of a stage."""
    interface_rank: int = 16
    """r, of bounded interfaces."""
    interface_bytes: float = 4096.0
    """A message of a bounded interface, of one micro-batch."""
    interface_samples: int = 64
    """Sequences of a micro-batch, each of which has Jacobians of its own."""
    times: Times = field(default_factory=Times)
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        check_numbers(self, microbatches=(1, 10**6), message=_NUMBER, shared=_NUMBER, stage=_NUMBER)
        check_numbers(self, head=_NUMBER)
        check_numbers(self, interface_rank=(1, 10**6), interface_bytes=_NUMBER, thin=_NUMBER)
        check_numbers(self, interface_samples=(1, 10**9))


@dataclass(frozen=True)
class Step:
    """One step of one method on P ranks."""

    seconds: float
    bubble: float
    """Share of the ranks' time in which they do not compute."""
    bytes: float
    """Sent by all ranks."""
    memory: float
    """Activations that the fullest rank holds, in those of one stage on one micro-batch."""
    throughput: float
    """Micro-batches of the whole model in a second."""
    speedup: float
    """Of the throughput, over one rank with all stages."""
    goodput: dict[str, float]
    """Share of the time that failures leave."""


def simulate_step(method: str, ranks: int, work: Work) -> Step:
    """One step of `method` on `ranks` ranks."""
    if method not in METHODS:
        raise ConfigError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    t = work.times
    seconds, busy, sent, memory = _METHODS[method](ranks, work)
    seconds = max(seconds, busy / work.machine.cores)
    batches = max(work.microbatches, ranks) if method == "data" else work.microbatches
    alone = work.microbatches * (ranks * (t.forward + t.backward + t.head) + t.embed) + ranks * t.optimizer
    throughput = batches / seconds
    return Step(
        seconds=seconds,
        bubble=1 - busy / (ranks * seconds),
        bytes=sent,
        memory=memory,
        throughput=throughput,
        speedup=throughput * alone / work.microbatches,
        goodput=goodput(method, ranks, work.machine),
    )


Found = tuple[float, float, float, float]
"""Seconds, busy seconds of all ranks, bytes, memory."""


def _shared(P: int, work: Work) -> bool:
    """Whether a pipeline is run event by event, because ranks share cores."""
    return work.machine.cores < P <= _RANKS_A_CORE * work.machine.cores


def _optimizers(P: int, work: Work) -> float:
    """Seconds of all ranks' optimizers at once."""
    return max(1.0, P / work.machine.cores) * work.times.optimizer


def _staged(P: int, work: Work) -> Found:
    t, M, wire = work.times, work.microbatches, work.machine.on_wire(work.message)
    first, local = t.embed + t.forward, t.head + t.backward
    if _shared(P, work):
        order = [(kind, i) for i in range(M) for kind in "FL"]
        costs = {"F": first, "L": local}
        end = shared_span([order] * P, lambda _, kind: costs[kind], *_links(work))
    else:
        end = _streamed(P, M, first, local, wire, work.machine.latency)
    added = work.shared + work.head
    seconds = end + work.machine.meeting(added, P) + _optimizers(P, work)
    busy = P * (M * (first + local) + t.optimizer)
    return seconds, busy, (P - 1) * M * work.message + _ring_bytes(added, P), 1.0


def _links(work: Work, back: float | None = None) -> tuple[int, tuple[float, float], float]:
    """Cores, seconds of a message forward and of one back, and its latency."""
    wires = (work.machine.on_wire(size) for size in (work.message, work.message if back is None else back))
    return work.machine.cores, (next(wires), next(wires)), work.machine.latency


def _streamed(P: int, M: int, first: float, local: float, wire: float, latency: float) -> float:
    """The end of the last rank, where each has a core: `first` is what comes before a message is sent."""
    arrived, end = [0.0] * M, 0.0
    for _ in range(P):
        free = link = 0.0
        departed = []
        for i in range(M):
            spoke = max(free, arrived[i]) + first
            link = max(link, spoke) + wire
            departed.append(link + latency)
            free = spoke + local
        arrived, end = departed, max(end, free)
    return end


def _free(P: int, work: Work) -> Found:
    t, M = work.times, work.microbatches
    own = M * (t.embed + t.forward + t.head + t.backward) + t.optimizer
    seconds = max(own, M * work.machine.on_wire(work.message) if P > 1 else 0.0)
    return seconds, P * own, (P - 1) * M * work.message, 1.0


def _backprop(name: str, P: int, work: Work, thin: bool = False) -> Found:
    t, M = work.times, work.microbatches
    orders = [pipeline_order("gpipe" if name == "gpipe" else "1f1b", p, P, M) for p in range(P)]
    rounding = _rounding(P, work) if thin else 0.0
    back = work.thin if thin else work.message

    def cost(p: int, kind: str) -> float:
        if kind == "B":
            return t.backward + rounding
        return t.embed + t.forward + (t.head if p == P - 1 else 0.0)

    links = _links(work, back)
    end = shared_span(orders, cost, *links) if _shared(P, work) else _both_ways(orders, cost, *links[1:])
    add_up = work.machine.meeting if name == "whole" else work.machine.ring
    seconds = end + add_up(work.shared, P) + _optimizers(P, work)
    busy = P * (M * (t.embed + t.forward + t.backward + rounding) + t.optimizer) + M * t.head
    memory = M if name == "gpipe" else min(P, M)
    return seconds, busy, (P - 1) * M * (work.message + back) + _ring_bytes(work.shared, P), float(memory)


def _rounding(P: int, work: Work) -> float:
    """Seconds of a rank for each micro-batch, the mean over ranks: each boundary has a gradient to round."""
    return work.times.rounding * (P - 1) / P


def _late(P: int, work: Work, thin: bool = False) -> Found:
    t, M = work.times, work.microbatches
    rounding = _rounding(P, work) if thin else 0.0
    back = work.thin if thin else work.message
    _, (down, up), latency = _links(work, back)
    first, local = t.embed + t.forward, t.backward + rounding

    def cost(p: int, kind: str) -> float:
        return first if kind == "F" else local + (t.head if p == P - 1 else 0.0)

    if _shared(P, work):
        order = [(kind, i) for i in range(M) for kind in "FL"]
        end = shared_span([order] * P, cost, work.machine.cores, (down, up), latency) + up + latency
    else:
        end, arrived = 0.0, [0.0] * M
        for p in range(P):
            free, link, returned, arrived_next = 0.0, 0.0, 0.0, []
            for i in range(M):
                spoke = max(free, arrived[i]) + first
                link = max(link, spoke) + down
                arrived_next.append(link + latency)
                free = spoke + cost(p, "L")
                returned = max(returned, free) + up
            arrived, end = arrived_next, max(end, free if p == 0 else returned + latency)
    copies = t.copies if P > 1 else 0.0
    seconds = copies + end + work.machine.meeting(work.shared, P) + _optimizers(P, work)
    busy = P * (M * (first + local) + t.optimizer) + (P - 1) * copies + M * t.head
    sent = (P - 1) * M * (work.message + back) + _ring_bytes(work.shared, P)
    return seconds, busy, sent, float((P - 1) * M + 1)


def _both_ways(
    orders: Sequence[Sequence[tuple[str, int]]],
    cost: Callable[[int, str], float],
    wires: tuple[float, float],
    latency: float,
) -> float:
    """Every rank goes through its order on its own core; what it needs comes over links both ways."""
    P, M = len(orders), 1 + max(i for _, i in orders[0])
    forward: list[list[float]] = [[0.0] * M if p == 0 else [math.inf] * M for p in range(P)]
    back: list[list[float]] = [[0.0] * M if p == P - 1 else [math.inf] * M for p in range(P)]
    free, at = [0.0] * P, [0] * P
    down, up = [0.0] * P, [0.0] * P
    waiting = list(range(P))
    while waiting:
        again = set()
        for p in waiting:
            while at[p] < len(orders[p]):
                kind, i = orders[p][at[p]]
                ready = forward[p][i] if kind == "F" else back[p][i]
                if ready == math.inf:
                    break
                free[p] = max(free[p], ready) + cost(p, kind)
                at[p] += 1
                if kind == "F" and p < P - 1:
                    down[p] = max(down[p], free[p]) + wires[0]
                    forward[p + 1][i] = down[p] + latency
                    again.add(p + 1)
                if kind == "B" and p > 0:
                    up[p] = max(up[p], free[p]) + wires[1]
                    back[p - 1][i] = up[p] + latency
                    again.add(p - 1)
        waiting = sorted(again)
    return max(free)


def _regions(name: str, P: int, work: Work) -> Found:
    """Bounded interfaces: B samples have n numbers each in a message, and n² in a product."""
    t, M, machine = work.times, work.microbatches, work.machine
    product = work.interface_bytes**2 / (4 * work.interface_samples)  # 4 B n² for 4 B n bytes
    jacobian = work.interface_rank * t.forward
    inner = max(P - 2, 0)
    half = min(inner, round(jacobian / max(t.backward, 1e-12)))
    carried = {"scan": 0, "hybrid": half, "handed": None}[name]
    times = RegionTimes(
        forward=t.forward,
        backward=t.backward,
        jacobian=jacobian,
        head=t.head,
        extra=t.embed,
        wire=machine.on_wire(work.interface_bytes),
        product=machine.on_wire(product),
        latency=machine.latency,
    )
    canvas = machine.meeting(work.shared, P)
    seconds = region_span(P, M, times, carried) + canvas + _optimizers(P, work)
    built = 0 if carried is None else inner - carried
    busy = P * (M * (t.embed + t.forward + t.backward) + t.optimizer) + M * (t.head + built * jacobian)
    hops = 0 if carried is None else built * max(1, math.ceil(math.log2(max(built, 1))))
    sent = (P - 1) * M * 2 * work.interface_bytes + hops * M * product + _ring_bytes(work.shared, P)
    return seconds, busy, sent, float(min(P, M))


def _data(P: int, work: Work) -> Found:
    t, each = work.times, math.ceil(work.microbatches / P)
    own = each * (P * (t.forward + t.backward) + t.head + t.embed) + P * t.optimizer
    size = P * work.stage + work.shared + work.head
    return (
        own * max(1.0, P / work.machine.cores) + work.machine.ring(size, P),
        P * own,
        _ring_bytes(size, P),
        float(P),
    )


def _ring_bytes(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) * size


_METHODS: dict[str, Any] = {
    "gpipe": lambda P, work: _backprop("gpipe", P, work),
    "1f1b": lambda P, work: _backprop("1f1b", P, work),
    "whole": lambda P, work: _backprop("whole", P, work),
    "thin": lambda P, work: _backprop("whole", P, work, thin=True),
    "late": _late,
    "thin-late": lambda P, work: _late(P, work, thin=True),
    "staged": _staged,
    "free": _free,
    **{name: partial(_regions, name) for name in ("scan", "hybrid", "handed")},
    "data": _data,
}


def goodput(method: str, ranks: int, machine: Machine) -> dict[str, float]:
    """The share of the time that is left; a job that must be whole is as likely to fail as all its ranks."""

    def left(rate: float, affected: float) -> float:
        interval = math.sqrt(2 * machine.save / (rate * affected))
        waste = machine.save / interval if machine.save else 0.0
        return max(0.0, 1 - waste - rate * affected * (machine.restart + interval / 2))

    if method != "free":
        return {"whole": left(ranks / machine.mtbf, 1.0)}
    return {
        "wait": left(1 / machine.mtbf, (ranks + 1) / 2),
        "replay": left(1 / machine.mtbf, 1.0),
    }


def simulate(ranks: int, work: Work) -> dict[str, Any]:
    """Every method on 1, 2, 4, ... up to `ranks` ranks."""
    check = range(1, 2**16 + 1)
    if ranks not in check:
        raise ConfigError(f"ranks is {ranks}; it must lie in 1..{2**16}")
    if ranks * work.microbatches > _MAX_TASKS:
        raise ConfigError(
            f"{ranks} ranks of {work.microbatches} micro-batches are more than {_MAX_TASKS} forwards; "
            "ask for fewer --ranks or --microbatches"
        )
    counts = [2**k for k in range(ranks.bit_length()) if 2**k <= ranks]
    counts = counts if counts[-1] == ranks else [*counts, ranks]
    table = {
        method: [{"ranks": P, **asdict(simulate_step(method, P, work))} for P in counts] for method in METHODS
    }
    return {"ranks": ranks, "work": asdict(work), "methods": table}
