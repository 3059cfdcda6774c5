"""Where a scan over ranks pays: dense 1F1B, handing the adjoint on, scan and hybrid over links with a delay.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 8 benchmarks/region_latency.py [--rounds 3]

One region of one layer a rank. The links are those of one machine with a delay in user space: a sender writes
when a message left into a file that all ranks map, and the receiver sleeps until that time and the latency
have passed. Ranks that sleep or wait need no core, so many ranks on few cores show what latency does; what
computing at once on few cores does is predicted by cores that are given first come first served.

For each latency and number of micro-batches all ways take turns; printed are the median seconds until the
slowest rank is done, the prediction of `region_events.py` from the times of one region alone (for dense, of
one without interfaces), and their ratio. The sum of shared gradients, which all ways have, is left out on
both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import deque
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import clone  # noqa: F401  (for what is not installed)
from papers.latent_bounded_interfaces.measure import build_model, random_tokens
from papers.latent_bounded_interfaces.shape import Shape
from topograd.exec.gradient import Autograd, GradientEngine
from topograd.exec.train_step import OpenStep, start_step, train_step
from topograd.interfaces.region_events import RegionTimes, region_span
from topograd.interfaces.region_times import region_times, timed
from topograd.interfaces.regions import Regions
from topograd.nn.config import SegmentInterface
from topograd.parallel.layout import Layout
from topograd.parallel.ranks import Ranks, join, leave
from topograd.parallel.region_scan import RegionScan
from topograd.parallel.settings import ParallelConfig
from topograd.parallel.transport import MeshTransport
from topograd.runs.topology_config import TopologyConfig
from topograd.timing import Spread
from topograd.topology.plan import Plan

RING = 4096
WAYS = ("dense", "handed", "scan", "hybrid")


class Links:
    """Delays of messages between the ranks of one machine."""

    def __init__(self, ranks: Ranks, file: Path) -> None:
        world = ranks.config.world
        if ranks.first:
            np.memmap(file, np.float64, "w+", shape=(world, world, 3, RING)).flush()
        ranks.reduce(torch.zeros(1), "making the links")
        self.left = np.memmap(file, np.float64, "r+", shape=(world, world, 3, RING))
        self.rank, self.latency = ranks.rank, 0.0
        self.counts: dict[tuple[int, int, int], int] = {}
        self.isend, self.irecv = dist.isend, dist.irecv
        dist.isend, dist.irecv = self.send, self.receive  # type: ignore[assignment]

    def _next(self, source: int, to: int, tag: int) -> tuple[int, int, int, int]:
        kind = {0: 0, 40: 1}.get(tag, 2)  # forward, scan, gradients that are handed on
        count = self.counts.get((source, to, kind), 0)
        self.counts[source, to, kind] = count + 1
        return source, to, kind, count % RING

    def send(self, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
        self.left[self._next(self.rank, peer, tag)] = time.monotonic()
        return self.isend(tensor, peer, group, tag)

    def receive(self, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Arriving:
        return Arriving(self, self._next(peer, self.rank, tag), self.irecv(tensor, peer, group, tag))


class Arriving:
    """A message that is there when its latency has passed."""

    def __init__(self, links: Links, place: tuple[int, int, int, int], work: Any) -> None:
        self.links, self.place, self.work = links, place, work

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)
        left = float(self.links.left[self.place]) + self.links.latency - time.monotonic()
        if left > 0:
            time.sleep(left)


class Way:
    """A step of one way on this rank."""

    def __init__(self, name: str, ranks: Ranks, shape: Shape, interface: SegmentInterface) -> None:
        self.ranks = ranks
        self.stack = build_model(shape, None if name == "dense" else interface)
        self.batch = random_tokens(shape)
        count = shape.regions
        weights = (*(0.0 for _ in range(count - 1)), 1.0)
        dense = TopologyConfig(partition=",".join("1" * count), grad_scale=1.0, weights=weights)
        topology = dense.build(count) if name == "dense" else shape.topology
        self.plan = Plan.of(topology, count)
        scans = name in ("scan", "hybrid")
        layout = Layout.of(self.plan, count, stack=self.stack, crossing=scans)
        self.transport = MeshTransport(ranks, layout)
        self.ahead = layout.ahead(ranks.place)
        self.coming = [
            edge
            for edge in layout.back_edges
            if self.plan.stages[edge[0]].inputs[edge[1]][0].source in self.transport.stages
        ]
        self.engine: GradientEngine = Autograd()
        if scans:
            carried = 0 if name == "scan" else None
            self.engine = RegionScan(ranks=ranks, owners=layout.owners, carried=carried)

    def step(self, microbatches: int) -> None:
        sequences = [len(self.batch[0])] * microbatches
        self.transport.begin(microbatches, dict.fromkeys(self.coming, sequences))
        opened: deque[OpenStep] = deque()
        for _ in range(microbatches):
            given = (self.stack, self.plan, *self.batch)
            opened.append(start_step(*given, transport=self.transport, gradient=self.engine))
            if len(opened) > self.ahead:
                opened.popleft().finish()
        while opened:
            opened.popleft().finish()
        self.transport.finish()


def slowest(ranks: Ranks, way: Way, microbatches: int) -> float:
    """Seconds until the slowest rank is done."""
    way.stack.zero_grad(set_to_none=True)
    ranks.reduce(torch.zeros(1), "beginning")
    began = time.perf_counter()
    way.step(microbatches)
    seconds = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def predicted(
    name: str, ranks: int, microbatches: int, times: RegionTimes, latency: float, cores: int
) -> float:
    """The span of the event model, with the cores of this machine shared by all ranks."""
    inner = ranks - 2
    carried = {"dense": None, "handed": None, "scan": 0, "hybrid": -(-inner // 2)}[name]
    return region_span(ranks, microbatches, replace(times, latency=latency), carried, cores)


def without_interfaces(times: RegionTimes, bounded: Way, dense: Way, repeats: int = 21) -> RegionTimes:
    """The times of a region of the dense model: less by its part of what a whole step here saves."""
    saved = []
    for _ in range(repeats + 1):
        steps = (partial(train_step, way.stack, way.plan, *way.batch) for way in (bounded, dense))
        more, less = (timed(step, torch.device("cpu"))[0] for step in steps)
        saved.append((more - less) / len(bounded.plan.stages))
    share = 1 - statistics.median(saved[1:]) / (times.forward + times.backward)
    return replace(times, forward=share * times.forward, backward=share * times.backward)


def message_seconds(ranks: Ranks, numbers: int, rounds: int = 50) -> float:
    """Half of the time that a message takes to the next rank and back, without a delay."""
    room, began = torch.zeros(numbers), time.perf_counter()
    for _ in range(rounds):
        if ranks.rank == 0:
            dist.send(room, 1)
            dist.recv(room, 1)
        elif ranks.rank == 1:
            dist.recv(room, 0)
            dist.send(room, 0)
    return (time.perf_counter() - began) / (2 * rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8, help="r of the interface")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--latencies", type=float, nargs="+", default=[5, 20, 50], help="in milliseconds")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    world, port = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"]
    shape = Shape(regions=world, region_layers=1, width=asked.width, heads=2, vocab=64, context=32, batch=2)
    interface = SegmentInterface(segments=1, rank=asked.rank, pool="mean", causal=False)
    ranks = join(ParallelConfig(stages=world, timeout=120), {})
    file = Path(tempfile.gettempdir()) / f"topograd-links-{port}"
    rows = []
    try:
        links = Links(ranks, file)
        ways = {name: Way(name, ranks, shape, interface) for name in WAYS}
        for way in ways.values():
            slowest(ranks, way, 2)  # not counted
        regions = Regions.of(ways["scan"].stack, ways["scan"].plan)
        units: dict[str, RegionTimes] = {}
        if ranks.first:
            units = dict.fromkeys(WAYS, region_times(regions, *ways["scan"].batch, repeats=21))
            units["dense"] = without_interfaces(units["handed"], ways["handed"], ways["dense"])
        ranks.reduce(torch.zeros(1), "waiting for the units")
        wire = message_seconds(ranks, shape.batch * asked.rank)
        units = {name: replace(times, wire=wire, product=wire) for name, times in units.items()}
        for latency in asked.latencies:
            for count in asked.microbatches:
                links.latency = latency / 1000
                seconds: dict[str, list[float]] = {name: [] for name in WAYS}
                for _ in range(asked.rounds):
                    for name, way in ways.items():
                        seconds[name].append(slowest(ranks, way, count))
                if units:
                    rows += _rows(seconds, world, count, units, latency)
    finally:
        leave()
        if ranks.first:
            file.unlink(missing_ok=True)
    if units:
        shown = {name: vars(units[name]) for name in ("dense", "scan")}
        print(json.dumps({"ranks": world, "rank": asked.rank, "times": shown, "rows": rows}))


def _rows(
    seconds: dict[str, list[float]], ranks: int, count: int, units: dict[str, RegionTimes], latency: float
) -> list[dict[str, Any]]:
    cores = os.cpu_count() or 1
    rows = []
    for name, values in seconds.items():
        said = predicted(name, ranks, count, units[name], latency / 1000, cores)
        spread = Spread.of(values)
        rows.append(
            {
                "latency_ms": latency,
                "microbatches": count,
                "way": name,
                "seconds": spread.as_dict(),
                "predicted": said,
                "predicted over measured": said / spread.median,
                "over dense": spread.median / Spread.of(seconds["dense"]).median,
            }
        )
    return rows


if __name__ == "__main__":
    main()
