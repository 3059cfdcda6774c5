"""Model specs: the settings from which a stack is built, one class a kind of model. Imports no torch.

A run's `[model]` table names its kind and gives the fields of that kind's spec:

    [model]
    kind = "gpt"                        or llama, qwen3, gpt2, ..., mamba2, hybrid, resnet20, hf,
    layers = 6                          or "package.module:MySpec" of your own

A spec of your own is a frozen dataclass that inherits `ModelSpec`, with `layers`, `width`, `vocab` and
`context` as fields or properties, and `build`. Everything else (training, resuming, evaluation, decoding,
serving) uses the capabilities of the stack (`capabilities.py`), never its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from topograd.errors import ConfigError
from topograd.reading import build_dataclass
from topograd.registry import Registry

if TYPE_CHECKING:
    from topograd.nn.stack import Stack
    from topograd.topology.dag import Topology

Task = Literal["text", "masked", "images"]


class ModelSpec:
    """The settings of a model. Subclasses are frozen dataclasses."""

    task: ClassVar[Task] = "text"
    """Next-token prediction on text, prediction of hidden tokens, or classification of images."""
    loads_empty: ClassVar[bool] = False
    """Whether `build` works on the meta device, to be filled by a checkpoint."""

    if TYPE_CHECKING:  # fields or properties of every spec

        @property
        def layers(self) -> int: ...
        @property
        def width(self) -> int: ...
        @property
        def vocab(self) -> int: ...
        @property
        def context(self) -> int: ...

    def build(self, topology: Topology) -> Stack:
        """A stack with random weights and the layers of `topology`, which may be more than `self.layers`:
        private decoders lie behind the model's own."""
        problem, remedy = f"{type(self).__name__} has no build", "a model spec must define it"
        raise ConfigError(problem, setting="build", remedy=remedy)

    @property
    def kind(self) -> str:
        """The name under which `MODELS` finds this spec's class."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def changed(self, **changes: Any) -> Self:
        """This spec with some fields replaced."""
        return replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """The `[model]` table."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, kind: str, table: Mapping[str, Any]) -> ModelSpec:
        """The spec of a `[model]` table, without its `kind`, every value checked."""
        return build_dataclass(cls, table, "model.")


_GPT = "topograd.nn.config:GPTConfig"
_FAMILY = "topograd.nn.transformer.config:TransformerConfig"
_IMAGES = "topograd.nn.images.config:ImageConfig"
MODELS: Registry[type[ModelSpec]] = Registry(
    "model kind",
    {
        **dict.fromkeys(("gpt", "mamba2", "mamba3", "hybrid"), _GPT),
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "gemma3_text"), _FAMILY
        ),
        **dict.fromkeys(("mlp", "vgg", "resnet", "vit", "forward-forward", "image"), _IMAGES),
        "encoder": "topograd.nn.config:EncoderConfig",
        "hf": "topograd.nn.adapted.spec:AdaptedConfig",
    },
)
"""Spec classes by kind; resnet8, resnet20, ... are written with their number of layers."""


def read_spec(table: Mapping[str, Any]) -> ModelSpec:
    """The spec that a `[model]` table describes; a table without a kind is a GPT's."""
    rest = dict(table)
    kind = rest.pop("kind", "gpt")
    if not isinstance(kind, str):
        problem = f"setting model.kind is {kind!r}"
        raise ConfigError(problem, setting="model.kind", given=kind, allowed='text, as "gpt"')
    spec_class = MODELS["resnet" if kind.startswith("resnet") and kind[6:].isdigit() else kind]
    if not (isinstance(spec_class, type) and issubclass(spec_class, ModelSpec)):
        allowed = "the name of a class that inherits tg.ModelSpec"
        raise ConfigError(setting="model.kind", given=kind, allowed=allowed)
    return spec_class.from_dict(kind, rest)
