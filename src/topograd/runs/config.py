"""The settings of a training run, and the three presets. Nothing here needs torch.

A run's `config.toml` is this dataclass, so that a run can be opened, resumed and evaluated from its folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from topograd.errors import ConfigError, TopologyError
from topograd.limits import MUST_EXIST, check_numbers, check_rules
from topograd.nn.config import MAX_SIZE, GPTConfig
from topograd.nn.interface_config import parse_interfaces
from topograd.nn.spec import ModelSpec, read_spec
from topograd.reading import build_dataclass
from topograd.registry import Registry
from topograd.runs.old_config import upgraded
from topograd.runs.schedule import warmup_stable_warmdown
from topograd.runs.search_config import SoftConfig, SurgeryConfig
from topograd.runs.topology_config import AVERAGE_TEACHER, OWN_TEACHER, TopologyConfig
from topograd.runs.tune_config import BASED, TuneConfig
from topograd.topology.composition import Composition
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VERSION = 3
"""Of `config.toml`; `old_config.py` reads the earlier ones."""
_OF_TEXT = ("tokenizer", "eval_bytes")
"""Settings that say nothing of a network on images."""
_OPTIMIZERS: Registry[Any] = Registry("optimizer")
"""The names alone are checked here; `training/` makes what they stand for."""


@dataclass(frozen=True, kw_only=True)
class StageOptimizer:
    """The optimizer settings of one stage; None takes those of the others."""

    stage: int
    """Counted from 1."""
    name: str | None = None
    rate: float = 1.0
    """What its learning rates are multiplied by."""
    warmup: float | None = None
    warmdown: float | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            _OPTIMIZERS.check(self.name)
        stage, rate = self.stage >= 1, 0 <= self.rate < math.inf
        check_rules(self, stage=(stage, "at least 1"), rate=(rate, "finite and at least 0"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, learning rates by group of parameters, and their schedule."""

    name: str = "muon+adamw"
    """muon+adamw, adamw, sgd, ddc-adam, ddc-muon, or package.module:attribute of your own."""
    lr_matrix: float | None = None
    """Learning rate of the layers' matrices; by default 0.02 with Muon, 0.002 with Adam, 0.1 with SGD."""
    lr_embedding: float = 0.3
    """Learning rate of the embeddings."""
    lr_head: float = 0.02
    """Learning rate of the heads."""
    lr_scalar: float = 0.004
    """Learning rate of gains, gates and biases."""
    lr_relay: float = 0.001
    """Learning rate of relays and interfaces."""
    momentum: float = 0.95
    """Of Muon and of SGD."""
    newton_schulz_steps: int = 5
    """Steps in which Muon makes its step orthogonal."""
    betas: tuple[float, float] = (0.8, 0.95)
    """Decay of Adam's averages."""
    weight_decay: float = 0.0
    """Decoupled decay of the layers' matrices."""
    warmup: float = 0.01
    """Share of the steps in which the learning rate rises."""
    warmdown: float = 0.5
    """Share of the steps, at the end, in which it falls."""
    floor: float = 0.01
    """What it falls to, as a share of the peak."""
    clip: float | None = None
    """Largest norm of the gradients; of each group of stages by itself where no gradient crosses."""
    stages: Annotated[tuple[StageOptimizer, ...], tyro.conf.Suppress] = ()
    """Stages with an optimizer, rates or a schedule of their own."""

    def __post_init__(self) -> None:
        _OPTIMIZERS.check(self.name)
        for name in ("lr_matrix", "lr_embedding", "lr_head", "lr_scalar", "lr_relay", "weight_decay"):
            rate = getattr(self, name)
            check_rules(self, **{name: (rate is None or 0 <= rate < math.inf, "finite and at least 0")})
        two = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check_rules(
            self,
            betas=(two, "two numbers from 0 to below 1"),
            momentum=(0 <= self.momentum < 1, "in 0 to below 1"),
            newton_schulz_steps=(1 <= self.newton_schulz_steps <= 99, "in 1..99"),
            clip=(self.clip is None or 0 < self.clip < math.inf, "positive, or left out"),
        )
        if len({own.stage for own in self.stages}) < len(self.stages):
            raise ConfigError(
                "optimizer.stages names a stage twice", setting="optimizer.stages", remedy="give each once"
            )
        self.multiplier(0, 1)
        for own in self.stages:
            self.of_stage(own).multiplier(0, 1)

    def multiplier(self, step: int, steps: int) -> float:
        """What the learning rates are multiplied by at `step` of `steps`."""
        return warmup_stable_warmdown(step, steps, self.warmup, self.warmdown, self.floor)

    def of_stage(self, own: StageOptimizer) -> OptimizerConfig:
        """These settings with what a stage has of its own, but for its rate, which multiplies the others."""
        given = {n: getattr(own, n) for n in ("name", "warmup", "warmdown", "floor")}
        return replace(self, stages=(), **{n: value for n, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What is searched for while the weights learn (`topograd search soft`, `search surgery`)."""

    kind: Literal["none", "soft", "surgery"] = "none"
    """Nothing, boundaries that harden, or boundaries that are moved."""
    soft: SoftConfig = field(default_factory=SoftConfig)
    """How boundaries are learned."""
    surgery: SurgeryConfig = field(default_factory=SurgeryConfig)
    """When and how boundaries are moved."""


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What a training of text and one on images have in common."""

    topology: Annotated[TopologyConfig, tyro.conf.arg(name="")] = field(default_factory=TopologyConfig)
    """Where gradients flow."""
    steps: int = 2500
    """Length of the schedule."""
    batch: int = 8
    """Sequences or images in a step."""
    accumulate: int = 1
    """Batches whose gradients add up before a step."""
    batch_parts: int = 1
    """Equal parts in which a batch is run one after another: less memory, the gradient of the whole batch."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    eval_every: int = 250
    """Steps between evaluations; 0 evaluates only at the end."""
    save_every: int = 250
    """Steps between checkpoints; 0 saves only at the end."""
    save_seconds: float = 600.0
    """Seconds after which a checkpoint is saved in any case; 0 saves by steps alone."""
    keep: int = 2
    """Checkpoints that are kept."""
    bf16: bool = False
    """Compute in bfloat16 where autocast allows it."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    recompute: bool = False
    """Layers keep their inputs alone and run again in the backward (activation checkpointing): less memory,
    a third more work, the same gradients."""
    device: str = "cpu"
    """Where torch computes: cpu, cuda, mps."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizers and their rates."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CommonConfig):
    """What is trained, on what, how, and for how long."""

    init: str | None = None
    """The model whose weights and tokenizer to begin with: a run, a Hugging Face folder, a GGUF file or
    hf:ORG/NAME; new heads and layers start fresh."""
    data: Annotated[str | None, MUST_EXIST] = None
    """A text file, a JSONL file or a folder of them; nothing means the embedded corpus."""
    tokenizer: Literal["bytes", "bpe", "imported"] = "bpe"
    """Bytes, or byte pairs learned from the text; an imported model brings its own."""
    eval_bytes: int = 200_000
    """Held-out bytes that an evaluation reads."""
    geometry_every: int = 0
    """Steps between readings of the residual stream's geometry; 0 reads none."""
    on_alarm: Literal["none", "report", "skip", "lower", "rollback"] = "none"
    """When loss or gradient norm jump: write it down, leave the step out, lower the rates for a while, or go
    back to the weights of the last checkpoint without an alarm before it."""
    model: ModelSpec = field(default_factory=GPTConfig)
    """The model: its kind, and the settings of that kind."""
    tune: Annotated[TuneConfig, tyro.conf.arg(name="")] = field(default_factory=TuneConfig)
    """Which parameters learn, where a run begins with another one."""
    search: Annotated[SearchConfig, tyro.conf.Suppress] = field(default_factory=SearchConfig)
    """What is searched for while the weights learn."""

    def __post_init__(self) -> None:
        some, any_ = (1, MAX_SIZE), (0, MAX_SIZE)
        check_numbers(self, steps=some, batch=some, accumulate=some, batch_parts=some, keep=some)
        check_numbers(self, eval_bytes=some, eval_every=any_, save_every=any_, geometry_every=any_)
        data, init = self.data is None or self.data.strip(), self.init is None or self.init.strip()
        check_rules(
            self,
            batch_parts=(self.batch % self.batch_parts == 0, f"a divisor of batch, which is {self.batch}"),
            save_seconds=(0 <= self.save_seconds < math.inf, "finite and at least 0"),
            on_alarm=(
                self.on_alarm != "rollback" or self.save_every > 0,
                "another action without save_every",
            ),
            seed=(0 <= self.seed < 2**63, "at least 0 and below 2^63"),
            data=(bool(data), "a file or a folder, or left out for the embedded corpus"),
            init=(bool(init), "the folder of a run, or left out"),
        )
        if self.model.task != "text":
            self._check_no_next_token()
        if self.model.task == "images" and self.data is None:
            raise ConfigError(
                "data is missing",
                setting="data",
                remedy="give a folder of IDX or CIFAR binary files, or digits",
            )
        self._check_tune()
        topology = self.build_topology()
        self._check_edges(topology)
        if self.topology.interface is not None:
            self._check_interface(self.topology.interface)
        taught = any(stage.objective == "distillation" and stage.weight > 0 for stage in topology.stages)
        if taught and self.topology.teacher is None:
            raise ConfigError(
                "the objective distillation needs a teacher",
                setting="teacher",
                remedy=f"give the folder of a run, {OWN_TEACHER} or {AVERAGE_TEACHER}",
            )
        if self.batch_parts > 1 and any(stage.every > 1 for stage in topology.stages):
            raise ConfigError(setting="batch_parts", given=self.batch_parts, allowed="1 with loss_every")
        for own in self.optimizer.stages:
            if own.stage > len(topology.stages):
                raise ConfigError(
                    setting="optimizer.stages.stage",
                    given=own.stage,
                    allowed=f"at most {len(topology.stages)}, the stages of the topology",
                )

    def _check_edges(self, topology: Topology) -> None:
        """There are edges for what is said of all, and every stage learns from some batch before the end."""
        for name in ("grad_delay", "grad_bits"):
            given, alone = getattr(self.topology, name), len(topology.stages) == 1
            if given not in (0, 32) and alone and self.search.kind == "none":  # a search may merge stages
                remedy = "give a partition of several stages, or leave it out"
                problem = f"{name} is {given} and there is one stage"
                raise ConfigError(problem, setting=name, given=given, remedy=remedy)
        lateness = Plan.of(topology, topology.layers).lateness
        if (latest := max(lateness)) >= self.steps:
            stage = lateness.index(latest) + 1
            allowed = f"above {latest}, since stage {stage} learns from a batch {latest} steps later"
            remedy = "give more steps, or a shorter delay"
            raise ConfigError(setting="steps", given=self.steps, allowed=allowed, remedy=remedy)

    def _check_interface(self, interface: str) -> None:
        if self.model.kind in ("mlp", "vgg", "resnet", "resnet20", "forward-forward"):
            raise ConfigError(
                setting="interface",
                given=interface,
                allowed="with a network whose layers all have the shape of the embedding, as vit",
            )
        for settings in parse_interfaces(interface):
            settings.check(self.model.context, self.model.width)

    def _check_no_next_token(self) -> None:
        """Refuse what goes only with models that predict the next token."""
        for name, given in (
            ("search", self.search.kind != "none"),
            ("teacher_top", bool(self.topology.teacher_top)),
            *((name, bool(getattr(self.tune, name))) for name in BASED),
        ):
            if given:
                raise ConfigError(
                    f"{name} is for models of the next token, and model.kind is {self.model.kind}",
                    setting=name,
                    remedy="leave it out",
                )

    def _check_tune(self) -> None:
        """What stays as it was in a base needs one, and a plain way of training."""
        tune = self.tune
        if tune.seq_len is not None and tune.seq_len > self.model.context:
            raise ConfigError(
                setting="seq_len",
                given=tune.seq_len,
                remedy=f"the model's context is {self.model.context}: give at most that",
            )
        partial = [name for name in BASED if getattr(tune, name)]
        if partial and self.init is None:
            raise ConfigError(
                setting=partial[0],
                given=getattr(tune, partial[0]),
                remedy="it needs a model to begin with: give init",
            )
        if partial and (self.search.kind != "none" or self.topology.decoder):
            raise ConfigError(
                f"{partial[0]} is given with a search or private decoders, which change the model",
                setting=partial[0],
                given=getattr(tune, partial[0]),
            )
        formless = {"lora_rank": tune.lora_rank, "layer_dropout": tune.layer_dropout, "bf16": self.bf16}
        for name, given in formless.items():
            if given and self.topology.jacobian == "pullback":
                raise ConfigError(
                    setting="jacobian",
                    given="pullback",
                    allowed=f"loop with {name}, which it has no formula for",
                )

    def build_topology(self) -> Topology:
        """The stage DAG that these settings name."""
        layers = self.model.layers
        if self.model.task == "images" and self.topology.graph == "forest":  # each branch is its own network
            layers = sum(Composition.parse(branch).layers for branch in self.topology.branches)
        topology = self.topology.build(layers)
        try:
            return self.tune.applied(topology)
        except TopologyError as error:
            raise ConfigError(str(error), setting=error.setting, given=error.given) from None

    @property
    def seq_len(self) -> int:
        """Tokens in a training sequence."""
        return self.tune.seq_len or self.model.context

    @property
    def brings_tokenizer(self) -> bool:
        """Whether the model was imported with a tokenizer of its own."""
        return self.tokenizer == "imported"

    @property
    def gpt(self) -> GPTConfig:
        """The model's settings, for code that is about a GPT alone."""
        if not isinstance(self.model, GPTConfig):
            raise ConfigError(setting="model.kind", given=self.model.kind, remedy="this needs a gpt")
        return self.model

    def changed(self, **changes: Any) -> TrainConfig:
        """These settings with some replaced; those of the topology may be given by their own names.

        >>> TrainConfig().changed(partition="2,2,2", heads="per-stage", steps=10).topology.partition
        '2,2,2'
        """
        own = {f.name for f in fields(TopologyConfig)}
        table = {name: value for name, value in changes.items() if name in own}
        rest = {name: value for name, value in changes.items() if name not in own}
        if table:
            rest["topology"] = replace(rest.get("topology", self.topology), **table)
        return replace(self, **rest)

    def as_dict(self) -> dict[str, Any]:
        rest = {f.name: getattr(self, f.name) for f in fields(self)}
        rest["model"] = self.model.to_dict()
        tables = (name for name, value in rest.items() if is_dataclass(value))
        values = {"version": VERSION, **rest, **{name: asdict(rest[name]) for name in tables}}
        if self.model.task == "images":
            for name in _OF_TEXT:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The settings that `as_dict` gave, read back from TOML; those of earlier versions too."""
        version = values.get("version", 1)
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ConfigError(setting="version", given=version, allowed=f"in 1..{VERSION}")
        rest = {name: value for name, value in upgraded(values, version).items() if name != "version"}
        model = rest.pop("model", {})
        if not isinstance(model, Mapping):
            raise ConfigError(setting="model", given=model, allowed="a table")
        config: TrainConfig = build_dataclass(cls, rest, given={"model": read_spec(model)})
        return config

    def overlaid(self, values: Mapping[str, Any]) -> TrainConfig:
        """These settings with some parts of a config file laid over them, table by table."""
        version = values.get("version", VERSION)
        if version != VERSION:
            raise ConfigError(setting="version", given=version, allowed=f"{VERSION}")
        below = self.as_dict()
        model = values.get("model", {})
        if isinstance(model, Mapping) and model.get("kind", self.model.kind) != self.model.kind:
            below["model"] = {}  # another kind has other settings
        return TrainConfig.from_dict(_without_none(_merged(below, values)))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with what is above where both have it; tables within them likewise."""
    merged = dict(below)
    for name, value in above.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _merged(before, value)
        merged[name] = value
    return merged


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def tiny() -> TrainConfig:
    """Four layers on bytes: seconds. For tests and first steps."""
    return TrainConfig(
        steps=80,
        batch=8,
        tokenizer="bytes",
        eval_every=0,
        eval_bytes=20_000,
        save_every=20,
        model=GPTConfig(layers=4, width=64, heads=2, vocab=257, context=64, head_std=0.0),
    )


def small() -> TrainConfig:
    """The demo: six layers, about four minutes on one core."""
    return TrainConfig(
        steps=1200,
        eval_every=300,
        eval_bytes=120_000,
        model=GPTConfig(head_std=0.0),
    )


def base() -> TrainConfig:
    """Eight layers of width 256: about 2.5 s a step on two cores, so 14 hours; meant for a GPU."""
    return TrainConfig(
        steps=20_000,
        batch=16,
        eval_every=1000,
        save_every=500,
        model=GPTConfig(layers=8, width=256, heads=8, vocab=2048, context=256, head_std=0.0),
    )


def tuning(config: TrainConfig, small: bool = False, held: bool = False) -> TrainConfig:
    """Settings for fine-tuning a trained model: AdamW at small learning rates, short sequences, 200 steps.

    The rates of the presets are for random weights and would undo what a trained model knows. A `small` part
    that is learned beside it (LoRA, exits) takes higher ones, and LoRA with `held` directions still higher.
    """
    rate = 1e-2 if held else 1e-3 if small else 5e-5
    optimizer = OptimizerConfig(
        name="adamw",
        lr_matrix=rate,
        lr_embedding=rate,
        lr_head=rate,
        lr_scalar=rate,
        betas=(0.9, 0.95),
        warmup=0.05,
        clip=1.0,
    )
    tune = replace(config.tune, seq_len=min(256, config.model.context))
    changed = replace(config, optimizer=optimizer, tune=tune, steps=200, batch=4)
    return replace(changed, eval_bytes=20_000, eval_every=0, save_every=50)


PRESETS: Mapping[str, Callable[[], TrainConfig]] = {"tiny": tiny, "small": small, "base": base}


def preset(name: str, **changes: Any) -> TrainConfig:
    """The preset called `name`, with some settings changed (`TrainConfig.changed`)."""
    if name not in PRESETS:
        raise ConfigError(setting="preset", given=name, allowed=f"one of {', '.join(PRESETS)}")
    return PRESETS[name]().changed(**changes)
