"""How long steps, Jacobians and scans of bounded interfaces take, against the dense model.

    python benchmarks/scan.py [--width 256] [--regions 6] [--repeats 5] [--architecture mamba2] [--json]

Everything is measured in one process. In each round every row runs once, in an order that rotates; a ratio is
taken within its round, and the row shows its median and quartiles (`timing.py`). Four questions:

    steps        a training step over that of the dense GPT, the same layers in one stage; each takes turns
                 with the dense one alone, since more models would push each other's weights out of the caches
    jacobians    one inner region's Jacobian, in forwards F of the same layers in the dense model
    trimming     a trimmed Jacobian over larger ones: "every row" is (S-1) r VJPs of the whole region, and
                 "untrimmed" already leaves out what nobody reads (the last segment, and with a tail pool most
                 of the last layer) and the two rows for each segment that a LayerNorm makes redundant. Of
                 that, cutting to prefixes leaves about 2/3 at S = 4, and 1/2 for large S, at best
    scans        microseconds of the suffix scan, K maps of width n

and whether it is the same thing that was timed: the gradients of every scan step against autograd's, float32.
The multiply-adds of steps over those of the dense one, attention included, are counted and not timed,
and so is the peak memory of every step over the dense one's.
A goal is an upper bound for the ratio; rows without one are there to compare. The scan engine's goal stands
at its fastest way, by hand.

Three interfaces are measured: `lean` (tail pool, S = 8, r = 8, by autograd), `published` (the mean of the
whole sequence, r = 16, which leaks) and `causal` (S = 4, r = 8, for the scan: J is (S-1) r wide), the last
also with the cumulative pool.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3; the goals are ours.
Cost: a minute or two at the default sizes. Limits: weights are random, the optimizer is not in the step, and
a machine is noisy. Read the quartiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, get_args

import torch
import tyro
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import clone  # noqa: F401  (for what is not installed)
from papers.latent_bounded_interfaces.measure import build_model, random_tokens
from papers.latent_bounded_interfaces.parity import difference, taken_gradients
from papers.latent_bounded_interfaces.shape import Shape
from tables import ratio_table
from topograd.cli.console import Json, note, number, out, print_json
from topograd.errors import ConfigError
from topograd.exec.forward import run_stage
from topograd.exec.gradient import BACKWARDS
from topograd.exec.train_step import train_step
from topograd.interfaces.jacobian import interface_jacobian, visit
from topograd.interfaces.region_times import middle_region, timed
from topograd.interfaces.regions import Regions
from topograd.interfaces.suffix_scan import Method, suffix_adjoints
from topograd.limits import DEPTH, REPEATS, check_numbers
from topograd.memory import peak_step_bytes
from topograd.nn.config import Architecture, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.runs.topology_config import Backward, Jacobian
from topograd.timing import Spread, ratio, read_in_turns, take_turns
from topograd.topology.dag import Topology

LEAN_GOAL, SCAN_GOAL, TRIMMED_GOAL = 0.75, 4.4, 0.5
WAYS: tuple[Jacobian, ...] = ("loop", "batched", "pullback")
"""Of Jacobians; what is no GPT's block has none by hand."""
DENSE = "dense, autograd"
SCAN_CALLS = 10
"""Calls of a scan that are timed as one."""

Models = Mapping[SegmentInterface, GPT]


@dataclass(frozen=True, kw_only=True)
class Settings(Shape):
    """The model, its interfaces, and how often everything is measured."""

    segments: int = 8
    """S of the lean interface by autograd."""
    scan_segments: int = 4
    """S of the causal interface by scan."""
    causal_rank: int = 8
    """r of both."""
    rank: int = 16
    """r of the published interface, the mean of the whole sequence."""
    scan_maps: tuple[int, ...] = (16, 256)
    """K of the scans alone, whose width is `rank`."""
    repeats: int = 5
    """Rounds; in each everything is measured once."""
    architecture: Architecture = "transformer"
    """What the layers are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, repeats=REPEATS)
        for maps in self.scan_maps:
            if not 1 <= maps <= DEPTH[1]:
                raise ConfigError(f"scan_maps is {maps}; it must lie in 1..{DEPTH[1]}")
        for interface in (self.lean, self.causal, self.published):
            self.check_size(interface)

    @property
    def ways(self) -> tuple[Jacobian, ...]:
        return WAYS if self.architecture == "transformer" else WAYS[:-1]

    @property
    def lean(self) -> SegmentInterface:
        return SegmentInterface(segments=self.segments, rank=self.causal_rank)

    @property
    def causal(self) -> SegmentInterface:
        return SegmentInterface(segments=self.scan_segments, rank=self.causal_rank)

    @property
    def published(self) -> SegmentInterface:
        return SegmentInterface(segments=1, rank=self.rank, pool="mean", causal=False)


@dataclass(frozen=True)
class Step:
    """A training step that is measured."""

    interface: SegmentInterface
    engine: Backward = "autograd"
    jacobian: Jacobian = "loop"
    goal: float | None = None

    @property
    def name(self) -> str:
        how = "autograd" if self.engine == "autograd" else f"{self.engine} by {self.jacobian}"
        return f"{named(self.interface)}, {how}"


def bench_scan(settings: Settings) -> dict[str, Any]:
    """Every reading of this module, as plain numbers."""
    steps = _steps(settings)
    cumulative = replace(settings.causal, pool="cumulative")
    wanted = {*(step.interface for step in steps), cumulative}
    models = {interface: _build(settings, interface) for interface in wanted}
    agreement = _agreement(settings, steps, models)
    jacobians, trimming = _jacobians(settings, models, (settings.published, settings.causal, cumulative))
    return {
        "threads": torch.get_num_threads(),
        "settings": asdict(settings),
        "steps": _step_rows(settings, steps, models),
        "jacobians": jacobians,
        "trimming": trimming,
        "scans": [_scan_times(settings, maps) for maps in settings.scan_maps],
        "multiply_adds": _multiply_adds(settings, steps, models),
        "memory": _memory(settings, steps, models),
        "agreement": agreement,
    }


def _build(settings: Settings, interface: SegmentInterface | None = None) -> GPT:
    return build_model(settings, interface, settings.architecture)


def named(interface: SegmentInterface) -> str:
    """An interface in a few letters.

    >>> named(SegmentInterface(segments=4, rank=8)), named(Settings().published)
    ('S=4 r=8 tail', 'r=16 whole mean')
    """
    if not interface.causal:
        return f"r={interface.rank} whole mean"
    return f"S={interface.segments} r={interface.rank} {interface.pool}"


def row(name: str, spread: Spread, goal: float | None = None) -> dict[str, Any]:
    """One line of the tables; `goal` is the largest ratio that meets it."""
    met = None if goal is None else spread.median <= goal
    return {"name": name, "ratio": spread.median, "spread": spread.as_dict(), "goal": goal, "met": met}


def _steps(settings: Settings) -> list[Step]:
    """What is compared with the dense step."""
    published = [
        Step(settings.published, "scan", way, SCAN_GOAL if way == "pullback" else None)
        for way in settings.ways
    ]
    causal = [Step(settings.causal, "scan", way) for way in settings.ways if way != "batched"]
    return [Step(settings.lean, goal=LEAN_GOAL), Step(settings.published), *published, *causal]


def _run(settings: Settings, step: Step, models: Models) -> None:
    inputs, targets = random_tokens(settings)
    stack = models[step.interface]
    how = {} if step.engine == "autograd" else {"jacobian": step.jacobian}
    train_step(stack, settings.topology, inputs, targets, gradient=BACKWARDS[step.engine](**how))


def _step_rows(settings: Settings, steps: list[Step], models: Models) -> list[dict[str, Any]]:
    inputs, targets = random_tokens(settings)
    dense, whole = _build(settings), Topology.chain(str(settings.regions * settings.region_layers))
    base: Callable[[], object] = partial(train_step, dense, whole, inputs, targets)
    rows = []
    for step in steps:
        turns: dict[str, Callable[[], object]] = {DENSE: base}
        turns[step.name] = partial(_run, settings, step, models)
        seconds = take_turns(turns, settings.repeats, warmup=1)
        rows.append(row(step.name, ratio(seconds, step.name, DENSE), step.goal))
    return rows


def _multiply_adds(settings: Settings, steps: list[Step], models: Models) -> dict[str, float]:
    """Multiply-adds of steps over those of the dense one, forward and backward, by name.

    Torch's counter does not count within `autograd.grad`, by which all ways but these two build Jacobians.
    """
    inputs, targets = random_tokens(settings)
    dense, whole = _build(settings), Topology.chain(str(settings.regions * settings.region_layers))
    base = _counted(partial(train_step, dense, whole, inputs, targets))
    known = [step for step in steps if step.engine == "autograd" or step.jacobian == "pullback"]
    return {step.name: _counted(partial(_run, settings, step, models)) / base for step in known}


def _counted(run: Callable[[], object]) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _memory(settings: Settings, steps: list[Step], models: Models) -> dict[str, float]:
    """The most that a step holds beside parameters and gradients, over the dense step's, by name."""
    inputs, targets = random_tokens(settings)
    dense, whole = _build(settings), Topology.chain(str(settings.regions * settings.region_layers))
    base = peak_step_bytes(lambda: train_step(dense, whole, inputs, targets), list(dense.parameters()))
    found = {}
    for step in steps:
        held = peak_step_bytes(
            partial(_run, settings, step, models), list(models[step.interface].parameters())
        )
        found[step.name] = held / base
    return found


def _agreement(settings: Settings, steps: list[Step], models: Models) -> dict[str, Any]:
    """‖ĝ - g‖ / ‖g‖ over all parameters, for every step that is not autograd's own."""
    off: dict[str, float] = {}
    for step in steps:
        if step.engine != "autograd":
            expected = _gradients(settings, replace(step, engine="autograd"), models)
            off[step.name] = difference(_gradients(settings, step, models), expected).rel_l2
    return {"dtype": "float32", "worst": max(off.values()), "relative": off}


def _gradients(settings: Settings, step: Step, models: Models) -> dict[str, Tensor]:
    stack = models[step.interface]
    stack.zero_grad(set_to_none=True)
    _run(settings, step, models)
    return taken_gradients(stack, step.engine)


def _jacobians(
    settings: Settings, models: Models, interfaces: tuple[SegmentInterface, ...]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Jacobians in forwards F, and what trimming leaves of larger ones."""
    clocks: dict[str, Callable[[], float]] = {"forward": _dense_forward(settings)}
    pairs: list[tuple[str, str]] = []
    for interface in interfaces:
        stack, rows = models[interface], f"{named(interface)}, every row"
        if interface.causal:
            clocks[rows] = _every_row_clock(settings, stack)
        for way in settings.ways:
            name = f"{named(interface)}, {way}"
            clocks[name] = _jacobian_clock(settings, stack, way, trimmed=True)
            if interface.causal:
                pairs.append((name, rows))
            if interface.causal and way != "pullback":  # which is always trimmed
                whole = f"{name}, untrimmed"
                clocks[whole] = _jacobian_clock(settings, stack, way, trimmed=False)
                pairs.append((name, whole))
    seconds = read_in_turns(clocks, settings.repeats, warmup=1)
    in_forwards = [row(name, ratio(seconds, name, "forward")) for name in clocks if name != "forward"]
    return in_forwards, [
        row(f"{name} / {large.rpartition(', ')[2]}", ratio(seconds, name, large), TRIMMED_GOAL)
        for name, large in pairs
    ]


def _dense_forward(settings: Settings) -> Callable[[], float]:
    """F: the layers of one region at every position, with their graph."""
    stack, (inputs, _) = _build(settings), random_tokens(settings)
    middle = settings.topology.stages[settings.regions // 2]
    x0 = stack.embed(inputs).detach().requires_grad_()
    ctx = stack.layer_context(x0, inputs)

    def forward() -> Tensor:
        h = x0
        for layer in stack.layers[middle.start : middle.stop]:
            h = layer(h, ctx)
        return h

    return lambda: timed(forward, x0.device)[0]


def _jacobian_clock(settings: Settings, stack: GPT, way: Jacobian, trimmed: bool) -> Callable[[], float]:
    """Seconds of the middle region's Jacobian; the forward before it is not counted."""
    regions, (inputs, _) = Regions.of(stack, settings.topology), random_tokens(settings)
    middle, message, ctx = middle_region(regions, inputs)

    def clock() -> float:
        seen = visit(regions, middle, message.detach().requires_grad_(), ctx, way)
        return timed(lambda: interface_jacobian(seen, way, trimmed=trimmed), message.device)[0]

    return clock


def _every_row_clock(settings: Settings, stack: GPT) -> Callable[[], float]:
    """Seconds of the middle region's Jacobian as one would write it first: all rows, at all positions."""
    regions, (inputs, _) = Regions.of(stack, settings.topology), random_tokens(settings)
    middle, message, ctx = middle_region(regions, inputs)
    planned = regions.plan.stages[middle]
    numbers = message[0].numel()
    basis = torch.eye(numbers, dtype=message.dtype, device=message.device).view(-1, *message.shape[1:])

    def clock() -> float:
        leaf = message.detach().requires_grad_()
        sent = run_stage(stack, planned, [leaf], ctx)[1][planned.outputs[0]]

        def rows() -> list[Tensor]:
            return [torch.autograd.grad(sent, leaf, e.expand_as(sent), retain_graph=True)[0] for e in basis]

        return timed(rows, message.device)[0]

    return clock


def _scan_times(settings: Settings, maps: int) -> dict[str, Any]:
    """Microseconds of one scan by each method, on random maps that neither grow nor shrink much."""
    n, generator = settings.rank, torch.Generator().manual_seed(0)
    jacobians = torch.randn(maps, settings.batch, n, n, generator=generator) / n**0.5
    terminal = torch.randn(settings.batch, n, generator=generator)

    def calls(method: Method) -> None:
        for _ in range(SCAN_CALLS):
            suffix_adjoints(jacobians, terminal, method)

    turns = {method: partial(calls, method) for method in get_args(Method)}
    seconds = take_turns(turns, settings.repeats, warmup=1)
    micro = {
        name: Spread.of([1e6 * t / SCAN_CALLS for t in times]).as_dict() for name, times in seconds.items()
    }
    return {"maps": maps, "width": n, "microseconds": micro}


def scan_tables(results: Mapping[str, Any]) -> list[Table]:
    """Steps, Jacobians, trimming and scans; the first says whether the gradients agree."""
    title = f"Training steps over the dense one, {results['threads']} threads"
    steps = ratio_table(title, results["steps"])
    worst = results["agreement"]["worst"]
    steps.caption = f"gradients differ from autograd's by at most {worst:.1e} of their length"
    return [
        steps,
        ratio_table("A Jacobian, in forwards of its region", results["jacobians"]),
        ratio_table("A trimmed Jacobian over a larger one", results["trimming"]),
        _scan_table(results["scans"]),
        _memory_table(results["memory"]),
    ]


def _memory_table(memory: Mapping[str, float]) -> Table:
    table = Table(title="Peak memory of a step over the dense one's", title_justify="left")
    table.add_column("what")
    table.add_column("ratio", justify="right")
    for name, held in memory.items():
        table.add_row(name, number(held, 2))
    return table


def _scan_table(scans: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Suffix scans, microseconds", title_justify="left")
    methods = list(scans[0]["microseconds"]) if scans else []
    for column in ("maps", "width", *methods):
        table.add_column(column, justify="right")
    for scan in scans:
        times = (number(scan["microseconds"][method]["median"], 0) for method in methods)
        table.add_row(str(scan["maps"]), str(scan["width"]), *times)
    return table


def main(settings: Annotated[Settings, tyro.conf.arg(name="")], json: Json = False) -> None:
    """Measure training steps, Jacobians and scans of bounded interfaces against a dense model."""
    note("measuring bounded interfaces: a minute or two, on a quiet machine if you can")
    results = bench_scan(settings)
    if json:
        print_json(results)
        return
    for table in scan_tables(results):
        out().print(table)


if __name__ == "__main__":
    tyro.cli(main)
