"""One rank of `bench pipeline`: every way of training in turns, on the same ranks and the same model.

    single     all stages in rank 0, while the others sleep: the unit of throughput
    staged     a stage a rank, no gradient between them (`parallel/stage_loop.py`), the wire exact, bf16, int8
    free       the same with nothing shared (own heads, no x0): activations alone are on the wire
    whole      one loss at the end and all gradient between ranks, by the same executor: 1F1B's waiting
    thin       the same in four bits; late: one step late at every border, so that no rank waits for a
               gradient; thin-late: both; with int8, activations are rounded too
    gpipe, 1f1b   backprop through the same layers over the same ranks (`plain_schedules.py`)
    torch-gpipe, torch-1f1b   the same by `torch.distributed.pipelining` (`torch_schedules.py`)
    data       data parallel: the whole model by backprop on every rank, gradients added up once a step

A step is the gradients of M micro-batches and one step of AdamW. Bubble: the share of a step in which a rank
waits for others, the mean over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline_settings import BITS, PipelineSettings
from plain_schedules import BackpropPipeline
from topograd.exec.objectives import CrossEntropy, stage_loss
from topograd.exec.thin import packed, unpacked
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.parallel.layout import Layout, keep_own, shed
from topograd.parallel.ranks import Ranks, join, leave
from topograd.parallel.settings import ParallelConfig, WireKind
from topograd.parallel.stage_loop import StageLoop
from topograd.parallel.transport import MeshTransport
from topograd.runs.config import OptimizerConfig
from topograd.timing import Spread
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner
from torch_schedules import TorchPipeline

Batches = Sequence[tuple[Tensor, Tensor]]
READING = ("seconds", "waited", "bytes")
Reading = dict[str, float]
"""Of one step on one rank: seconds, of which waited, and bytes sent; of `StageParts`, its parts."""
CORES = os.cpu_count() or 1


def _stack(settings: PipelineSettings, free: bool = False) -> GPT:
    torch.manual_seed(0)
    heads = max(1, settings.width // 64)
    return GPT(
        layers=settings.layers,
        width=settings.width,
        heads=heads,
        vocab=settings.vocab,
        context=settings.context,
        x0_blend=settings.x0_blend and not free,
    )


def _batches(settings: PipelineSettings) -> Batches:
    generator = torch.Generator().manual_seed(1)
    size = (settings.microbatches, settings.batch, settings.context + 1)
    rows = torch.randint(0, settings.vocab, size, generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def _partition(settings: PipelineSettings) -> str:
    return ",".join([str(settings.layers // settings.ranks)] * settings.ranks)


def _topology(settings: PipelineSettings, free: bool) -> Topology:
    chain = Topology.chain(_partition(settings), bus="detached" if free else "live")
    return replace(chain, heads="per-stage", own_heads=True) if free else chain


@dataclass(frozen=True)
class Gradient:
    """What goes back between stages that have one loss, the last one's."""

    delay: int = 0
    bits: int = 32

    def topology(self, settings: PipelineSettings) -> Topology:
        """Backprop through stages, with these edges."""
        chain = Topology.chain(_partition(settings), grad_scale=1.0)
        *before, last = chain.with_gradient(delay=self.delay, bits=self.bits).stages
        return replace(chain, stages=(*(replace(stage, weight=0.0) for stage in before), last))


class Staged:
    """A step of stages on ranks."""

    def __init__(
        self,
        settings: PipelineSettings,
        ranks: Ranks,
        wire: WireKind = "exact",
        free: bool = False,
        gradient: Gradient | None = None,
    ) -> None:
        ranks = replace(ranks, config=replace(ranks.config, wire=wire))
        stack = _stack(settings, free)
        topology = _topology(settings, free) if gradient is None else gradient.topology(settings)
        self.plan: Plan = prepare(stack, topology)
        self.steps = 0
        layout = Layout.of(self.plan, settings.ranks, stack=stack)
        keep_own(stack, layout, ranks.place)
        made = make_optimizers(stack, OptimizerConfig(name="adamw"), self.plan)
        self.ranks, self.batches = ranks, _batches(settings)
        self.loop = StageLoop(stack, made, transport=MeshTransport(ranks, layout), ranks=ranks, layout=layout)

    def __call__(self) -> Reading:
        before = (self.ranks.waited, self.loop.transport.sent_bytes + self.loop.exchanged_bytes)
        began = time.perf_counter()
        self.steps += 1
        self.loop.step(self.plan, self.batches, self.steps)
        seconds = time.perf_counter() - began
        sent = self.loop.transport.sent_bytes + self.loop.exchanged_bytes - before[1]
        waited = self.ranks.waited - before[0]
        return {"seconds": seconds, "waited": waited, "bytes": float(sent)}


class Single:
    """The same step in one process, on rank 0; the others sleep until it is done."""

    def __init__(self, settings: PipelineSettings, ranks: Ranks) -> None:
        stack = _stack(settings)
        self.plan = prepare(stack, _topology(settings, False))
        made = make_optimizers(stack, OptimizerConfig(name="adamw"), self.plan)
        self.ranks, self.batches = ranks, _batches(settings)
        self.loop = StepRunner(stack, made)

    def __call__(self) -> Reading:
        began = time.perf_counter()
        if self.ranks.first:
            self.loop.step(self.plan, self.batches)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "waited": 0.0, "bytes": 0.0}


class Backprop:
    """A step of backprop over the pipeline."""

    def __init__(
        self,
        settings: PipelineSettings,
        ranks: Ranks,
        schedule: str,
        kind: type[BackpropPipeline] = BackpropPipeline,
    ) -> None:
        stack, self.schedule = _stack(settings), schedule
        each = settings.layers // settings.ranks
        layers = range(ranks.place * each, (ranks.place + 1) * each)
        last = ranks.place == settings.ranks - 1
        kept = [*stack.embedding.parameters(), *(p for i in layers for p in stack.layers[i].parameters())]
        kept += list(stack.previous.parameters()) if stack.previous is not None else []
        shed(stack, [*kept, *(stack.head.parameters() if last else ())])
        objective = CrossEntropy()
        loss: Callable[[Tensor, Tensor], Tensor] = lambda h, y: stage_loss(stack, h, 0, objective, y)  # noqa: E731
        self.pipeline = kind(stack, layers, ranks.place, settings.ranks, loss)
        self.pipeline.adds_up = settings.x0_blend
        self.optimizers = make_optimizers(stack, OptimizerConfig(name="adamw"))
        self.batches = _batches(settings)

    def __call__(self) -> Reading:
        before = (self.pipeline.waited, self.pipeline.sent_bytes)
        began = time.perf_counter()
        self.pipeline.step(self.batches, self.schedule)
        self.optimizers.step()
        self.optimizers.zero_grad()
        seconds = time.perf_counter() - began
        sent = float(self.pipeline.sent_bytes - before[1])
        return {"seconds": seconds, "waited": self.pipeline.waited - before[0], "bytes": sent}


class DataParallel:
    """A step of backprop on a share of the micro-batches, and the sum of all gradients."""

    def __init__(self, settings: PipelineSettings, ranks: Ranks) -> None:
        self.stack, self.ranks = _stack(settings), ranks
        self.plan = prepare(self.stack, Topology.chain(str(settings.layers)))
        self.optimizers = make_optimizers(self.stack, OptimizerConfig(name="adamw"))
        self.batches = _batches(settings)[ranks.rank :: settings.ranks]
        self.scale = 1 / settings.microbatches

    def __call__(self) -> Reading:
        began = time.perf_counter()
        for inputs, targets in self.batches:
            train_step(self.stack, self.plan, inputs, targets, scale=self.scale)
        parameters = [p for p in self.stack.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        before = self.ranks.waited
        self.ranks.reduce(flat, "adding up gradients")
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        self.optimizers.step()
        self.optimizers.zero_grad()
        seconds = time.perf_counter() - began
        sent = 2 * (self.ranks.config.world - 1) / self.ranks.config.world * flat.numel() * 4
        return {"seconds": seconds, "waited": self.ranks.waited - before, "bytes": sent}


def measure(settings: PipelineSettings, ranks: Ranks) -> dict[str, Any] | None:
    """Every way in turns, and the parts of a stage with them; what rank 0 returns is of all ranks."""
    torch.set_num_threads(1)
    known: dict[str, Callable[[], Callable[[], Reading]]] = {
        "staged": lambda: Staged(settings, ranks),
        "staged-bf16": lambda: Staged(settings, ranks, "bf16"),
        "staged-int8": lambda: Staged(settings, ranks, "int8"),
        "free": lambda: Staged(settings, ranks, free=True),
        "free-int8": lambda: Staged(settings, ranks, "int8", free=True),
        "whole": lambda: Staged(settings, ranks, gradient=Gradient()),
        "thin": lambda: Staged(settings, ranks, gradient=Gradient(bits=BITS)),
        "late": lambda: Staged(settings, ranks, gradient=Gradient(delay=1)),
        "thin-late": lambda: Staged(settings, ranks, gradient=Gradient(1, BITS)),
        "thin-late-int8": lambda: Staged(settings, ranks, "int8", gradient=Gradient(1, BITS)),
        "gpipe": lambda: Backprop(settings, ranks, "gpipe"),
        "1f1b": lambda: Backprop(settings, ranks, "1f1b"),
        "torch-gpipe": lambda: Backprop(settings, ranks, "gpipe", TorchPipeline),
        "torch-1f1b": lambda: Backprop(settings, ranks, "1f1b", TorchPipeline),
        "data": lambda: DataParallel(settings, ranks),
        "single": lambda: Single(settings, ranks),
        "parts": lambda: StageParts(settings, ranks),
    }
    wanted = settings.ways or tuple(known)
    ways = {name: make() for name, make in known.items() if name in (*wanted, "single", "parts")}
    names = list(ways)
    readings: dict[str, list[Reading]] = {name: [] for name in names}
    for name in names:  # not counted: shapes are announced, and every late stage has something to learn from
        for _ in range(settings.ranks if "late" in name else 1):
            _together(ranks, name, ways[name])
    for turn in range(settings.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            readings[name].append(_together(ranks, name, ways[name]))
    parts = readings.pop("parts")
    table = _gathered(ranks, [[[r[key] for key in READING] for r in rows] for rows in readings.values()])
    times = _gathered(ranks, [[r[key] for key in StageParts.NAMES] for r in parts])
    if not ranks.first:
        return None
    means = times[: min(CORES, settings.ranks)].mean(0)  # (rounds, parts)
    found = {name: _summary(table[:, i]) for i, name in enumerate(readings)}
    return found | {"parts": [dict(zip(StageParts.NAMES, row, strict=True)) for row in means.tolist()]}


def _together(ranks: Ranks, name: str, way: Callable[[], Reading]) -> Reading:
    """One step of a way, which all ranks begin and end together."""
    ranks.reduce(torch.zeros(1), f"beginning {name}")
    mine = way()
    ranks.reduce(torch.zeros(1), f"ending {name}")
    return mine


def _gathered(ranks: Ranks, numbers: Any) -> Tensor:
    """The numbers of all ranks, (ranks, ...)."""
    mine = torch.tensor(numbers)
    everybody = [torch.zeros_like(mine) for _ in range(ranks.config.world)]
    ranks.collective(lambda: dist.all_gather(everybody, mine, async_op=True), "gathering the readings")
    return torch.stack(everybody)


def _summary(table: Tensor) -> dict[str, Any]:
    """(ranks, rounds, 3): a step takes as long as the slowest rank."""
    seconds = table[:, :, 0].amax(0)
    bubble = (table[:, :, 1] / table[:, :, 0]).mean(0)
    return {
        "seconds": seconds.tolist(),
        "bubble": Spread.of(bubble.tolist()).as_dict(),
        "bubble_by_rank": (table[:, :, 1] / table[:, :, 0]).median(1).values.tolist(),
        "bytes": table[:, :, 2].median(1).values.sum().item(),
    }


class StageParts:
    """The parts of one stage on M micro-batches, by themselves: what the simulator is fed with.

    They run on as many ranks as there are cores at once, so that what cores share is in the times. `held` are
    layers where all M graphs are alive, as in GPipe: that takes memory which no earlier micro-batch has given
    back, and new pages may cost time. A message is sent to and fro by the first two ranks. `rounding` is to
    few bits and back, of one message; `copies` are those of a late stage's weights, once a step.
    """

    NAMES = (
        "embed",
        "forward",
        "head",
        "backward",
        "optimizer",
        "held_forward",
        "held_backward",
        "message",
        "latency",
        "rounding",
        "copies",
    )

    def __init__(self, settings: PipelineSettings, ranks: Ranks) -> None:
        self.stack, self.ranks = _stack(settings), ranks
        plan = prepare(self.stack, _topology(settings, False))
        self.optimizers = make_optimizers(self.stack, OptimizerConfig(name="adamw"), plan)
        self.batches, self.each = _batches(settings), settings.layers // settings.ranks
        self.shape = (settings.batch, settings.context, settings.width)
        self.size = settings.batch * settings.context * settings.width
        self.clock: Reading = {}

    def __call__(self) -> Reading:
        """Seconds of each part on one micro-batch, the mean of M; of the optimizer's step."""
        self.clock = dict.fromkeys(self.NAMES, 0.0)
        if self.ranks.rank < CORES:
            for batch in self.batches:
                self._backward(*self._forward(batch, "forward"), "backward")
            self._timed("optimizer", self.optimizers.step)
            self.optimizers.zero_grad()
            self._timed("copies", lambda: [p.detach().clone() for p in self._own()])
            gradient = torch.ones(self.shape)
            for _ in self.batches:
                self._timed("rounding", lambda: self._rounded(gradient))
            for graph in [self._forward(batch, "held_forward") for batch in self.batches]:
                self._backward(*graph, "held_backward")
            self.optimizers.zero_grad()
        if self.ranks.rank < 2:
            self._to_and_fro(1)  # both are there now
            self._timed("message", lambda: self._to_and_fro(self.size))
            self._timed("latency", lambda: self._to_and_fro(1))
        count = len(self.batches)
        shares = {"optimizer": 1, "copies": 1, "message": 2 * count, "latency": 2 * count}
        return {name: t / shares.get(name, count) for name, t in self.clock.items()}

    def _own(self) -> list[Tensor]:
        layered = {id(p) for layer in self.stack.layers[self.each :] for p in layer.parameters()}
        return [p for p in self.stack.parameters() if id(p) not in layered]

    def _rounded(self, gradient: Tensor) -> Tensor:
        return unpacked(packed(gradient, BITS, (0,)), self.shape, gradient.dtype, BITS)

    def _timed(self, name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = run()
        if name:
            self.clock[name] += time.perf_counter() - began
        return found

    def _forward(self, batch: tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, targets = batch
        embedded = self._timed("embed" if name == "forward" else "", lambda: self.stack.embed(tokens))
        x0 = embedded.detach().requires_grad_()
        ctx = self.stack.layer_context(x0, tokens)

        def layers() -> Tensor:
            h = x0
            for layer in self.stack.layers[: self.each]:
                h = layer(h, ctx)
            return h

        return embedded, x0, self._timed(name, layers), targets

    def _backward(self, embedded: Tensor, x0: Tensor, h: Tensor, targets: Tensor, name: str) -> None:
        if name == "held_backward":
            self._timed(name, lambda: h.backward(torch.ones_like(h)))
            return
        read = h.detach().requires_grad_()
        self._timed("head", lambda: stage_loss(self.stack, read, 0, CrossEntropy(), targets).backward())
        self._timed(name, lambda: h.backward(read.grad))
        self._timed("embed", lambda: embedded.backward(x0.grad))

    def _to_and_fro(self, size: int) -> None:
        """M messages from the first rank to the second, each answered by one of the same size."""
        value, peer = torch.zeros(size), 1 - self.ranks.rank
        for turn in range(2 * len(self.batches)):
            mine = turn % 2 == self.ranks.rank
            work = dist.isend(value, peer) if mine else dist.irecv(value, peer)
            assert work is not None
            work.wait()


def main(argv: list[str]) -> int:
    """`python benchmarks/pipeline_worker.py JSON`, on every rank."""
    settings = PipelineSettings(**json.loads(argv[0]))
    config = ParallelConfig(stages=settings.ranks, timeout=settings.timeout)
    ranks = join(config, {"version": version("topograd"), "settings": argv[0]})
    try:
        found = measure(settings, ranks)
    finally:
        leave()
    if found is not None:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
