"""`topograd interfaces`: are gradients exact, does a model look ahead, which backward pays, at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import DASH, Json, note, number, out, parse_one_of, print_json
from topograd.interfaces.settings import BackwardEngine, Shape, Way
from topograd.limits import DEPTH, REPEATS, SEED, SIZE, check_numbers
from topograd.nn.config import Architecture, Pool, SegmentInterface


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Compare an engine's gradients with autograd's: small random models, every parameter, the worst case."""

    architecture: Architecture = "transformer"
    """What the layers are."""
    trials: int = 20
    """Initialisations."""
    batches: int = 5
    """Batches for each of them."""
    engine: BackwardEngine = "scan"
    """The backward that is compared with autograd's."""
    jacobian: Way = "loop"
    """How Jacobians are built; `pullback` is for attention only."""
    seed: int = 0
    """Draws the first model; the others follow from it."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, trials=REPEATS, batches=REPEATS, seed=SEED)


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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Measure the parts of one region on this machine, and choose the backward with the shortest span."""

    architecture: Architecture = "transformer"
    """What the layers are."""
    shape: Annotated[Shape, tyro.conf.arg(name="")] = field(default_factory=Shape)
    interface: Annotated[SegmentInterface, tyro.conf.arg(name="")] = field(default_factory=SegmentInterface)
    jacobian: Way = "loop"
    """How Jacobians are built; `pullback` is for attention only."""
    workers: int = 1
    """1, or one for each region."""
    json: Json = False

    def __post_init__(self) -> None:
        self.shape.check_size(self.interface)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The published cost model as numbers: FLOPs, traffic and intensity of Jacobians, work and span."""

    batch: int = 8
    """B, sequences."""
    tokens: int = 2048
    """L, tokens of each."""
    width: int = 768
    """D, numbers in the hidden state of a token."""
    state: int = 16
    """N, the state of an SSM for each channel."""
    heads: int = 12
    """H, heads of a Transformer."""
    mlp_width: int = 3072
    """X, the inner width of its MLP."""
    rank: int = 64
    """r, the width of the interface."""
    regions: int = 16
    """K, regions."""
    ops_per_byte: float = 295.0
    """Operations for a byte from which on a device is bound by compute; 295 is the source's H100."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, batch=SIZE, tokens=SIZE, width=SIZE, state=SIZE, heads=SIZE, mlp_width=SIZE)
        check_numbers(self, rank=SIZE, regions=DEPTH, ops_per_byte=(1e-9, 1e9))


_Question = Parity | Leak | Planned | Costs
_QUESTIONS: dict[str, type[_Question]] = {"parity": Parity, "leak": Leak, "plan": Planned, "costs": Costs}


def run(argv: list[str]) -> int:
    """Answer one question about interfaces and return the exit code."""
    asked = parse_one_of(_QUESTIONS, argv, "interfaces")
    match asked:
        case Parity():
            answer = _parity(asked)
            table = parity_table
        case Leak():
            answer = _leak(asked)
            table = _leak_table
        case Planned():
            answer = _plan(asked)
            table = plan_table
        case Costs():
            answer = _costs(asked)
            table = costs_table
    if asked.json:
        print_json(answer)
    else:
        out().print(table(answer))
        if isinstance(asked, Planned):
            out().print(answer["reason"])
    return 0


def _parity(asked: Parity) -> dict[str, Any]:
    from topograd.interfaces.parity import parity

    return parity(asked.architecture, asked.trials, asked.batches, asked.engine, asked.jacobian, asked.seed)


def parity_table(answer: Mapping[str, Any]) -> Table:
    """The worst difference from autograd, in each precision."""
    title = f"{answer['architecture']}: worst of {answer['trials']} × {answer['batches']}"
    table = Table(title=f"{title}, {answer['parameters']} tensors", title_justify="left")
    for column in ("precision", "max abs", "rel l2", "1 - cos", "worst tensor"):
        tensor = column == "worst tensor"
        table.add_column(column, justify="left" if tensor else "right", no_wrap=not tensor, overflow="fold")
    for precision in ("float64", "float32", "bfloat16"):
        found = answer[precision]
        numbers = (found["max_abs"], found["rel_l2"], abs(1 - found["cosine"]))
        worst = f"{found['worst_tensor']:.1e} {found['worst_tensor_name']}"
        table.add_row(precision, *(f"{n:.1e}" for n in numbers), worst)
    return table


def _leak(asked: Leak) -> dict[str, Any]:
    from topograd.interfaces.causality import leak

    found = leak(asked.architecture, asked.pool, asked.segments, asked.causal, asked.seed)
    settings = {"architecture": asked.architecture, "pool": asked.pool, "segments": asked.segments}
    return {"max_future_gradient": found, **settings, "causal": asked.causal}


def _leak_table(answer: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    for name, value in answer.items():
        table.add_row(name, str(value))
    return table


def _plan(asked: Planned) -> dict[str, Any]:
    from topograd.interfaces.planner import choose_engine
    from topograd.interfaces.timeline import Units, break_even

    shape = asked.shape
    choose_engine(Units(jacobian=1.0), shape.regions, asked.workers)  # refuses a bad number of workers
    from topograd.interfaces.measure import build_model, measure_units, random_tokens  # torch, not before

    stack, (inputs, _) = build_model(shape, asked.interface, asked.architecture), random_tokens(shape)
    note("measuring one region: some seconds, on a quiet machine if you can")
    units = measure_units(stack, shape.topology, inputs, asked.jacobian)
    return {
        **asdict(choose_engine(units, shape.regions, asked.workers)),
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


def _costs(asked: Costs) -> dict[str, Any]:
    from topograd.interfaces.costs import Region, SSMRegion, TransformerRegion, cost_model

    sizes = {"B": asked.batch, "L": asked.tokens, "D": asked.width}
    models: dict[str, Region] = {
        "ssm": SSMRegion(**sizes, N=asked.state),
        "transformer": TransformerRegion(**sizes, H=asked.heads, X=asked.mlp_width),
    }
    return {
        "rank": asked.rank,
        "regions": asked.regions,
        "ops_per_byte": asked.ops_per_byte,
        **{
            name: cost_model(region, asked.rank, asked.regions, asked.ops_per_byte)
            for name, region in models.items()
        },
    }


def costs_table(answer: Mapping[str, Any]) -> Table:
    """A row for each quantity, a column for each kind of region; what the source has otherwise is marked."""
    table = Table(title=f"K = {answer['regions']} regions, r = {answer['rank']}", title_justify="left")
    for column in ("one region", "SSM", "Transformer"):
        table.add_column(column, justify="left" if column == "one region" else "right")
    pair = (answer["ssm"], answer["transformer"])

    def add(name: str, *values: float | None) -> None:
        table.add_row(name, *(DASH if value is None else f"{value:,.4g}" for value in values))

    add("forward, multiply-adds", *(model["forward_flops"] for model in pair))
    add("forward, bytes", *(model["forward_bytes"] for model in pair))
    add("forward, per byte", *(model["forward_intensity"] for model in pair))
    add("Jacobian, multiply-adds", *(model["jacobian_flops"] for model in pair))
    for chunk in pair[0]["jacobian_intensity"]:
        add(f"Jacobian by {chunk}, per byte", *(model["jacobian_intensity"][chunk] for model in pair))
    bound = f"bound by compute ({answer['ops_per_byte']:g} per byte) from chunk"
    add(bound, *(model["least_chunk"] for model in pair))
    add("  published, passes not whole", *(model["published_least_chunk"] for model in pair))
    add("scan over Jacobians", *(model["scan_over_jacobians"] for model in pair))
    add("  published, for one sample", *(model["published_scan_over_jacobians"] for model in pair))
    table.add_section()
    add("all regions: work", *(model["work"] for model in pair))
    add("all regions: span", *(model["span"] for model in pair))
    for name in pair[0]["transport"]:
        add(f"transport by {name}: span", *(model["transport"][name]["span"] for model in pair))
    return table
