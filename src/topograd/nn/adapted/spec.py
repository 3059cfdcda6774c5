"""Settings of an adapted model of transformers in a run. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from topograd.errors import ConfigError
from topograd.nn.config import MAX_SIZE
from topograd.nn.spec import ModelSpec

if TYPE_CHECKING:
    from topograd.nn.stack import Stack
    from topograd.topology.dag import Topology


@dataclass(frozen=True, kw_only=True)
class AdaptedConfig(ModelSpec):
    """The arguments of `adapt` for a model of transformers, and its sizes."""

    settings: str
    """Its config.json, as text."""
    list: str
    """The dotted path of its list of layers."""
    head: str
    """The path of its output matrix."""
    norm: str | None = None
    """The path of its last norm."""
    layers: int
    width: int
    vocab: int
    context: int

    def __post_init__(self) -> None:
        try:
            whole = isinstance(json.loads(self.settings), dict)
        except ValueError:
            whole = False
        if not whole:
            problem, remedy = "model.settings is no JSON object", "restore the run's config.toml"
            raise ConfigError(problem, setting="settings", given=self.settings, remedy=remedy)
        for name in ("layers", "width", "vocab", "context"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                problem = f"model.{name} is {getattr(self, name)}"
                raise ConfigError(problem, setting=name, given=getattr(self, name), allowed="at least 1")

    def build(self, topology: Topology) -> Stack:
        from topograd.nn.adapted.build import build_adapted

        return build_adapted(self)

    def seeing(self, context: int) -> AdaptedConfig:
        """With fewer positions than the model was made for."""
        return replace(self, context=context)

    @property
    def kind(self) -> str:
        return "hf"

    @property
    def family(self) -> str:
        """What transformers calls the architecture."""
        return str(json.loads(self.settings).get("model_type"))
