"""`topograd space`: look around the space of partitions. Needs no torch, so it answers at once.

Only the measured properties of a run do; torch is loaded when they are asked for.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import Json, figure, pairs, parse_one_of, show, written
from topograd.errors import ConfigError
from topograd.limits import BYTES, DEPTH, REPEATS, check_numbers
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.closed_forms import closed_forms
from topograd.topology.composition import Composition, count_compositions
from topograd.topology.configuration import Configuration, count_configurations
from topograd.topology.dag import Topology
from topograd.topology.pipeline import backprop_bubble, pipeline_speedup, staged_bubble
from topograd.topology.plan import Plan

Partition = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PARTITION")]
_LISTED = 12  # neighbours that the table shows
_SHOWN = {
    "gradient_depth": "gradient depth, in layers",
    "activation_layers": "activations held at once, in layers",
    "pipeline_granularity": "pipeline granularity",
    "gradient_bits": "bits of gradient back, for each number",
    "waiting_stages": "stages that wait for gradient in a step",
    "staleness": "steps until a batch is learned whole",
    "stashed_layers": "layers whose past weights are kept",
}
"""Properties of `space show`."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """A partition, its neighbours in the lattice and its properties."""

    partition: Partition
    """Layers per stage, as 4,4,4."""
    heads: Literal["shared", "per-stage"] = "shared"
    """One head for all stages, or one more for each."""
    microbatches: int = 8
    """Micro-batches of a pipeline with one device per stage, for the bubbles."""
    grad_scale: float = 0.0
    """How much gradient crosses a boundary: 0 stops it, 1 is hierarchical training."""
    grad_delay: int = 0
    """Steps after which it arrives."""
    grad_bits: int = 32
    """Bits of each of its numbers: 32, 16, 8, 4 or 3."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, microbatches=REPEATS)


@dataclass(frozen=True, kw_only=True)
class Join:
    """The coarsest partition that refines both: every boundary of either."""

    first: Partition
    """Layers per stage, as 4,4,4."""
    second: Partition
    """Another of as many layers."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Meet(Join):
    """The finest partition that both refine: the boundaries that they share."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """How many partitions of L layers there are, and configurations: partitions with a choice of heads."""

    layers: Annotated[tyro.conf.Positional[int], tyro.conf.arg(metavar="L")]
    """How many layers there are."""
    stages: int | None = None
    """Only those with this many stages."""
    min_depth: int = 1
    """Only those whose stages all have at least this many layers."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, layers=DEPTH, stages=DEPTH, min_depth=DEPTH)


@dataclass(frozen=True, kw_only=True)
class Properties:
    """The properties of a partition that follow without training, or those of a trained run, measured."""

    subject: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PARTITION|DIR")]
    """Layers per stage, as 4,4,4, or the folder of a run."""
    heads: Literal["shared", "per-stage"] = "shared"
    """One head for all stages, or one more for each; a run knows its own."""
    new: Path | None = None
    """Text for the probes that train a copy of a run; without it, the held-out text backwards."""
    limit_bytes: int | None = None
    """Held-out bytes to read of a run; without it, as many as its evaluations read."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, limit_bytes=BYTES)


_QUESTIONS: dict[str, type[Show | Join | Count | Properties]] = {
    "show": Show,
    "join": Join,
    "meet": Meet,
    "count": Count,
    "properties": Properties,
}


def run(argv: list[str]) -> int:
    args = parse_one_of(_QUESTIONS, argv, "space")
    match args:
        case Show():
            configuration = Configuration.parse(args.partition, heads=args.heads)
            chain = TopologyConfig(
                partition=args.partition,
                heads=args.heads,
                grad_scale=args.grad_scale,
                grad_delay=args.grad_delay,
                grad_bits=args.grad_bits,
            )
            layers = configuration.composition.layers
            answer = describe(chain.build(layers), configuration, args.microbatches)
            table = _shown(answer)
        case Join():
            first, second = Composition.parse(args.first), Composition.parse(args.second)
            name, result = ("meet", first & second) if isinstance(args, Meet) else ("join", first | second)
            answer = {"first": list(first.parts), "second": list(second.parts), name: list(result.parts)}
            table = pairs([(name, written(value)) for name, value in answer.items()])
        case Count():
            answer = _count(args)
            table = pairs([(name, str(value)) for name, value in answer.items() if value is not None])
        case Properties():
            answer = _properties(args)
            table = pairs(_rows(answer))
    show(args.json, answer, lambda _: table)
    return 0


def describe(topology: Topology, configuration: Configuration, microbatches: int) -> dict[str, Any]:
    """Everything that is known of a configuration, as the chain `topology`, without training it."""
    composition = configuration.composition
    forms = closed_forms(Plan.of(topology, composition.layers))
    pipeline = (composition.stages, 2 * microbatches)  # slots: a forward and a backward for each micro-batch
    waits = forms["waiting_stages"] > 0  # then a pipeline idles as backprop's does
    about = _named(configuration)
    properties = {name: about.pop(name) for name in ("vocabulary_projections", "capability_region")}
    return {
        **about,
        "terminals": list(composition.terminals),
        "boundaries": sorted(composition.boundaries),
        "boundary_vector": list(composition.boundary_vector),
        "neighbours": {
            "finer": [list(c.parts) for c in composition.refinements()],
            "coarser": [list(c.parts) for c in composition.coarsenings()],
            "moved": [list(c.parts) for c in composition.moves()],
        },
        "properties": {
            **{name: forms[name] for name in _SHOWN},
            **properties,
            "bubble": {
                "microbatches": microbatches,
                "backprop": backprop_bubble(*pipeline),
                "staged": backprop_bubble(*pipeline) if waits else staged_bubble(*pipeline),
                "speedup": 1.0 if waits else pipeline_speedup(*pipeline),
            },
        },
    }


def _properties(args: Properties) -> dict[str, Any]:
    if "/" in args.subject or Path(args.subject).is_dir():
        return _measured(args)
    if args.new is not None or args.limit_bytes is not None:
        name = "new" if args.new is not None else "limit-bytes"
        raise ConfigError(
            f"--{name} was given with {args.subject!r}, which is no folder",
            remedy="only the properties of a run are read from text",
        )
    if not re.search(r"\d", args.subject):
        remedy = "give layers per stage, as 4,4,4, or the folder of a run"
        raise ConfigError(f"{args.subject!r} is neither a partition nor a folder", remedy=remedy)
    configuration = Configuration.parse(args.subject, heads=args.heads)
    plan = Plan.of(Topology.chain(configuration), configuration.composition.layers)
    return {**_named(configuration), **closed_forms(plan)}


def _named(configuration: Configuration) -> dict[str, Any]:
    composition = configuration.composition
    return {
        "composition": list(composition.parts),
        "layers": composition.layers,
        "stages": composition.stages,
        "heads": configuration.heads.value,
        "vocabulary_projections": configuration.vocabulary_projections,
        "capability_region": configuration.in_capability_region(),
    }


def _measured(args: Properties) -> dict[str, Any]:
    from topograd.runs.session import heldout_text, open_session
    from topograd.search.properties import measure  # torch takes seconds to load

    session = open_session(args.subject)
    text = heldout_text(session, limit_bytes=args.limit_bytes)
    new = None if args.new is None else heldout_text(session, args.new, args.limit_bytes)
    parts = [len(planned.layers) for planned in session.plan.stages]
    configuration = Configuration.parse(parts, heads=session.plan.topology.heads)
    return {
        "run": str(session.run.folder),
        "steps": session.step,
        **_named(configuration),
        **measure(session.stack, session.plan, text, new, layers=session.config.model.layers),
    }


def _count(args: Count) -> dict[str, Any]:
    question = (args.layers, args.stages, args.min_depth)
    return {
        "layers": args.layers,
        "stages": args.stages,
        "min_depth": args.min_depth,
        "compositions": count_compositions(*question),
        "configurations": count_configurations(*question),
    }


def _shown(answer: dict[str, Any]) -> Table:
    has, bubble = answer["properties"], answer["properties"]["bubble"]
    count = bubble["microbatches"]
    rows = [
        ("composition", written(answer["composition"])),
        ("layers, stages", f"{answer['layers']}, {answer['stages']}"),
        ("heads", answer["heads"]),
        ("boundaries after layers", written(answer["boundaries"])),
        *((words, str(has[name])) for name, words in _SHOWN.items()),
        ("vocabulary projections", str(has["vocabulary_projections"])),
        ("in the capability region", "yes" if has["capability_region"] else "no"),
        (f"idle with {count} micro-batches, backprop", f"{100 * bubble['backprop']:.1f} %"),
        (f"idle with {count} micro-batches, stages", f"{100 * bubble['staged']:.1f} %"),
        ("speedup of the pipeline", f"{bubble['speedup']:.2f}"),
    ]
    for name, words in (("finer", "one boundary more"), ("coarser", "one less"), ("moved", "one moved")):
        found = answer["neighbours"][name]
        more = f"  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        rows.append((words, "  ".join(map(written, found[:_LISTED])) + more or "none"))
    return pairs(rows)


def _rows(answer: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """A row for each number, with the names of what it lies in before its own."""
    rows: list[tuple[str, str]] = []
    for name, value in answer.items():
        words = f"{before}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            rows += _rows(value, f"{words}, ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:  # an edge
                figures = {key: said for key, said in item.items() if key not in ("source", "stage")}
                rows += _rows(figures, f"{words} {item['source'] + 1} to {item['stage'] + 1}, ")
        else:
            rows.append((words, figure(value)))
    return rows
