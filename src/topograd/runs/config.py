"""The settings of a training run, and the three presets.

A run's `config.toml` is this dataclass, so that a run can be opened, resumed and evaluated from its folder.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from topograd.errors import ConfigError
from topograd.nn.gpt import GPTConfig
from topograd.nn.interface import SegmentInterface
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.training.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained, on what, how, and for how long."""

    partition: str = "L"
    """Layers per stage, as "2,2,2"; "L" or the number of layers alone is backprop."""
    stage_heads: Literal["shared", "per-stage"] = "shared"
    """One head for all stages, or one more for each."""
    objective: Literal["cross-entropy", "residual"] = "cross-entropy"
    """What every stage is asked; residual corrects the sum of the stages before."""
    transmissivity: float = 0.0
    """How much gradient crosses a boundary: 0 stops it, 1 is hierarchical training."""
    bus: Literal["live", "detached"] = "live"
    """Whether later stages train the embedding through x0."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the stages' losses become one."""
    interface: str | None = None
    """Join the parts of the partition by bounded interfaces, as "S=8,r=8,pool=tail": gradient crosses them,
    and only the last part has a loss."""
    steps: int = 2500
    """Length of the schedule."""
    batch: int = 8
    """Sequences in a step."""
    accumulate: int = 1
    """Batches whose gradients add up before a step."""
    seed: int = 0
    data: str | None = None
    """A text file, a JSONL file or a folder of them; nothing means the embedded corpus."""
    tokenizer: Literal["bytes", "bpe"] = "bpe"
    eval_every: int = 250
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_bytes: int = 200_000
    """Held-out bytes that an evaluation reads."""
    save_every: int = 250
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Checkpoints that are kept."""
    bf16: bool = False
    """Compute in bfloat16 where autocast allows it."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    device: str = "cpu"
    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("keep", 1), ("eval_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("eval_every", "save_every", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2^63")
        self.topology()

    def topology(self) -> Topology:
        """The stage DAG that these settings name."""
        partition = str(self.model.layers) if self.partition.strip() in ("L", "l") else self.partition
        configuration = Configuration.parse(partition, heads=self.stage_heads)
        if configuration.composition.layers != self.model.layers:
            raise ConfigError(
                f"partition {self.partition} has {configuration.composition.layers} layers and the model has "
                f"{self.model.layers}; give parts that add up to {self.model.layers}"
            )
        if self.interface is not None:
            self._check_interface(configuration)
            return Topology.regions(configuration.composition)
        return Topology.chain(
            configuration,
            transmissivity=self.transmissivity,
            objective=self.objective,
            bus=self.bus,
            reduction=self.reduction,
        )

    def _check_interface(self, configuration: Configuration) -> None:
        """Whether the interface fits the rest."""
        assert self.interface is not None
        SegmentInterface.parse(self.interface).segment(self.model.context)
        if configuration.composition.stages < 2:
            raise ConfigError(
                f"partition {self.partition} is one region, so no interface joins it to another; "
                "give --partition at least two parts"
            )
        for name, only in (("stage_heads", "shared"), ("objective", "cross-entropy"), ("bus", "live")):
            if getattr(self, name) != only:
                raise ConfigError(f"{name} is {getattr(self, name)}; with an interface it must be {only}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The settings that `as_dict` gave, read back from TOML."""
        config = _build(cls, values, "")
        assert isinstance(config, TrainConfig)
        return config


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from nested mappings; lists become tuples, absent keys take the default."""
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown setting {where}{unknown[0]}; known are {', '.join(sorted(known))}")
    settings: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        if is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"setting {where}{name} is {value!r}; it must be a table")
            settings[name] = _build(hint, value, f"{where}{name}.")  # type: ignore[arg-type]
        else:
            settings[name] = _checked(hint, value, f"{where}{name}")
    return kind(**settings)


def _checked(hint: Any, value: Any, name: str) -> Any:
    """`value` if it fits the annotation, with lists as tuples and whole numbers as floats where asked."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        origin = get_origin(option)
        if origin is Literal and value in get_args(option):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if origin is None and isinstance(option, type) and type(value) is option:
            return value
    raise ConfigError(f"setting {name} is {value!r}; it must be {hint}")


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


PRESETS: Mapping[str, Callable[[], TrainConfig]] = {"tiny": tiny, "small": small, "base": base}


def preset(name: str, **changes: Any) -> TrainConfig:
    """The preset called `name`, with some settings replaced."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return replace(PRESETS[name](), **changes)
