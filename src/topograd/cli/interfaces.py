"""`topograd interfaces rank|analyse MODEL`: what gradient needs at boundaries, what interfaces carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, ModelArgument, grid, out, parse_one_of, print_json, show
from topograd.errors import ConfigError
from topograd.limits import check_numbers, check_rules

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.runs.session import LoadedRun


@dataclass(frozen=True, kw_only=True)
class Rank:
    """How many directions hold 90 and 99 % of the gradient's energy at every boundary between layers."""

    model: ModelArgument
    windows: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Held-out windows of the model's context, or images, that are read; without it 16 windows, or as many as
    have eight times the model's width of positions if these are fewer, or 256 images."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Analyse:
    """Jacobians between regions, what silenced messages cost, whether messages are all that crosses, and the
    shortest schedule on several workers."""

    model: ModelArgument
    windows: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """Held-out windows of the model's context, or images, that are read, at least 2; the batch of a plan."""
    workers: Annotated[int | None, tyro.conf.arg(metavar="P")] = None
    """Workers of the plan; without it, one for each region, and one for a model of images."""
    microbatches: Annotated[int, tyro.conf.arg(metavar="M")] = 1
    """Micro-batches of a step in the plan."""
    latency: Annotated[float, tyro.conf.arg(metavar="MS")] = 0.1
    """Milliseconds that a message takes between workers, beside its size."""
    mbit: Annotated[float, tyro.conf.arg(metavar="N")] = 10_000.0
    """Mbit a second of a link between workers."""
    json: Json = False


_QUESTIONS: dict[str, type[Rank | Analyse]] = {"rank": Rank, "analyse": Analyse}


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    args = parse_one_of(_QUESTIONS, argv, "interfaces")
    match args:
        case Rank():
            _rank(args)
        case Analyse():
            _analyse(args)
    return 0


def _rank(args: Rank) -> None:
    from topograd.cli.progress import counted
    from topograd.interfaces.adjoint_rank import boundary_ranks

    session, inputs, targets = _opened(args.model, args.windows, 1)
    read = counted("images read" if session.config.model.task == "images" else "windows read")
    found = boundary_ranks(session.stack, session.plan, inputs, targets, read)
    width = max((one["width"] for one in found), default=None)
    table = grid("Directions that gradient needs", "behind layer", "of", "90 %", "99 %", "effective rank")
    for one in found:
        ranks = (str(one[name]) for name in ("layer", "width", "rank_90", "rank_99"))
        table.add_row(*ranks, f"{one['effective_rank']:.1f}")
    show(args.json, {"run": str(args.model), "width": width, "boundaries": found}, lambda _: table)


def _analyse(args: Analyse) -> None:
    from topograd.cli.progress import counted
    from topograd.errors import TopologyError
    from topograd.interfaces.ablation import ablated
    from topograd.interfaces.analysis import analyse
    from topograd.interfaces.separator import check_separator

    check_numbers(args, microbatches=(1, 2**14), latency=(0.0, 1e6), mbit=(1e-6, 1e9))
    session, inputs, targets = _opened(args.model, args.windows, 2)
    stack, topology = session.stack, session.plan.topology
    images = session.config.model.task == "images"
    most = 1 if images else len(topology.stages)
    fits = args.workers is None or 1 <= args.workers <= most
    why = "1, for images are trained in one process" if images else f"in 1..{most}, the model's regions"
    check_rules(args, workers=(fits, why))
    measured = counted("parts of the analysis")
    measured(0, 4)
    found = analyse(stack, topology, inputs, targets)
    measured(1, 4)
    found["ablation"] = ablated(stack, topology, inputs, targets)
    measured(2, 4)
    try:
        check_separator(stack, topology, inputs)
        found["path_past_interfaces"] = None
    except TopologyError as error:
        found["path_past_interfaces"] = str(error)
    measured(3, 4)
    found["plan"] = _plan(args, session, inputs, targets, args.workers or most)
    if args.json:
        print_json({"run": str(args.model), **found})
        return
    out().print(f"loss {found['loss']:.4f}")
    regions = {name: found[name] for name in ("local_norm", "suffix_norm", "rms", "effective_rank")}
    if found["local_norm"]:
        out().print(_table("Jacobians of inner regions", "region", 2, regions))
    elif len(session.plan.stages) > 2:
        out().print(
            "Jacobians of inner regions would take more than a thousand products each: none was built"
        )
    messages = {name: found[name] for name in ("adjoint_norm", "message_rank", "message_spread")}
    messages |= {f"cost of {how}": costs for how, costs in found["ablation"].items()}
    out().print(_table("Messages", "boundary", 1, messages))
    out().print(found["path_past_interfaces"] or "no path leads past the interfaces")
    plan = found["plan"]
    known = {name: seconds for name, seconds in plan["seconds"].items() if seconds is not None}
    spans = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in known.items())
    out().print(f"a step on {plan['workers']} workers, by the event model: {spans}")
    out().print(f"shortest with these interfaces: {plan['best']}, train {plan['train']}")


def _plan(args: Analyse, session: LoadedRun, inputs: Tensor, targets: Tensor, workers: int) -> dict[str, Any]:
    """The schedule for so many workers, from times that are measured here and now."""
    import torch

    from topograd.interfaces.region_events import planned
    from topograd.interfaces.region_times import region_times
    from topograd.interfaces.regions import Regions
    from topograd.parallel.layout import deal

    regions = Regions.of(session.stack, session.plan)
    with torch.no_grad():
        x0 = regions.stack.embed(inputs)
        message, _ = regions.first(x0, regions.stack.layer_context(x0, inputs))
    each = message.element_size()
    sizes = (each * message.numel(), each * message.numel() * message[0].numel(), each * x0.numel())
    times = region_times(regions, inputs, targets, session.config.topology.jacobian)
    owners = deal([len(stage.layers) for stage in regions.plan.stages], workers)
    latency = args.latency / 1000
    return planned(owners, args.microbatches, times, sizes, args.mbit, latency, regions.alike)


def _table(title: str, first: str, start: int, columns: dict[str, list[float]]) -> Table:
    table = grid(title, first, *(name.replace("_", " ") for name in columns))
    for k, row in enumerate(zip(*columns.values(), strict=True), start):
        table.add_row(str(k), *(f"{value:.{2 if abs(value) < 0.01 else 3}g}" for value in row))
    return table


def _opened(model: Any, count: int | None, least: int) -> tuple[LoadedRun, Tensor, Tensor]:
    """A run of any task, and held-out windows or images for it."""
    if count is not None and count < least:
        raise ConfigError(setting="windows", given=count, allowed=f"at least {least}")
    from topograd.cli.results import open_any
    from topograd.convert.model_argument import resolve_model
    from topograd.runs.session import LoadedTextRun, heldout_images, heldout_text
    from topograd.training.masked_evaluation import hidden_sample

    opened = open_any(resolve_model(model))
    if opened.config.model.task == "images":
        images = heldout_images(opened, most=count or 256)
        opened.stack.eval()
        return opened, images.images, images.labels
    assert isinstance(opened, LoadedTextRun)
    text = heldout_text(opened)
    opened.stack.eval()
    inputs, targets = text.inputs, text.targets
    count = count or min(16, -(-8 * opened.stack.width // inputs.shape[1]))
    if opened.config.model.task == "masked":
        inputs, targets = hidden_sample(opened.stack, text)
    return opened, inputs[:count], targets[:count]
