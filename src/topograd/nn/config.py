"""Settings of GPT models and of bounded interfaces. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from topograd.errors import ConfigError, StackError
from topograd.limits import check_rules
from topograd.nn.interface_config import MAX_RANK, MIN_RANK, RANKS, check_fields, parse_settings
from topograd.nn.spec import ModelSpec, Task
from topograd.nn.transformer.config import Activation, BlockConfig, Traits
from topograd.registry import Registry

if TYPE_CHECKING:
    from topograd.nn.relays import BoundedRelay
    from topograd.nn.stack import Stack
    from topograd.topology.dag import Topology

MIXERS: Registry[Any] = Registry(
    "mixer",
    {
        "attention": "topograd.nn.transformer.attention:Attention",
        "mamba2": "topograd.nn.mamba.mixers:Mamba2",
        "mamba3": "topograd.nn.mamba.mixers:Mamba3",
    },
)
"""Mixers of positions in a layer, made as `mixer(config, index)`; see `nn/mamba/mixers.py`."""
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "transformer": ("attention",),
    "mamba2": ("mamba2",),
    "mamba3": ("mamba3",),
    "hybrid": ("mamba3", "mamba3", "mamba3", "attention"),
}
"""Mixers of the layers, repeated; the name of a mixer alone is an architecture too."""
_KINDS = ("mamba2", "mamba3", "hybrid")
"""Architectures that are kinds of model too."""
Architecture = Literal["transformer", "mamba2", "mamba3", "hybrid"]
"""The architectures that come with the package."""
MAX_SIZE = 2**31 - 1
"""The largest allowed size."""
Pool = Literal["tail", "mean", "cumulative"]
Maps = Literal["mlp", "linear", "gated", "monarch"]

GPT_TRAITS = Traits(
    norm="unit",
    gated=False,
    normed_embedding=True,
    norm_behind_rotation=True,
    half_tables=True,
    always_grouped=True,
    whole_window=False,
    scratch=True,
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    """The shape of a GPT."""

    layers: int = 6
    """Layers of the stack."""
    width: int = 96
    """Numbers in the hidden state of a token."""
    heads: int = 3
    """Heads of attention, or of a Mamba layer's half."""
    vocab: int = 1024
    """Tokens that there are; bytes always have 257."""
    context: int = 128
    """Positions that the model sees."""
    kv_heads: int | None = None
    """Heads of keys and values; None is as many as queries have."""
    architecture: str = "transformer"
    """What the layers are: transformer, mamba2, mamba3, hybrid (three Mamba-3 and one attention), or a mixer
    of your own as package.module:attribute."""
    ssm_state: int = 32
    """State size of a Mamba layer per channel."""
    mlp: Literal["relu2", "swiglu"] = "relu2"
    """The MLP's nonlinearity."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP over the width."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    smear: bool = True
    """Add an embedding of the previous token to x0."""
    x0_blend: bool = True
    """Every layer adds a learned multiple of x0."""
    value_embeddings: Literal["none", "alternate", "all"] = "alternate"
    """Which layers add an embedding of the token to their values; alternate is every second layer."""
    count_from: Literal["first", "last"] = "first"
    """Where alternating layers are counted from. From the first, layers can be appended and nothing before
    them changes; runs made before 0.2 counted from the last."""
    softcap: float | None = None
    """Logits are kept within this bound by tanh."""
    tied: bool = False
    """The head's matrix is the embedding's."""
    windows: tuple[int, ...] = ()
    """Attention spans, repeated over the layers; 0 is the whole context."""
    head_rank: int | None = None
    """Rank of per-stage heads' deltas; None is full."""
    head_std: float = 0.001
    """Spread of the head's matrix at first; with 0 no layer gets a gradient in the first step."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocab", "context", "ssm_state"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise StackError(setting=name, given=getattr(self, name), allowed=f"in 1..{MAX_SIZE}")
        kv, cap, rank = self.kv_heads, self.softcap, self.head_rank
        split = not self.width % self.heads and not self.width // self.heads % 2
        inner = self.mlp_ratio * self.width
        spans = all(0 <= window <= MAX_SIZE for window in self.windows)
        check_rules(
            self,
            StackError,
            width=(split, f"a multiple of twice the {self.heads} heads"),
            kv_heads=(
                kv is None or (kv >= 1 and not self.heads % kv),
                f"a divisor of the {self.heads} heads",
            ),
            mlp_ratio=(1 <= inner <= MAX_SIZE, f"so that the MLP's width {inner} lies in 1..{MAX_SIZE}"),
            rope_base=(0 < self.rope_base < math.inf, "finite and above 0"),
            head_std=(0 <= self.head_std < math.inf, "finite and at least 0"),
            softcap=(cap is None or 0 < cap < math.inf, "positive, or be left out for no cap"),
            windows=(spans, "spans of at least 0; 0 is the whole context"),
            head_rank=(rank is None or rank >= 1, "at least 1, or be left out"),
            ssm_state=(not self.ssm_state % 4, "a multiple of 4"),
            mlp=(self.mlp in ("relu2", "swiglu"), "one of relu2, swiglu"),
            value_embeddings=(
                self.value_embeddings in ("none", "alternate", "all"),
                "one of none, alternate, all",
            ),
            count_from=(self.count_from in ("first", "last"), "one of first, last"),
        )
        if self.architecture not in ARCHITECTURES:
            try:
                MIXERS.check(self.architecture)
            except ConfigError:
                own = "package.module:attribute of a mixer of your own"
                allowed_names = f"one of {', '.join(ARCHITECTURES)}, or {own}"
                raise StackError(
                    setting="architecture", given=self.architecture, allowed=allowed_names
                ) from None

    @property
    def kind(self) -> str:
        return self.architecture if self.architecture in _KINDS else "gpt"

    def to_dict(self) -> dict[str, Any]:
        table = asdict(self)
        if self.kind in _KINDS:
            del table["architecture"]
        return {"kind": self.kind, **table}

    @classmethod
    def from_dict(cls, kind: str, table: Mapping[str, Any]) -> ModelSpec:
        return super().from_dict(kind, table if kind == "gpt" else {**table, "architecture": kind})

    def build(self, topology: Topology) -> Stack:
        from topograd.nn.gpt import GPT

        return GPT(replace(self, layers=topology.layers))

    @property
    def traits(self) -> Traits:
        """How the block differs from that of other families."""
        return replace(GPT_TRAITS, gated=self.mlp == "swiglu")

    qk_norm = True
    attention_scale = None  # attention's own default, 1 / sqrt(head_width)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        return int(self.mlp_ratio * self.width)

    @property
    def activation(self) -> Activation:
        return "silu" if self.mlp == "swiglu" else "relu2"

    def grown(self, layers: int) -> GPTConfig:
        """Layers are counted from the first, so that those that are there stay what they are."""
        first = replace(self, count_from="first")
        if any(first._alternates(i) != self._alternates(i) for i in range(self.layers)):
            raise StackError(
                f"this model's {self.layers} layers alternate counted from the last, so appended "
                "ones would change them",
                setting="count_from",
                given=self.count_from,
                remedy="train it again with count_from = 'first'",
            )
        return replace(first, layers=layers)

    def draft_layer(self) -> tuple[GPTConfig, int]:
        plain = {"architecture": "transformer", "value_embeddings": "none", "windows": ()}
        return replace(self, layers=1, **plain), 0  # type: ignore[arg-type]

    def mixer(self, index: int) -> str:
        """The mixer of layer `index`, as `MIXERS` calls it."""
        pattern = ARCHITECTURES.get(self.architecture, (self.architecture,))
        return pattern[self._place(index) % len(pattern)]

    def has_value_embedding(self, index: int) -> bool:
        """Whether layer `index` adds an embedding of the token to its values."""
        return self.value_embeddings == "all" or (
            self.value_embeddings == "alternate" and self._place(index) % 2 == 1
        )

    def _alternates(self, index: int) -> tuple[str, bool]:
        """What alternates in layer `index`: its mixer, and whether that has a value embedding."""
        mixer = self.mixer(index)
        return mixer, mixer == "attention" and self.has_value_embedding(index)

    def _place(self, index: int) -> int:
        """The layer's number where alternation is counted from; counted from the last it may be negative."""
        return index if self.count_from == "first" else index - self.layers


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(GPTConfig):
    """The shape of a masked encoder (`nn/gpt.py`); `vocab` is the tokenizer's, without the mask."""

    task: ClassVar[Task] = "masked"

    def __post_init__(self) -> None:
        super().__post_init__()
        other = "transformer for an encoder, for other mixers read earlier positions only"
        check_rules(
            self,
            StackError,
            architecture=(self.architecture == "transformer", other),
            windows=(not self.windows, "empty for an encoder"),
        )

    @property
    def kind(self) -> str:
        return "encoder"

    @classmethod
    def from_dict(cls, kind: str, table: Mapping[str, Any]) -> ModelSpec:
        return super().from_dict("gpt", table)

    def build(self, topology: Topology) -> Stack:
        from topograd.nn.gpt import Encoder

        return Encoder(replace(self, layers=topology.layers, vocab=self.vocab + 1))


@dataclass(frozen=True, kw_only=True)
class SegmentInterface:
    """The shape of the interfaces between regions."""

    segments: int = 8
    """S, into how many equal parts the context is cut."""
    rank: int = 8
    """r, the size of a segment's message."""
    pool: Pool = "tail"
    """What a segment sends: its last position, its mean, or the mean of all so far."""
    maps: Maps = "mlp"
    """Encoder and decoder: two layers, one, one with a gate, or two of which one is a Monarch matrix."""
    causal: bool = True
    """False pools as the published interface does, the mean of the whole sequence: LEAKY, every position sees
    all later ones. For encoders, and to show the leak. It wants pool="mean" and segments=1."""
    first_region: ClassVar[int] = 1
    keys: ClassVar[Mapping[str, tuple[str, type]]] = {
        **{"S": ("segments", int), "r": ("rank", int)},
        **{"pool": ("pool", str), "maps": ("maps", str), "causal": ("causal", bool)},
    }

    def __post_init__(self) -> None:
        whole = self.segments == 1 and self.pool == "mean"
        check_fields(
            self,
            pool=(self.pool in get_args(Pool), f"one of {', '.join(get_args(Pool))}"),
            maps=(self.maps in get_args(Maps), f"one of {', '.join(get_args(Maps))}"),
            rank=(MIN_RANK <= self.rank <= MAX_RANK, RANKS),
            causal=(self.causal or whole, "true, unless S=1 and pool=mean"),
            segments=(self.segments >= 2 or not self.causal, "at least 2"),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings of a text such as S=8,r=8,pool=tail,maps=linear,causal=false.

        >>> SegmentInterface.parse("S=4,r=16")
        SegmentInterface(segments=4, rank=16, pool='tail', maps='mlp', causal=True)
        """
        return cls(**parse_settings(text, cls.keys))

    def segment(self, context: int) -> int:
        """ℓ, the positions of one segment."""
        if self.segments > context or context % self.segments:
            problem = f"interface segments S is {self.segments} and the context {context}"
            remedy = "S must divide the context"
            raise ConfigError(problem, setting="segments", given=self.segments, remedy=remedy)
        return context // self.segments

    def check(self, context: int, width: int) -> None:
        self.segment(context)

    def build(self, width: int, context: int, before: BoundedRelay | None) -> BoundedRelay:
        from topograd.nn.interface import SegmentRelay

        return SegmentRelay(self, width, context, first=before is None)
