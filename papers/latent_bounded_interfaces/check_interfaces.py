"""Bounded interfaces, quick questions: exact gradients, no look ahead, which backward pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.table import Table

from papers.latent_bounded_interfaces.shape import Shape
from topograd.cli.console import Json, note, number
from topograd.limits import REPEATS, SEED, check_numbers
from topograd.nn.config import Architecture, Pool, SegmentInterface
from topograd.runs.topology_config import Backward, Jacobian


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Compare an engine's gradients with autograd's: small random models, every parameter, the worst case."""

    architecture: Architecture = "transformer"
    """What the layers are."""
    trials: int = 20
    """Initialisations."""
    batches: int = 5
    """Batches for each of them."""
    engine: Backward = "scan"
    """The backward that is compared with autograd's."""
    jacobian: Jacobian = "loop"
    """How Jacobians are built; `pullback` is for attention only."""
    seed: int = 0
    """Draws the first model; the others follow from it."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, trials=REPEATS, batches=REPEATS, seed=SEED)

    def answer(self) -> dict[str, Any]:
        from papers.latent_bounded_interfaces.parity import parity

        return parity(self.architecture, self.trials, self.batches, self.engine, self.jacobian, self.seed)

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [parity_table(answer)]


@dataclass(frozen=True, kw_only=True)
class Leak:
    """The largest derivative of a logit by the input of a later position: 0 unless the model sees ahead."""

    architecture: Architecture = "transformer"
    """What the layers are."""
    pool: Pool = "tail"
    """What of a segment is handed on: its last position, its mean, or the mean of all so far."""
    segments: int = 4
    """S, into how many equal parts the 32 positions are cut."""
    causal: bool = True
    """--no-causal --pool mean --segments 1 is the published interface, which leaks."""
    seed: int = 0
    """Draws the model and its inputs."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, seed=SEED)

    def answer(self) -> dict[str, Any]:
        from papers.latent_bounded_interfaces.leak import leak

        result = leak(self.architecture, self.pool, self.segments, self.causal, self.seed)
        settings = {"architecture": self.architecture, "pool": self.pool, "segments": self.segments}
        return {"max_future_gradient": result, **settings, "causal": self.causal}

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        table = Table(show_header=False)
        for name, value in answer.items():
            table.add_row(name, str(value))
        return [table]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Measure the parts of one region on this machine, and choose the backward with the shortest span."""

    architecture: Architecture = "transformer"
    """What the layers are."""
    shape: Annotated[Shape, tyro.conf.arg(name="")] = field(default_factory=Shape)
    interface: Annotated[SegmentInterface, tyro.conf.arg(name="")] = field(default_factory=SegmentInterface)
    jacobian: Jacobian = "loop"
    """How Jacobians are built; `pullback` is for attention only."""
    workers: int = 1
    """1, or one for each region."""
    json: Json = False

    def __post_init__(self) -> None:
        self.shape.check_size(self.interface)

    def answer(self) -> dict[str, Any]:
        from papers.latent_bounded_interfaces.planner import choose_engine
        from papers.latent_bounded_interfaces.timeline import Units, break_even

        shape = self.shape
        choose_engine(Units(jacobian=1.0), shape.regions, self.workers)  # refuses a bad number of workers
        from papers.latent_bounded_interfaces import measure  # torch, not before

        stack = measure.build_model(shape, self.interface, self.architecture)
        inputs, _ = measure.random_tokens(shape)
        note("measuring one region: some seconds, on a quiet machine if you can")
        units = measure.measure_units(stack, shape.topology, inputs, self.jacobian)
        return {
            **asdict(choose_engine(units, shape.regions, self.workers)),
            "regions": shape.regions,
            "workers": self.workers,
            "units": asdict(units),
            "in_forwards": {name: seconds / units.forward for name, seconds in asdict(units).items()},
            "break_even_regions": break_even(units),
        }

    def tables(self, answer: Mapping[str, Any]) -> list[Table | str]:
        return [plan_table(answer), answer["reason"]]


def parity_table(answer: Mapping[str, Any]) -> Table:
    """The worst difference from autograd, in each precision."""
    title = f"{answer['architecture']}: worst of {answer['trials']} × {answer['batches']}"
    table = Table(title=f"{title}, {answer['parameters']} tensors", title_justify="left")
    for column in ("precision", "max abs", "rel l2", "1 - cos", "worst tensor"):
        tensor = column == "worst tensor"
        table.add_column(column, justify="left" if tensor else "right", no_wrap=not tensor, overflow="fold")
    for precision in ("float64", "float32", "bfloat16"):
        result = answer[precision]
        numbers = (result["max_abs"], result["rel_l2"], abs(1 - result["cosine"]))
        worst = f"{result['worst_tensor']:.1e} {result['worst_tensor_name']}"
        table.add_row(precision, *(f"{n:.1e}" for n in numbers), worst)
    return table


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
