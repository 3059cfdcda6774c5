"""`topograd interfaces`: are the gradients exact, does a model see the future, which backward pays here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, note, number, out, parse_one_of, print_json
from topograd.interfaces.causality import leak
from topograd.interfaces.engines import Engine
from topograd.interfaces.jacobian import Way
from topograd.interfaces.measure import Shape, measure_units
from topograd.interfaces.parity import parity
from topograd.interfaces.planner import plan
from topograd.interfaces.timeline import Units, break_even, timeline
from topograd.nn.gpt import Architecture
from topograd.nn.interface import Pool, SegmentInterface


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Compare an engine's gradients with autograd's: small random models, every parameter, the worst case."""

    architecture: Architecture = "transformer"
    trials: int = 20
    """Initialisations."""
    batches: int = 5
    """Batches for each of them."""
    engine: Engine = "scan"
    jacobian: Way = "loop"
    """How Jacobians are built; `pullback` is for attention only."""
    seed: int = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Leak:
    """The largest derivative of a logit by the input of a later position: 0 unless the model sees ahead."""

    architecture: Architecture = "transformer"
    pool: Pool = "tail"
    segments: int = 4
    causal: bool = True
    """--no-causal --pool mean --segments 1 is the published interface, which leaks."""
    seed: int = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Measure the parts of one region on this machine, and choose the backward with the shortest span."""

    architecture: Architecture = "transformer"
    shape: Annotated[Shape, tyro.conf.arg(name="")] = field(default_factory=Shape)
    interface: Annotated[SegmentInterface, tyro.conf.arg(name="")] = field(default_factory=SegmentInterface)
    jacobian: Way = "loop"
    """How Jacobians are built; `pullback` is for attention only."""
    workers: int = 1
    """1, or one for each region."""
    json: Json = False


_QUESTIONS: dict[str, type[Parity | Leak | Planned]] = {"parity": Parity, "leak": Leak, "plan": Planned}


def run(argv: list[str]) -> int:
    """Answer one question about interfaces and return the exit code."""
    asked = parse_one_of(_QUESTIONS, argv, "interfaces")
    match asked:
        case Parity():
            answer = parity(
                asked.architecture, asked.trials, asked.batches, asked.engine, asked.jacobian, asked.seed
            )
            table = parity_table(answer)
        case Leak():
            answer = _leak(asked)
            table = _leak_table(answer)
        case Planned():
            answer = _plan(asked)
            table = plan_table(answer)
    if asked.json:
        print_json(answer)
    else:
        out().print(table)
        if isinstance(asked, Planned):
            out().print(answer["reason"])
    return 0


def parity_table(answer: Mapping[str, Any]) -> Table:
    """The worst difference from autograd, in each precision."""
    title = f"{answer['architecture']}: worst of {answer['trials']} × {answer['batches']}"
    table = Table(title=f"{title}, {answer['parameters']} tensors", title_justify="left")
    for column in ("precision", "max abs", "rel l2", "1 - cos", "worst tensor"):
        tensor = column == "worst tensor"
        table.add_column(column, justify="left" if tensor else "right", no_wrap=not tensor, overflow="fold")
    for precision in ("float64", "float32"):
        found = answer[precision]
        numbers = (found["max_abs"], found["rel_l2"], abs(1 - found["cosine"]))
        worst = f"{found['worst_tensor']:.1e} {found['worst_tensor_name']}"
        table.add_row(precision, *(f"{n:.1e}" for n in numbers), worst)
    return table


def _leak(asked: Leak) -> dict[str, Any]:
    found = leak(asked.architecture, asked.pool, asked.segments, asked.causal, asked.seed)
    settings = {"architecture": asked.architecture, "pool": asked.pool, "segments": asked.segments}
    return {"max_future_gradient": found, **settings, "causal": asked.causal}


def _leak_table(answer: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    for name, value in answer.items():
        table.add_row(name, str(value))
    return table


def _plan(asked: Planned) -> dict[str, Any]:
    shape = asked.shape
    timeline("plain", Units(jacobian=1.0), shape.regions, asked.workers)  # refuses a bad number of workers
    stack, (inputs, _) = shape.build(asked.interface, asked.architecture), shape.tokens()
    note("measuring one region: some seconds, on a quiet machine if you can")
    units = measure_units(stack, shape.topology, inputs, asked.jacobian)
    return {
        **asdict(plan(units, shape.regions, asked.workers)),
        "regions": shape.regions,
        "workers": asked.workers,
        "units": asdict(units),
        "in_forwards": {name: seconds / units.forward for name, seconds in asdict(units).items()},
        "break_even_regions": break_even(units),
    }


def plan_table(answer: Mapping[str, Any]) -> Table:
    """What one region's parts take, and the span of every backward."""
    regions, workers = answer["regions"], answer["workers"]
    table = Table(title=f"{regions} regions on {workers} workers", title_justify="left")
    for column in ("what", "ms", "forwards"):
        table.add_column(column, justify="left" if column == "what" else "right")
    forward = answer["units"]["forward"]
    rows = [(f"one region's {name}", seconds) for name, seconds in answer["units"].items()]
    rows += [(f"step by {name}", seconds) for name, seconds in answer["spans"].items()]
    for name, seconds in rows:
        table.add_row(name, number(1e3 * seconds, 2), number(seconds / forward, 1))
    return table
