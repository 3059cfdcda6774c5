"""Forms of bounded interfaces by name, and their settings in words. Imports no torch.

A form is written FORM:KEY=VALUE,..., as `residual:r=8`; without a form's name it is `segments`, as `S=8,r=8`.
A value for each boundary is written with slashes: `residual:r=8/16` is of three regions.

    segments    causal states of segments (`nn/interface.py`), the default
    attention   the same, pooled and read by attention (`nn/attention_interface.py`)
    residual    the hidden state less the canvas, in a subspace (`nn/residual_interface.py`)
    published   the interface of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" as its
                authors wrote it (`nn/published_interface.py`); not causal

One of your own is package.module:attribute:KEY=VALUE,..., the attribute a class as `InterfaceSettings` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, get_args

from topograd.errors import ConfigError
from topograd.registry import Registry

if TYPE_CHECKING:
    from topograd.nn.relays import BoundedRelay

Basis = Literal["fixed", "learned", "hidden", "adjoints"]
Read = Literal["both", "message"]
MIN_RANK = 3
MAX_RANK = 2**20
RANKS = f"at least {MIN_RANK}, for a LayerNorm of fewer numbers passes no gradient, and at most {MAX_RANK}"


class InterfaceSettings(Protocol):
    """What a form of bounded interfaces must have."""

    first_region: ClassVar[int]
    """The first region that reads through a relay of this form: 1, or 0 where the canvas makes a state."""

    @property
    def causal(self) -> bool:
        """Whether no position reads a later one."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings of KEY=VALUE,..."""

    def check(self, context: int, width: int) -> None:
        """Raise ConfigError where it does not fit a model's context and width."""

    def build(self, width: int, context: int, before: BoundedRelay | None) -> BoundedRelay:
        """The relay of one boundary, given the one of the boundary before it."""


INTERFACES: Registry[type[InterfaceSettings]] = Registry(
    "interface",
    {
        "segments": "topograd.nn.config:SegmentInterface",
        "residual": "topograd.nn.interface_config:ResidualInterface",
        "published": "topograd.nn.interface_config:PublishedInterface",
        "attention": "topograd.nn.attention_interface:AttentionInterface",
    },
)


_FORM = ("first_region", "causal", "parse", "check", "build")


def parse_interfaces(text: str, boundaries: int | None = None) -> tuple[InterfaceSettings, ...]:
    """The settings of each boundary, or one of them for all; with `boundaries`, one for each.

    >>> [one.rank for one in parse_interfaces("residual:r=8/16")]
    [8, 16]
    """
    form, colon, settings = _form_and_settings(text)
    parts = [part.split("=", 1) for part in settings.split(",")]
    choices = [part[-1].split("/") for part in parts]
    count = max(map(len, choices))
    uneven = any(len(values) not in (1, count) for values in choices)
    if uneven or (boundaries is not None and count not in (1, boundaries)):
        allowed = "one value, or one for each boundary" + (f": {boundaries}" if boundaries else "")
        raise ConfigError(setting="interface", given=text, allowed=allowed)
    made = []
    for i in range(count):
        values = (values[i if len(values) > 1 else 0] for values in choices)
        words = ("=".join((*part[:-1], value)) for part, value in zip(parts, values, strict=True))
        made.append(parse_interface(form + colon + ",".join(words)))
    check_segments(made)
    return tuple(made) if boundaries is None or count > 1 else tuple(made * boundaries)


def check_segments(settings: Sequence[InterfaceSettings]) -> None:
    """Refuse boundaries that cut the context differently: a state is added to one of other positions."""
    counts = tuple(getattr(one, "segments", None) for one in settings)
    if len(set(counts)) > 1:
        given = "/".join(map(str, counts))
        raise ConfigError(
            f"interface segments S are {given}",
            setting="segments",
            given=given,
            allowed="the same at all boundaries, for a state would tell of later positions",
        )


def parse_interface(text: str) -> InterfaceSettings:
    """The settings of FORM:KEY=VALUE,...

    >>> parse_interface("residual:r=8")
    ResidualInterface(rank=8, basis='fixed', seed=0, bypass=0.0)
    >>> parse_interface("S=4,r=16")
    SegmentInterface(segments=4, rank=16, pool='tail', maps='mlp', causal=True)
    """
    form, _, settings = _form_and_settings(text)
    chosen = INTERFACES[form.strip() or "segments"]
    made: InterfaceSettings | Any = chosen.parse(settings) if hasattr(chosen, "parse") else chosen
    if missing := [name for name in _FORM if not hasattr(made, name)]:
        problem = f"interface {form!r} has no {', '.join(missing)}"
        remedy = "give it all that topograd.nn.interface_config.InterfaceSettings has"
        raise ConfigError(problem, setting="interface", given=form, remedy=remedy)
    return made


def _form_and_settings(text: str) -> tuple[str, str, str]:
    """Form, colon and settings; one of your own may have none."""
    form, colon, settings = text.rpartition(":")
    own = form and form.strip() not in INTERFACES and "=" not in settings
    return (text, ":", "") if own and settings else (form, colon, settings)


def parse_settings(text: str, keys: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    """Fields by name from KEY=VALUE,...; `keys` has the field and the type of each key."""
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in keys:
            problem = f"interface {text!r} has the part {part.strip()!r}"
            remedy = f"write it as S=8,r=8,pool=tail or residual:r=8 with keys from {', '.join(keys)}"
            raise ConfigError(problem, setting="interface", given=text, remedy=remedy)
        name, kind = keys[key]
        if name in settings:
            problem = f"interface {text!r} gives {key} twice"
            raise ConfigError(problem, setting="interface", given=text, remedy="give each key once")
        settings[name] = _value(key, value, kind)
    return settings


def _value(key: str, value: str, kind: type) -> float | str | bool:
    if kind in (int, float):
        try:
            return int(value) if kind is int else float(value)
        except ValueError:
            allowed = "a whole number" if kind is int else "a number"
            raise ConfigError(
                f"interface {key} is {value!r}", setting="interface", given=value, allowed=allowed
            ) from None
    if kind is bool:
        if value.lower() not in ("true", "false"):
            problem = f"interface {key} is {value!r}"
            raise ConfigError(problem, setting="interface", given=value, allowed="true or false")
        return value.lower() == "true"
    return value


def check_fields(interface: InterfaceSettings, **rules: tuple[bool, str]) -> None:
    """Refuse the first field that breaks its rule, which says what is allowed."""
    for name, (held, allowed) in rules.items():
        if not held:
            given = getattr(interface, name)
            problem = f"interface {name} is {given!r}"  # as --seed, a run has settings of these names too
            raise ConfigError(problem, setting=name, given=given, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class ResidualInterface:
    """The shape of interfaces in a subspace of the hidden state."""

    rank: int = 8
    """r, the directions that cross; the model's width makes the dense model."""
    basis: Basis = "fixed"
    """U: fixed is random, orthonormal and the same at every boundary; learned begins there, and each boundary
    has its own; hidden and adjoints take it from the data before the training begins
    (`training/interface_directions.py`)."""
    seed: int = 0
    """Of U."""
    bypass: float = 0.0
    """The share of all other directions that crosses too: 0 bounds the interface, 1 is the dense model."""
    first_region: ClassVar[int] = 1
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(
            self,
            basis=(self.basis in get_args(Basis), f"one of {', '.join(get_args(Basis))}"),
            rank=(self.rank >= 1, "at least 1"),
            seed=(0 <= self.seed < 2**63, "at least 0 and below 2^63"),
            bypass=(0 <= self.bypass <= 1, "in 0 to 1"),
        )

    @classmethod
    def parse(cls, text: str) -> ResidualInterface:
        """The settings of a text such as r=8,basis=learned."""
        keys = {"r": ("rank", int), "basis": ("basis", str), "seed": ("seed", int)}
        return cls(**parse_settings(text, {**keys, "bypass": ("bypass", float)}))

    def check(self, context: int, width: int) -> None:
        check_fields(self, rank=(self.rank <= width, f"at most {width}, the model's width"))

    def build(self, width: int, context: int, before: BoundedRelay | None) -> BoundedRelay:
        from topograd.nn.residual_interface import ResidualRelay

        return ResidualRelay(self, width)


@dataclass(frozen=True, kw_only=True)
class PublishedInterface:
    """The shape of the authors' interfaces: one state of r numbers for a whole sequence."""

    rank: int = 16
    """r, the size of the state."""
    read: Read = "both"
    """What a region reads: the canvas and the state, or the state alone (message). With message at the last
    boundary, the loss sees the sequence through the last state only."""
    first_region: ClassVar[int] = 0
    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            rank=(MIN_RANK <= self.rank <= MAX_RANK, RANKS),
            read=(self.read in get_args(Read), f"one of {', '.join(get_args(Read))}"),
        )

    @classmethod
    def parse(cls, text: str) -> PublishedInterface:
        """The settings of a text such as r=16 or r=16,read=both/message."""
        return cls(**parse_settings(text, {"r": ("rank", int), "read": ("read", str)}))

    def check(self, context: int, width: int) -> None:
        """Any context and width will do."""

    def build(self, width: int, context: int, before: BoundedRelay | None) -> BoundedRelay:
        from topograd.nn.published_interface import FirstPublishedRelay, PublishedRelay

        if before is None:
            return FirstPublishedRelay(self, width)
        start = before.start if isinstance(before, FirstPublishedRelay) else None
        return PublishedRelay(self, width, start)
