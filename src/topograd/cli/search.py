"""`topograd search`: choose where gradients stop. By costs, by learning, by surgery, or by a Pareto study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import Json, note, number, out, parse_one_of, print_json
from topograd.cli.progress import counted, training_progress
from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig, preset
from topograd.search.candidates import Space
from topograd.search.dynamic import best_partition, parse_costs, stage_counts
from topograd.search.pareto import ParetoConfig, Tried, explore
from topograd.search.soft import SoftConfig, learn_boundaries
from topograd.search.surgery import Operation, SurgeryConfig, train_with_surgery
from topograd.search.trained import as_runs, named_objectives

Preset = Literal["tiny", "small", "base"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model that is searched, and how long it trains. What is left out is the preset's."""

    preset: Preset = "tiny"
    """tiny takes seconds, small minutes, base hours."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    """Attention heads."""
    context: int | None = None
    steps: int | None = None
    batch: int | None = None
    eval_bytes: int | None = None
    """Held-out bytes that an evaluation reads."""
    data: str | None = None
    """A text file, a JSONL file or a folder of them; nothing means the embedded corpus."""
    seed: int = 0
    device: str = "cpu"

    def config(self, **more: Any) -> TrainConfig:
        """The settings of a training, with `more` of them changed."""
        base = preset(self.preset)
        shape = {n: getattr(self, n) for n in ("layers", "width", "heads", "context")}
        model = replace(base.model, **{n: v for n, v in shape.items() if v is not None})
        given = {n: getattr(self, n) for n in ("steps", "batch", "eval_bytes", "data")}
        given = {n: v for n, v in given.items() if v is not None}
        return replace(base, model=model, seed=self.seed, device=self.device, **given, **more)


@dataclass(frozen=True, kw_only=True)
class Dp:
    """The cheapest partition for given costs of its stages."""

    layers: int
    costs: Path
    """JSON: {"a,b": cost of a stage of layers a+1..b, ...}."""
    stages: int | None = None
    """Exactly this many stages; by default as many as are cheapest."""
    min_stages: int = 1
    max_stages: int | None = None
    min_depth: int = 1
    """No stage has fewer layers."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Soft:
    """Learn where the boundaries are, together with the weights."""

    size: Annotated[Size, tyro.conf.arg(name="")] = field(default_factory=Size)
    soft: Annotated[SoftConfig, tyro.conf.arg(name="")] = field(default_factory=SoftConfig)
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Surgery:
    """Train under a partition and change one of its boundaries every so often."""

    partition: str = "L"
    """The partition at first, as 2,2; L is one stage."""
    stage_heads: Literal["shared", "per-stage"] = "per-stage"
    size: Annotated[Size, tyro.conf.arg(name="")] = field(default_factory=Size)
    surgery: Annotated[SurgeryConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: SurgeryConfig(every=20)
    )
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """Train many configurations, stop the poor ones early, and keep the front. Call again to go on."""

    out: Path
    """The study's folder; pareto.html there shows the front."""
    objectives: tuple[str, ...] = ("bpb", "gradient_depth")
    """Among bpb, prefix_bpb, calibration, gradient_depth, activation_layers, projections,
    pipeline_granularity, capability."""
    min_depth: int = 1
    """No stage has fewer layers."""
    max_stages: int | None = None
    stage_heads: tuple[Literal["shared", "per-stage"], ...] = ("shared", "per-stage")
    """Head structures to choose from."""
    objective: tuple[Literal["cross-entropy", "residual"], ...] = ("cross-entropy",)
    """Objectives of the stages to choose from."""
    size: Annotated[Size, tyro.conf.arg(name="")] = field(default_factory=Size)
    study: Annotated[ParetoConfig, tyro.conf.arg(name="")] = field(default_factory=ParetoConfig)
    json: Json = False


_WAYS: dict[str, type[Dp | Soft | Surgery | Pareto]] = {
    "dp": Dp,
    "soft": Soft,
    "surgery": Surgery,
    "pareto": Pareto,
}


def run(argv: list[str]) -> int:
    """Search in one way and return the exit code."""
    asked = parse_one_of(_WAYS, argv, "search")
    match asked:
        case Dp():
            answer = _dp(asked)
            table = _pairs([("partition", _written(answer["partition"])), ("cost", f"{answer['cost']:g}")])
        case Soft():
            answer = _soft(asked)
            table = _soft_table(answer)
        case Surgery():
            answer = _surgery(asked)
            table = _surgery_table(answer)
        case Pareto():
            answer = _pareto(asked)
            table = _pareto_table(answer)
    if asked.json:
        print_json(answer)
    else:
        out().print(table)
    return 0


def _dp(asked: Dp) -> dict[str, Any]:
    stage_counts(asked.layers, asked.stages, asked.min_stages, asked.max_stages, asked.min_depth)
    try:
        values = json.loads(asked.costs.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{asked.costs} cannot be read ({problem.strerror}); give a JSON file") from None
    except ValueError as problem:
        raise ConfigError(f'{asked.costs} is not JSON ({problem}); write {{"0,1": 2.5, ...}}') from None
    found = best_partition(
        parse_costs(values, asked.layers),
        asked.layers,
        stages=asked.stages,
        min_stages=asked.min_stages,
        max_stages=asked.max_stages,
        min_depth=asked.min_depth,
    )
    return {"partition": list(found.composition.parts), "cost": found.cost}


def _soft(asked: Soft) -> dict[str, Any]:
    progress = counted("soft boundaries: steps")
    found = learn_boundaries(asked.size.config(), asked.soft, lambda step, steps, _: progress(step, steps))
    return {
        "partition": list(found.composition.parts),
        "transmissivities": found.transmissivities,
        "expected_boundaries": found.expected_boundaries,
        "multiplier": found.multiplier,
        "losses": found.losses,
        "bpb": found.readings["bpb"],
    }


def _surgery(asked: Surgery) -> dict[str, Any]:
    config = asked.size.config(partition=asked.partition, stage_heads=asked.stage_heads)
    with training_progress("surgery", config.batch * config.model.context) as on_step:
        found = train_with_surgery(
            config, asked.surgery, lambda step, steps, losses, _: on_step(step, steps, losses, None)
        )
    return {
        "partition": list(found.composition.parts),
        "operations": [_told(operation) for operation in found.operations],
        "bpb": found.readings["bpb"],
    }


def _told(operation: Operation) -> dict[str, Any]:
    return asdict(operation) | {
        "before": list(operation.before.parts),
        "after": list(operation.after.parts),
        "merge": {str(i): value for i, value in operation.merge.items()},
        "split": {str(i): value for i, value in operation.split.items()},
    }


def _pareto(asked: Pareto) -> dict[str, Any]:
    from topograd.report.pareto import write_pareto  # matplotlib: most of a second that only a study needs

    config = replace(asked.size.config(), steps=asked.study.rungs[-1])
    if asked.size.steps not in (None, config.steps):
        raise ConfigError(
            f"--steps {asked.size.steps} is not the last of the rungs, {config.steps}; leave it out"
        )
    choices = {"stage_heads": asked.stage_heads, "objective": asked.objective}
    space = Space(config.model.layers, asked.min_depth, asked.max_stages, choices)
    objectives = named_objectives(asked.objectives)
    depth = max(asked.min_depth, 2)
    found = explore(space, objectives, as_runs(config, depth), asked.out, asked.study, _say)
    record = {"trials": [_row(tried) for tried in found], "objectives": objectives, "space": len(space)}
    page = write_pareto(asked.out / "pareto.html", record)
    note(f"page: {page.resolve()}")
    return {**record, "page": str(page)}


def _say(tried: Tried) -> None:
    values = ", ".join(f"{name} {value:.4g}" for name, value in tried.values.items())
    note(f"trial {tried.number}: {tried.candidate.key}, {tried.state} at step {tried.steps}: {values}")


def _row(tried: Tried) -> dict[str, Any]:
    return {
        "number": tried.number,
        "partition": list(tried.candidate.composition.parts),
        "settings": dict(tried.candidate.settings),
        "steps": tried.steps,
        "values": tried.values,
        "state": tried.state,
        "on_front": tried.on_front,
    }


def _soft_table(answer: Mapping[str, Any]) -> Table:
    rows = [
        ("partition", _written(answer["partition"])),
        ("transmissivity after each layer", "  ".join(number(x, 2) for x in answer["transmissivities"])),
        ("expected boundaries", number(answer["expected_boundaries"], 2)),
        ("BPB of the last stage", number(answer["bpb"]["last"], 3)),
    ]
    return _pairs(rows)


def _surgery_table(answer: Mapping[str, Any]) -> Table:
    table = Table(title=f"partition {_written(answer['partition'])}", title_justify="left")
    for column in ("step", "before", "after", "J", "gain"):
        table.add_column(column, justify="left" if column in ("before", "after") else "right")
    for done in answer["operations"]:
        after = _written(done["after"]) if done["after"] != done["before"] else "as it is"
        words = (_written(done["before"]), after, number(done["utility"]), number(done["gain"]))
        table.add_row(str(done["step"]), *words)
    return table


def _pareto_table(answer: Mapping[str, Any]) -> Table:
    names = list(answer["objectives"])
    table = Table(title=f"{len(answer['trials'])} of {answer['space']}", title_justify="left")
    for column in ("partition", "settings", "steps", *names, "front"):
        table.add_column(column, justify="left" if column in ("partition", "settings") else "right")
    for row in answer["trials"]:
        values = [number(row["values"].get(name), 3) for name in names]
        settings = " ".join(row["settings"].values())
        front = "yes" if row["on_front"] else ""
        table.add_row(_written(row["partition"]), settings, str(row["steps"]), *values, front)
    return table


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _written(parts: Sequence[int]) -> str:
    return ",".join(map(str, parts))
