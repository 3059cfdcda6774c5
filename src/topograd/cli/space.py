"""`topograd space`: look around the space of partitions. Needs no torch, so it answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import Json, out, parse, print_json
from topograd.errors import ConfigError
from topograd.topology.composition import Composition, count_compositions
from topograd.topology.configuration import Configuration, count_configurations
from topograd.topology.dag import Topology
from topograd.topology.pipeline import backprop_bubble, pipeline_speedup, staged_bubble
from topograd.topology.plan import Plan
from topograd.topology.properties import activation_layers, gradient_depth, pipeline_granularity

Partition = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PARTITION")]
_LISTED = 12  # neighbours that the table shows


@dataclass(frozen=True, kw_only=True)
class Show:
    """A partition, its neighbours in the lattice and its properties."""

    partition: Partition
    """Layers per stage, as 4,4,4."""
    heads: Literal["shared", "per-stage"] = "shared"
    """One head for all stages, or one more for each."""
    microbatches: int = 8
    """Micro-batches of a pipeline with one device per stage, for the bubbles."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Join:
    """The coarsest partition that refines both: every boundary of either."""

    first: Partition
    second: Partition
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Meet:
    """The finest partition that both refine: the boundaries that they share."""

    first: Partition
    second: Partition
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Count:
    """How many partitions of L layers there are, and configurations: partitions with a choice of heads."""

    layers: Annotated[tyro.conf.Positional[int], tyro.conf.arg(metavar="L")]
    stages: int | None = None
    """Only those with this many stages."""
    min_depth: int = 1
    """Only those whose stages all have at least this many layers."""
    json: Json = False


Asked = (
    Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Join, tyro.conf.subcommand("join")]
    | Annotated[Meet, tyro.conf.subcommand("meet")]
    | Annotated[Count, tyro.conf.subcommand("count")]
)


_QUESTIONS = ("show", "join", "meet", "count")


def run(argv: list[str]) -> int:
    """Answer one question about the space and return the exit code."""
    if argv and not argv[0].startswith("-") and argv[0] not in _QUESTIONS:
        raise ConfigError(
            f"{argv[0]!r} is no question about the space; choose one of {', '.join(_QUESTIONS)}"
        )
    asked: Show | Join | Meet | Count = parse(Asked, argv, "space")  # type: ignore[arg-type]
    match asked:
        case Show():
            answer = describe(Configuration.parse(asked.partition, heads=asked.heads), asked.microbatches)
            table = _shown(answer)
        case Join() | Meet():
            answer = _combine(asked)
            table = _pairs([(name, _written(value)) for name, value in answer.items()])
        case Count():
            answer = _count(asked)
            table = _pairs([(name, _written(value)) for name, value in answer.items() if value is not None])
    if asked.json:
        print_json(answer)
    else:
        out().print(table)
    return 0


def describe(configuration: Configuration, microbatches: int) -> dict[str, Any]:
    """Everything that is known of a configuration without training it."""
    composition = configuration.composition
    plan = Plan.of(Topology.chain(configuration), composition.layers)
    return {
        "composition": list(composition.parts),
        "layers": composition.layers,
        "stages": composition.stages,
        "heads": configuration.heads.value,
        "terminals": list(composition.terminals),
        "boundaries": sorted(composition.boundaries),
        "boundary_vector": list(composition.boundary_vector),
        "neighbours": {
            "finer": [list(c.parts) for c in composition.refinements()],
            "coarser": [list(c.parts) for c in composition.coarsenings()],
            "moved": [list(c.parts) for c in composition.moves()],
        },
        "properties": {
            "gradient_depth": gradient_depth(plan),
            "activation_layers": activation_layers(plan),
            "pipeline_granularity": pipeline_granularity(plan),
            "vocabulary_projections": configuration.vocabulary_projections,
            "capability_region": configuration.in_capability_region(),
            "bubble": {
                "microbatches": microbatches,
                "backprop": backprop_bubble(composition.stages, microbatches),
                "staged": staged_bubble(composition.stages, microbatches),
                "speedup": pipeline_speedup(composition.stages, microbatches),
            },
        },
    }


def _combine(asked: Join | Meet) -> dict[str, Any]:
    first, second = Composition.parse(asked.first), Composition.parse(asked.second)
    name, result = ("join", first | second) if isinstance(asked, Join) else ("meet", first & second)
    return {"first": list(first.parts), "second": list(second.parts), name: list(result.parts)}


def _count(asked: Count) -> dict[str, Any]:
    question = (asked.layers, asked.stages, asked.min_depth)
    return {
        "layers": asked.layers,
        "stages": asked.stages,
        "min_depth": asked.min_depth,
        "compositions": count_compositions(*question),
        "configurations": count_configurations(*question),
    }


def _shown(answer: dict[str, Any]) -> Table:
    has, bubble = answer["properties"], answer["properties"]["bubble"]
    slots = bubble["microbatches"]
    rows = [
        ("composition", _written(answer["composition"])),
        ("layers, stages", f"{answer['layers']}, {answer['stages']}"),
        ("heads", answer["heads"]),
        ("boundaries after layers", _written(answer["boundaries"])),
        ("gradient depth, in layers", str(has["gradient_depth"])),
        ("activations held at once, in layers", str(has["activation_layers"])),
        ("pipeline granularity", str(has["pipeline_granularity"])),
        ("vocabulary projections", str(has["vocabulary_projections"])),
        ("in the capability region", "yes" if has["capability_region"] else "no"),
        (f"idle with {slots} micro-batches, backprop", f"{100 * bubble['backprop']:.1f} %"),
        (f"idle with {slots} micro-batches, stages", f"{100 * bubble['staged']:.1f} %"),
        ("speedup of the pipeline", f"{bubble['speedup']:.2f}"),
    ]
    for name, words in (("finer", "one boundary more"), ("coarser", "one less"), ("moved", "one moved")):
        found = answer["neighbours"][name]
        more = f"  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        rows.append((words, "  ".join(map(_written, found[:_LISTED])) + more or "none"))
    return _pairs(rows)


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _written(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
