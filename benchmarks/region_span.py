"""The planner's span of a step over bounded interfaces beside the span that three ranks take.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 benchmarks/region_span.py [--rounds 9]

Three regions, one a rank: at no moment do more than two of them compute (forwards follow one another; region
1's Jacobian beside region 2; two local backwards), so two cores are enough. The planner's times of a region
(`papers/latent_bounded_interfaces/measure.py`) are taken on two ranks at once, in turns with the steps:
`parallel/region_scan.py` on three ranks, and autograd in one process, whose span the planner calls "plain".
Printed: predicted seconds, measured seconds and their ratio, round by round, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import clone  # noqa: F401  (for what is not installed)
from papers.latent_bounded_interfaces.measure import build_model, measure_units, random_tokens
from papers.latent_bounded_interfaces.shape import Shape
from papers.latent_bounded_interfaces.timeline import Units, timeline
from topograd.exec.train_step import train_step
from topograd.nn.config import SegmentInterface
from topograd.parallel.layout import Layout
from topograd.parallel.ranks import Ranks, join, leave
from topograd.parallel.region_scan import RegionScan
from topograd.parallel.settings import ParallelConfig
from topograd.parallel.transport import MeshTransport
from topograd.timing import Spread, ratio
from topograd.topology.plan import Plan

REGIONS = 3
SCHEDULES = {"overlapped": "ranks", "three_phase": "ranks", "plain": "one process"}
"""Schedules of the planner, and what is measured beside each."""


class Steps:
    """A step of each kind on this rank."""

    def __init__(self, ranks: Ranks, shape: Shape, interface: SegmentInterface) -> None:
        self.ranks, self.shape = ranks, shape
        self.stack = build_model(shape, interface)
        self.inputs, self.targets = random_tokens(shape)
        self.plan = Plan.of(shape.topology, len(self.stack.layers))
        layout = Layout.of(self.plan, REGIONS, stack=self.stack, crossing=True)
        self.transport = MeshTransport(ranks, layout)
        self.scan = RegionScan(ranks=ranks)

    def on_ranks(self) -> None:
        self.transport.begin(1, {})  # a scan sends its own messages back
        given = (self.stack, self.plan, self.inputs, self.targets)
        train_step(*given, transport=self.transport, gradient=self.scan)
        self.transport.finish()

    def in_one_process(self) -> None:
        if self.ranks.first:
            train_step(self.stack, self.plan, self.inputs, self.targets)

    def units(self) -> Units | None:
        if self.ranks.rank == 0:
            return None
        return measure_units(self.stack, self.shape.topology, self.inputs, repeats=1)

    def timed(self, run: Callable[[], object]) -> float:
        """Seconds until the slowest rank is done."""
        self.stack.zero_grad(set_to_none=True)
        self.ranks.reduce(torch.zeros(1), "beginning")
        began = time.perf_counter()
        run()
        seconds = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()


def measure(steps: Steps, rounds: int) -> tuple[dict[str, list[float]], list[Units]]:
    """Seconds of both steps and the planner's times, round by round."""
    seconds: dict[str, list[float]] = {"ranks": [], "one process": []}
    units = []
    for turn in range(rounds + 1):  # the first is not counted
        found = {"ranks": steps.timed(steps.on_ranks), "one process": steps.timed(steps.in_one_process)}
        steps.ranks.reduce(torch.zeros(1), "beginning the units")
        mine = steps.units()
        names = ("forward", "local", "vjp", "jacobian")
        times = torch.tensor([0.0 if mine is None else getattr(mine, name) for name in names])
        steps.ranks.reduce(times, "adding up the units")
        if turn:
            units.append(Units(**dict(zip(names, (times / 2).tolist(), strict=True))))
            for name, value in found.items():
                seconds[name].append(value)
    return seconds, units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=2, help="of a region")
    parser.add_argument("--rank", type=int, default=8, help="r of the interface")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(regions=REGIONS, region_layers=asked.layers, vocab=64)
    interface = SegmentInterface(segments=1, rank=asked.rank, pool="mean", causal=False)
    ranks = join(ParallelConfig(stages=REGIONS, timeout=120), {})
    try:
        seconds, units = measure(Steps(ranks, shape, interface), asked.rounds)
    finally:
        leave()
    if not ranks.first:
        return
    rows: dict[str, Any] = {}
    for schedule, beside in SCHEDULES.items():
        workers = REGIONS if beside == "ranks" else 1
        said = [timeline(schedule, one, REGIONS, workers).span for one in units]  # type: ignore[arg-type]
        rows[schedule] = {
            "predicted": Spread.of(said).as_dict(),
            "measured": Spread.of(seconds[beside]).as_dict(),
            "predicted over measured": ratio({"said": said, "is": seconds[beside]}, "said", "is").as_dict(),
        }
    middle = {name: Spread.of([getattr(one, name) for one in units]).median for name in asdict(units[0])}
    print(json.dumps({"units": middle, "spans": rows, "shape": asdict(shape), "rank": asked.rank}))


if __name__ == "__main__":
    main()
