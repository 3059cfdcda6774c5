"""`topograd search`: choose where gradients stop. By costs, by learning, by surgery, by a Pareto study, or
among runs that are trained."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from topograd.cli.console import Json, make_folder, note, parse_one_of, show
from topograd.cli.flags import resumes
from topograd.errors import ConfigError
from topograd.files import read_json
from topograd.limits import BYTES, DEPTH, REPEATS, SEED, SIZE, check_numbers
from topograd.runs.config import TrainConfig, preset
from topograd.runs.search_config import SoftConfig, SurgeryConfig
from topograd.search.settings import ParetoConfig

if TYPE_CHECKING:
    from topograd.runs.folder import Run
    from topograd.search.candidates import Space
    from topograd.search.pareto import Tried

Preset = Literal["tiny", "small", "base"]
Deployment = Literal["datacenter", "on-device", "serving", "modular"]
BATCHES = 8
"""Steps of a probe of `search dp`, if not given."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model that is searched, and how long it trains. What is left out is the preset's."""

    preset: Preset = "tiny"
    """tiny takes seconds, small minutes, base hours."""
    layers: int | None = None
    """Layers of the model."""
    width: int | None = None
    """Numbers in the hidden state of a token."""
    heads: int | None = None
    """Attention heads."""
    context: int | None = None
    """Positions that the model sees."""
    steps: int | None = None
    """Length of the schedule."""
    batch: int | None = None
    """Sequences in a step."""
    eval_bytes: int | None = None
    """Held-out bytes that an evaluation reads."""
    data: str | None = None
    """A text file, a JSONL file or a folder of them; nothing means the embedded corpus."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    device: str = "cpu"
    """Where torch computes: cpu, cuda, mps."""

    def __post_init__(self) -> None:
        check_numbers(self, layers=DEPTH, width=SIZE, heads=SIZE, context=SIZE, batch=SIZE)
        check_numbers(self, steps=REPEATS, eval_bytes=BYTES, seed=SEED)

    def config(self, **more: Any) -> TrainConfig:
        """The settings of a training, with `more` of them changed."""
        base = preset(self.preset)
        shape = {n: getattr(self, n) for n in ("layers", "width", "heads", "context")}
        model = base.model.changed(**{n: v for n, v in shape.items() if v is not None})
        given = {n: getattr(self, n) for n in ("steps", "batch", "eval_bytes", "data")}
        given = {n: v for n, v in given.items() if v is not None}
        return base.changed(model=model, seed=self.seed, device=self.device, **given, **more)


_Size = Annotated[Size, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Dp:
    """The cheapest partition, for the stage costs of a file or for those that short probes find on a run."""

    run: Path | None = None
    """A trained run, whose stage costs are probed on its own text."""
    costs: Path | None = None
    """JSON: {"a,b": cost of a stage of layers a+1..b, ...}; give --layers too."""
    layers: int | None = None
    """Layers that the costs are of."""
    stages: int | None = None
    """Exactly this many stages; by default as many as are cheapest."""
    min_stages: int = 1
    """At least this many stages."""
    max_stages: int | None = None
    """At most this many stages."""
    min_depth: int = 1
    """No stage has fewer layers."""
    batches: int | None = None
    """With --run: training steps of each probe; 8 if not given."""
    seed: int | None = None
    """With --run: of the order of the probes' text; 0 if not given."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, batches=REPEATS, seed=SEED)
        if (self.run is None) == (self.costs is None):
            raise ConfigError("give either --run, a trained run, or --costs, a JSON file, with --layers")
        if self.costs is not None and self.layers is None:
            raise ConfigError("--costs needs --layers too, the number of layers that the costs are of")
        for name in ("layers",) if self.costs is None else ("batches", "seed"):
            if getattr(self, name) is not None:
                other = "--run, which has its own" if self.costs is None else "--costs, which need no probes"
                raise ConfigError(f"--{name} was given with {other}", remedy="leave it out")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What searches have in common that are runs and can be resumed."""

    kind: ClassVar[str]
    out: Path | None = None
    """The run's folder; by default a new one in runs/."""
    resume: Path | None = None
    """Continue the run in this folder; its settings stay as they are."""
    size: _Size = field(default_factory=Size)
    json: Json = False

    def __post_init__(self) -> None:
        self.base()  # says what cannot be while flags are read

    def base(self) -> TrainConfig:
        """The settings of the training."""
        return self.size.config()


@dataclass(frozen=True, kw_only=True)
class Soft(Searched):
    """Learn where the boundaries are, together with the weights, as a run that can be resumed."""

    kind: ClassVar[str] = "soft"
    soft: Annotated[SoftConfig, tyro.conf.arg(name="")] = field(default_factory=SoftConfig)

    def config(self) -> TrainConfig:
        """The settings of the run."""
        from topograd.search.soft import soft_run

        return soft_run(self.base(), self.soft)


@dataclass(frozen=True, kw_only=True)
class Surgery(Searched):
    """Train and change a boundary every so often, as a run that can be resumed."""

    kind: ClassVar[str] = "surgery"
    partition: str = "L"
    """The partition at first, as 2,2; L is one stage."""
    stage_heads: Literal["shared", "per-stage", "low-rank"] = "per-stage"
    """One head for all stages, or one more for each, whole or of low rank."""
    surgery: Annotated[SurgeryConfig, tyro.conf.arg(name="")] = field(default_factory=SurgeryConfig)

    def base(self) -> TrainConfig:
        return self.size.config(partition=self.partition, heads=self.stage_heads)

    def config(self) -> TrainConfig:
        """The settings of the run."""
        from topograd.search.surgery import surgery_run

        return surgery_run(self.base(), self.surgery)


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """Train many configurations, stop the poor ones early, and keep the front. Call again to go on."""

    out: Path
    """The study's folder; pareto.html there shows the front."""
    objectives: tuple[str, ...] = ("bpb", "gradient_depth")
    """Properties by name, as bpb, coupling, head, capability, bandwidth, calibration, prefix_bpb, peak_bytes,
    or package.module:attribute of your own; max:NAME makes it large."""
    min_depth: int = 1
    """No stage has fewer layers."""
    max_stages: int | None = None
    """No partition has more stages."""
    graph: tuple[Literal["chain", "forest"], ...] = ("chain",)
    """Graphs to choose from: stages in sequence, or each a branch from the input."""
    stage_heads: tuple[Literal["shared", "per-stage", "low-rank"], ...] = ("shared", "per-stage")
    """Head structures to choose from."""
    objective: tuple[str, ...] = ("cross-entropy",)
    """Objectives of the stages to choose from: cross-entropy, residual, z-loss, or your own."""
    relay: tuple[str, ...] = ("identity",)
    """Relays to choose from: identity, pre-norm, gate, residual-gate, low-rank, linear, sigmoid."""
    source: tuple[str, ...] = ("none",)
    """Input buses to choose from: none, embedding, or layer:N for an early layer."""
    join: tuple[str, ...] = ("identity",)
    """How an input bus is joined, to choose from: identity, or one of the relays."""
    decoder: tuple[int, ...] = (0,)
    """Numbers of layers of private decoders to choose from."""
    grad_scale: tuple[float, ...] = (0.0,)
    """λ of every boundary to choose from: 0 cuts the gradient, 1 lets all of it through."""
    grad_delay: tuple[int, ...] = (0,)
    """Steps after which that gradient arrives, to choose from."""
    grad_bits: tuple[int, ...] = (32,)
    """Bits of its numbers to choose from: 32, 16, 8, 4, 3."""
    size: _Size = field(default_factory=Size)
    study: Annotated[ParetoConfig, tyro.conf.arg(name="")] = field(default_factory=ParetoConfig)
    json: Json = False

    def __post_init__(self) -> None:
        from topograd.search.properties import named_objectives

        named_objectives(self.objectives)
        self.config()
        self.space()

    def config(self) -> TrainConfig:
        """The settings that all candidates share; the last rung is the whole schedule."""
        if self.size.steps not in (None, self.study.rungs[-1]):
            last = self.study.rungs[-1]
            raise ConfigError(
                f"--steps {self.size.steps} is not the last of the rungs, {last}",
                remedy="leave it out, and give the steps of a training with --rungs",
            )
        return replace(self.size.config(), steps=self.study.rungs[-1])

    def space(self) -> Space:
        """The candidates; settings of which there is only the default are left out of them."""
        from topograd.search.candidates import DEFAULTS, Space

        config = self.config()
        given = {"graph": self.graph, "heads": self.stage_heads, "objective": self.objective}
        given |= {"relay": self.relay, "source": self.source, "join": self.join}
        for name in ("decoder", "grad_scale", "grad_delay", "grad_bits"):
            given[name] = tuple(f"{value:g}" for value in getattr(self, name))
        choices = {name: values for name, values in given.items() if values != (DEFAULTS.get(name),)}
        space = Space(config.model.layers, self.min_depth, self.max_stages, choices)
        used: set[tuple[str, str]] = set()
        for candidate in space.samples():
            replace(config, topology=candidate.topology(config.topology))
            used |= candidate.settings.items()
        for name, values in choices.items():
            for value in values:
                if (name, value) not in used:
                    raise ConfigError(
                        f"{name} may be {value}, which nothing uses in this space",
                        setting=name,
                        given=value,
                        remedy="let what it acts on be chosen too, or leave it out",
                    )
        return space


@dataclass(frozen=True, kw_only=True)
class Choose:
    """Rank trained runs by their measured utility J for a deployment; less is better."""

    folders: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR [DIR ...]")]]
    """The runs' folders."""
    deployment: Deployment
    """What the weights of J are: datacenter (bits per byte alone), on-device, serving or modular."""
    properties: tuple[str, ...] = ()
    """More properties to measure, by name or as package.module:attribute of your own."""
    json: Json = False

    def __post_init__(self) -> None:
        from topograd.search.properties import PROPERTIES

        for name in self.properties:
            PROPERTIES.check(name)


_WAYS: dict[str, type[Dp | Soft | Surgery | Pareto | Choose]] = {
    "dp": Dp,
    "soft": Soft,
    "surgery": Surgery,
    "pareto": Pareto,
    "choose": Choose,
}


def run(argv: list[str]) -> int:
    resumes(argv)
    args = parse_one_of(_WAYS, argv, "search")
    from topograd.cli import search_tables as tables

    code = 0
    match args:
        case Dp():
            answer, table = _dp(args), tables.dp_table
        case Soft():
            (answer, code), table = _searched(args), tables.soft_table
        case Surgery():
            (answer, code), table = _searched(args), tables.surgery_table
        case Pareto():
            answer, table = _pareto(args), tables.pareto_table
        case Choose():
            answer, table = _choose(args), tables.choice_table
    show(args.json, answer, table)
    return code


def _dp(args: Dp) -> dict[str, Any]:
    from topograd.search.dynamic import best_partition, parse_costs, stage_counts

    request = {name: getattr(args, name) for name in ("stages", "min_stages", "max_stages", "min_depth")}
    if args.costs is not None:
        assert args.layers is not None
        stage_counts(args.layers, **request)
        layers, costs = args.layers, parse_costs(read_json(args.costs, ConfigError), args.layers)
        more: dict[str, Any] = {}
    else:
        layers, costs, more = _probed(args, request)
    found = best_partition(costs, layers, **request)
    return {"partition": list(found.composition.parts), "cost": found.cost, **more}


def _probed(args: Dp, request: Mapping[str, Any]) -> tuple[int, dict[tuple[int, int], float], dict[str, Any]]:
    from topograd.cli.progress import work_progress
    from topograd.runs.session import open_session
    from topograd.search.dynamic import stage_counts
    from topograd.search.stage_costs import costs_of_run

    assert args.run is not None
    session = open_session(args.run)
    layers = session.config.model.layers
    stage_counts(layers, **request)
    batches, seed = args.batches or BATCHES, args.seed or 0
    with work_progress(f"probing the stages of {args.run.name}") as on_probe:
        costs = costs_of_run(session, batches, seed, args.min_depth, on_probe)
    written = {f"{a},{b}": cost for (a, b), cost in costs.items()}
    about = {"run": str(session.run.folder), "steps": session.step, "batches": batches, "seed": seed}
    return layers, costs, about | {"costs": written}


def _searched(args: Soft | Surgery) -> tuple[dict[str, Any], int]:
    """Train a run that searches, or go on with one, and say what it found."""
    from topograd.cli.progress import say_how_to_resume, training_progress
    from topograd.cli.results import stored_results
    from topograd.cli.train import fresh_folder
    from topograd.runs.folder import Run
    from topograd.runs.session import read_settings
    from topograd.training.runs import resume, start

    if args.resume is None:
        config = args.config()
        trainer = start(config, args.out or fresh_folder(f"{args.size.preset}-{args.kind}", config))
        results = None
    else:
        run = Run.open(args.resume)
        config = read_settings(run)
        if config.search.kind != args.kind:
            raise ConfigError(
                f"{args.resume} is no run of search {args.kind}",
                remedy=(f"continue it with: topograd train --resume {shlex.quote(str(args.resume))}"),
            )
        results = stored_results(run)
        if results is not None and results.get("finished"):
            return _outcome(run, results), 0
        trainer = resume(args.resume)
    tokens = config.batch * config.accumulate * config.model.context
    with training_progress(trainer.task.run.folder.name, tokens) as on_step:
        results = trainer.train(on_step=on_step)
    again = f"topograd search {args.kind} --resume {shlex.quote(str(trainer.task.run.folder))}"
    code = say_how_to_resume(results, config.steps, again)
    return _outcome(trainer.task.run, results), code


def _outcome(run: Run, results: dict[str, Any]) -> dict[str, Any]:
    """What the newest checkpoint of a search knows, beside the results of its run."""
    from topograd.runs.session import read_settings, topology_at
    from topograd.search.soft import soft_outcome
    from topograd.search.surgery import surgery_outcome

    extra = run.store.extra(run.store.names()[-1])
    config = topology_at(read_settings(run), extra)
    found: Callable[..., dict[str, Any]] = soft_outcome if config.search.kind == "soft" else surgery_outcome
    about = {name: results[name] for name in ("run", "steps", "finished", "bpb", "ece")}
    return {**found(config, extra), **about}


def _pareto(args: Pareto) -> dict[str, Any]:
    import hashlib

    from topograd.exec.objectives import OBJECTIVES
    from topograd.files import dump_json
    from topograd.report.pareto import write_pareto
    from topograd.runs.device import usable_device
    from topograd.search.measured import as_runs
    from topograd.search.pareto import explore
    from topograd.search.properties import named_objectives

    for name in args.objective:
        OBJECTIVES.check(name)
    config, space, objectives = args.config(), args.space(), named_objectives(args.objectives)
    if config.data is not None:
        config = replace(config, data=str(Path(config.data).absolute()))
    usable_device(config.device)  # before a study is bound to these settings
    make_folder(args.out)
    base = hashlib.sha256(dump_json(config.as_dict()).encode()).hexdigest()
    train = as_runs(config, list(objectives))

    def on_trial(tried: Tried) -> None:
        values = ", ".join(f"{name} {value:.4g}" for name, value in tried.values.items())
        note(f"trial {tried.number}: {tried.candidate.key}, {tried.state} at step {tried.steps}: {values}")

    found = explore(space, objectives, train, args.out, args.study, on_trial, base)
    record = {"trials": [_row(tried) for tried in found], "objectives": objectives, "space": space.size}
    page = write_pareto(args.out / "pareto.html", record)
    note(f"page: {page.resolve()}")
    return {**record, "page": str(page)}


def _row(tried: Tried) -> dict[str, Any]:
    own = {name: getattr(tried, name) for name in ("number", "steps", "values", "state", "on_front")}
    candidate = tried.candidate
    return own | {"partition": list(candidate.composition.parts), "settings": dict(candidate.settings)}


def _choose(args: Choose) -> dict[str, Any]:
    from dataclasses import asdict

    from topograd.cli.progress import work_progress
    from topograd.cli.results import note_other_data
    from topograd.runs.session import heldout_text, open_session
    from topograd.search.measured import Trained, worth
    from topograd.search.utility import deployment

    if not args.folders:
        raise ConfigError(
            "there is no run to choose", remedy="give folders of some: topograd search choose DIR DIR"
        )
    weights, rows = deployment(args.deployment), []
    sessions = [open_session(folder) for folder in args.folders]  # first: a bad folder costs no waiting
    note_other_data([session.config for session in sessions], "bits per byte")
    with work_progress("measuring") as on_more:
        for done, session in enumerate(sessions, start=1):
            found = worth(Trained.of(session, heldout_text(session)), weights, args.properties)
            stages = [len(planned.layers) for planned in session.plan.stages]
            about = {"run": str(session.run.folder), "partition": stages, "steps": session.step}
            rows.append({**about, "graph": session.config.topology.graph, **found.as_dict()})
            on_more(done, len(sessions))
    rows.sort(key=lambda row: row["utility"])
    return {"deployment": args.deployment, "weights": asdict(weights), "runs": rows}
