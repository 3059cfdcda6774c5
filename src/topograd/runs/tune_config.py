"""How a run that begins with another one (`train --init`) learns: all of it, or a small part beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from topograd.errors import ConfigError
from topograd.topology.dag import EMBEDDING, Topology

EXIT_RANK = 64
PARTIAL = ("frozen", "lora_rank", "first_layer")
"""Settings that leave most of a base as it is."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What of a run that was begun with learns."""

    lora_rank: int = 0
    """Learn corrections of this rank to the layers' matrices (LoRA) instead of the matrices; 0 learns all."""
    lora_alpha: float | None = None
    """Corrections are scaled by this over the rank; twice the rank if not given."""
    first_layer: int = 0
    """Layers before this one stay as they are, as do embedding and head; their states are computed once."""
    frozen: bool = False
    """The model stays as it is, bit for bit; only heads of low rank at the exits before the last learn."""
    exit_rank: int = EXIT_RANK
    """Rank of those heads; at most the width."""
    window: int | None = None
    """Tokens in a row of training text; the model's context if not given."""
    layer_dropout: float = 0.0
    """Leave out layers at random, the last one with this probability, earlier ones less often (LayerSkip)."""
    states: Literal["float32", "bfloat16", "float16", "none"] = "float32"
    """How the hidden states that frozen layers compute are kept on the disk; none computes them each time."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank is {self.lora_rank}; it must be at least 1, or 0 for no LoRA")
        if self.lora_alpha is not None and not self.lora_rank:
            raise ConfigError(f"lora_alpha is {self.lora_alpha}, which nothing uses; give lora_rank too")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < 1e6:
            raise ConfigError(f"lora_alpha is {self.lora_alpha}; it must be positive and below 1e6")
        if self.first_layer < 0:
            raise ConfigError(f"first_layer is {self.first_layer}; it must be at least 0")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}; it must be at least 1")
        if self.exit_rank < 1:
            raise ConfigError(f"exit_rank is {self.exit_rank}; it must be at least 1")
        if not 0 <= self.layer_dropout < 1:
            raise ConfigError(f"layer_dropout is {self.layer_dropout}; it must lie in 0 to below 1")
        if self.exit_rank != EXIT_RANK and not self.frozen:
            raise ConfigError(f"exit_rank is {self.exit_rank}, which nothing uses; give frozen too")
        for name in ("lora_rank", "first_layer", "layer_dropout"):
            if self.frozen and getattr(self, name):
                raise ConfigError(f"frozen and {name} are both given; a frozen model learns only its exits")

    @property
    def keeps_base(self) -> bool:
        """Whether most of the model stays the base's, so that checkpoints hold what learns alone."""
        return any(getattr(self, name) for name in PARTIAL)

    def applied(self, topology: Topology) -> Topology:
        """The topology with the stages frozen that do not learn."""
        stages = list(topology.stages)
        if self.first_layer:
            starts = [stage.start for stage in stages]
            if self.first_layer not in starts:
                allowed = ", ".join(str(start) for start in starts if start)
                raise ConfigError(
                    f"first_layer is {self.first_layer}; it must be the start of a stage: "
                    f"{allowed or 'give a partition, as 20,10'}"
                )
            for k, stage in enumerate(stages):
                if stage.start < self.first_layer:
                    stages[k] = replace(stage, frozen=True, weight=0.0)
                else:
                    sources = tuple(
                        edge
                        if edge.source == EMBEDDING or not stages[edge.source].frozen
                        else replace(edge, transmissivity=0.0)
                        for edge in stage.sources
                    )
                    stages[k] = replace(stage, sources=sources)
        if self.frozen:
            if len(stages) < 2:
                raise ConfigError("frozen leaves nothing to learn: give a partition with exits, as 10,10,10")
            if topology.heads != "shared":
                raise ConfigError("frozen gives every exit a head of its own; leave stage-heads out")
            stages[-1] = replace(stages[-1], frozen=True, weight=0.0)
        return replace(topology, stages=tuple(stages))
