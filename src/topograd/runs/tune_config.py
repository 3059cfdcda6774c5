"""Fine-tuning settings (`train --init`): LoRA, frozen layers, exits."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from topograd.errors import ConfigError
from topograd.limits import MUST_EXIST, check_exclusive, check_rules
from topograd.topology.dag import EMBEDDING, Stage, Topology

Directions = Literal["plain", "random", "pissa", "dead", "safe"]
EXIT_RANK = 64
PARTIAL = ("frozen", "lora_rank", "first_layer", "only_stage")
"""Settings that leave most of a base as it is."""
BASED = (*PARTIAL, "old_text")
"""Settings that say something of a base."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Which parameters learn, where a run begins with another one."""

    lora_rank: int = 0
    """Learn corrections of this rank to the layers' matrices (LoRA) instead of the matrices; 0 learns all."""
    lora_alpha: float | None = None
    """Corrections are scaled by this over the rank; twice the rank if not given."""
    lora_directions: Directions = "plain"
    """Which inputs LoRA reads: plain learns it; pissa begins with the leading singular vectors; held and not
    learned: random, dead (what the old text uses least), safe (most of the new text for what of the old)."""
    old_text: Annotated[str | None, MUST_EXIST] = None
    """Text that must not be forgotten, a file or a folder; by default the model's own, where it is needed."""
    max_forgetting: float | None = None
    """Bits per byte of the old text that LoRA may cost; where it costs more it is scaled down."""
    first_layer: int = 0
    """Layers before this one stay as they are, as do embedding and head; their states are computed once."""
    only_stage: int = 0
    """This stage alone learns, counted from 1; all else stays as it is, bit for bit; 0 lets all learn."""
    frozen: bool = False
    """The model stays as it is, bit for bit; only heads of low rank at the exits before the last learn."""
    exit_rank: int = EXIT_RANK
    """Rank of those heads; at most the width."""
    seq_len: int | None = None
    """Tokens in a training sequence; the model's context if not given."""
    layer_dropout: float = 0.0
    """Leave out layers at random, the last one with this probability, earlier ones less often (LayerSkip)."""
    states: Literal["float32", "bfloat16", "float16", "none"] = "float32"
    """How the hidden states that frozen layers compute are kept on the disk; none computes them each time."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            lora_rank=(self.lora_rank >= 0, "at least 1, or 0 for no LoRA"),
            lora_alpha=(self.lora_alpha is None or 0 < self.lora_alpha < 1e6, "positive and below 1e6"),
            lora_directions=(
                self.lora_directions in get_args(Directions),
                f"one of {', '.join(get_args(Directions))}",
            ),
            old_text=(self.old_text is None or bool(self.old_text.strip()), "a file or a folder"),
            max_forgetting=(
                self.max_forgetting is None or 0 < self.max_forgetting < math.inf,
                "positive and finite",
            ),
            first_layer=(self.first_layer >= 0, "at least 0"),
            only_stage=(self.only_stage >= 0, "at least 1, or 0 for all stages"),
            seq_len=(self.seq_len is None or self.seq_len >= 1, "at least 1"),
            exit_rank=(self.exit_rank >= 1, "at least 1"),
            layer_dropout=(0 <= self.layer_dropout < 1, "in 0 to below 1"),
        )
        idle = "left out without {}, since nothing uses it"
        check_rules(
            self,
            lora_alpha=(self.lora_alpha is None or self.lora_rank > 0, idle.format("lora_rank")),
            lora_directions=(
                self.lora_directions == "plain" or self.lora_rank > 0,
                idle.format("lora_rank"),
            ),
            max_forgetting=(self.max_forgetting is None or self.lora_rank > 0, idle.format("lora_rank")),
            exit_rank=(self.exit_rank == EXIT_RANK or self.frozen, idle.format("frozen")),
        )
        check_exclusive(self, "only_stage", "first_layer", "lora_rank")
        for name in ("lora_rank", "first_layer", "only_stage", "layer_dropout"):
            check_exclusive(self, name, "frozen", remedy="a frozen model learns only its exits")

    @property
    def keeps_base(self) -> bool:
        """Whether most of the model stays the base's, so that checkpoints hold what learns alone."""
        return any(getattr(self, name) for name in PARTIAL)

    @property
    def holds_directions(self) -> bool:
        """Whether LoRA's A stays as it begins."""
        return self.lora_directions in ("random", "dead", "safe")

    @property
    def measures_forgetting(self) -> bool:
        """Whether old text is read: given, or needed for what is asked."""
        needed = self.lora_directions in ("dead", "safe") or self.max_forgetting is not None
        return needed or self.old_text is not None

    def applied(self, topology: Topology) -> Topology:
        """The topology with the stages frozen that do not learn."""
        stages = list(topology.stages)
        if self.first_layer:
            starts = [stage.start for stage in stages]
            if self.first_layer not in starts:
                allowed = ", ".join(str(start) for start in starts if start)
                raise ConfigError(
                    setting="first_layer",
                    given=self.first_layer,
                    allowed=f"the start of a stage: {allowed or 'give a partition, as 20,10'}",
                )
            stages = _freeze(stages, [k for k, start in enumerate(starts) if start < self.first_layer])
        if self.only_stage:
            learns = self.only_stage - 1
            if learns >= len(stages) or not stages[learns].weight:
                allowed = ", ".join(str(k) for k, stage in enumerate(stages, 1) if stage.weight)
                raise ConfigError(
                    setting="only_stage", given=self.only_stage, allowed=f"a stage with a loss: {allowed}"
                )
            stages = _freeze(stages, [k for k in range(len(stages)) if k != learns])
        if self.frozen:
            if len(stages) < 2:
                raise ConfigError(
                    "frozen leaves nothing to learn",
                    setting="partition",
                    remedy="give one with exits, as 10,10",
                )
            if topology.heads != "shared":
                raise ConfigError(
                    setting="heads",
                    given=topology.heads,
                    allowed="shared: frozen gives every exit a head of its own",
                )
            stages[-1] = replace(stages[-1], frozen=True, weight=0.0)
        return replace(topology, stages=tuple(stages))


def _freeze(stages: Sequence[Stage], frozen: Container[int]) -> list[Stage]:
    """The stages, some of them frozen; no gradient goes to those."""
    return [
        replace(stage, frozen=True, weight=0.0)
        if k in frozen
        else replace(
            stage,
            sources=tuple(
                replace(edge, grad_scale=0.0) if edge.source != EMBEDDING and edge.source in frozen else edge
                for edge in stage.sources
            ),
        )
        for k, stage in enumerate(stages)
    ]
