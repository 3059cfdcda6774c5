"""Settings of transformers of published families, and the traits of their blocks. Imports no torch.

Traits are what all models of a family have in common (kind of norm, gated MLP, learned positions); the
settings are what they differ in. The GPT that is trained here (`nn/config.py`) is one more set of traits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from topograd.errors import StackError
from topograd.limits import check_rules
from topograd.nn.spec import ModelSpec

if TYPE_CHECKING:
    from topograd.nn.stack import Stack
    from topograd.topology.dag import Topology

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "gemma3_text"]
Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"]
RopeScaling = Literal["none", "linear", "llama3"]
Norm = Literal["rms", "rms-around-one", "layer", "unit"]
MAX_LAYERS = 4096
MAX_SIZE = 2**24
"""The largest allowed width or vocabulary."""
MAX_POSITIONS = 2**31 - 1


@dataclass(frozen=True)
class Traits:
    """The properties that all models of a family share."""

    norm: Norm = "rms"
    """RMSNorm, RMSNorm whose gain is 1 + weight, LayerNorm, or RMSNorm without a gain."""
    gated: bool = True
    """The MLP is down(act(gate x) ⊙ up x), or else down(act(up x))."""
    learned_positions: bool = False
    """A table of positions instead of rotations; queries, keys and values are then one matrix."""
    transposed: bool = False
    """Matrices of layers are kept (in, out)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(width)."""
    post_norms: bool = False
    """Attention and MLP are normed again before they are added."""
    softcapped_attention: bool = False
    """Scores may be capped, so attention is written out instead of fused."""
    normed_embedding: bool = False
    """x0 is the norm of the embedding."""
    norm_behind_rotation: bool = False
    """Norms of queries and keys come after the rotation, not before it."""
    half_tables: bool = False
    """Rotations turn the other way, by tables of half a head's width (`attention.py`)."""
    always_grouped: bool = False
    """Shared keys and values are never repeated; transformers repeats them where there is a mask."""
    whole_window: bool = True
    """A window as long as the text makes a mask, as in transformers."""
    scratch: bool = False
    """Weights start for training: uniform matrices, output matrices at zero; else normal, for loading."""


TRAITS: Mapping[str, Traits] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Traits()),
    "gpt2": Traits(norm="layer", gated=False, learned_positions=True, transposed=True),
    "gemma": Traits(norm="rms-around-one", scaled_embedding=True),
    "gemma2": Traits(
        norm="rms-around-one", scaled_embedding=True, post_norms=True, softcapped_attention=True
    ),
    "gemma3_text": Traits(norm="rms-around-one", scaled_embedding=True, post_norms=True),
}


class BlockConfig(ModelSpec):
    """The settings that a transformer's block reads, with defaults for configs that lack them."""

    norm_eps: float = 1e-6
    local_rope_base: float | None = None
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0
    rope_original_context: int = 8192
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_softcap: float | None = None
    smear: bool = False
    x0_blend: bool = False
    head_rank: int | None = None
    head_std: float = 0.0
    windows: tuple[int, ...] = ()

    if TYPE_CHECKING:

        @property
        def traits(self) -> Traits: ...
        @property
        def heads(self) -> int: ...
        @property
        def num_kv_heads(self) -> int: ...
        @property
        def head_width(self) -> int: ...
        @property
        def mlp_width(self) -> int: ...
        @property
        def activation(self) -> Activation: ...
        @property
        def rope_base(self) -> float: ...
        @property
        def tied(self) -> bool: ...
        @property
        def softcap(self) -> float | None: ...
        @property
        def attention_scale(self) -> float | None: ...

    @property
    def positions(self) -> int:
        """Positions that the model was made for; `context` is what a run sees of them."""
        return self.context

    def window(self, index: int) -> int:
        """The attention span of layer `index`; 0 is the whole context."""
        return self.windows[index % len(self.windows)] if self.windows else 0

    def mixer(self, index: int) -> str:
        """The mixer of layer `index`, as `MIXERS` names it."""
        return "attention"

    def has_value_embedding(self, index: int) -> bool:
        """Whether layer `index` adds an embedding of the token to its values."""
        return False

    def grown(self, layers: int) -> BlockConfig:
        """The settings with `layers` layers; the existing ones do not change."""
        return self.changed(layers=layers)

    def draft_layer(self) -> tuple[BlockConfig, int]:
        """Settings and index of one plain attention layer of this kind, for a draft stage."""
        return self.changed(layers=1), self.layers

    def build(self, topology: Topology) -> Stack:
        from topograd.nn.transformer.stack import Transformer

        return Transformer(self.changed(layers=topology.layers))


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockConfig):
    """The shape of a transformer of one of the families."""

    loads_empty = True

    family: Family
    """llama, mistral, qwen2, qwen3, gpt2, gemma, gemma2 or gemma3_text."""
    layers: int
    """Layers of the stack."""
    width: int
    """Numbers in the hidden state of a token."""
    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values; a divisor of heads."""
    head_width: int
    """Numbers in a head."""
    mlp_width: int
    """Numbers in the MLP's hidden state."""
    vocab: int
    """Tokens that there are."""
    context: int
    """Positions that a run sees."""
    trained_context: int | None = None
    """Positions that the model was made for; None is context."""
    norm_eps: float = 1e-6
    """ε of every norm."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    local_rope_base: float | None = None
    """Base of the rotary frequencies in layers with a window; None is rope_base, scaling included."""
    rope_scaling: RopeScaling = "none"
    """How the frequencies were stretched for a longer context."""
    rope_factor: float = 1.0
    """By how much."""
    rope_low_factor: float = 1.0
    """llama3: wavelengths above rope_original_context over this are stretched."""
    rope_high_factor: float = 4.0
    """llama3: wavelengths below rope_original_context over this are not."""
    rope_original_context: int = 8192
    """llama3: the context before it was stretched."""
    qkv_bias: bool = False
    """Queries, keys and values have biases."""
    output_bias: bool = False
    """Attention's output has a bias."""
    mlp_bias: bool = False
    """The MLP's matrices have biases."""
    qk_norm: bool = False
    """Queries and keys are normed, head by head."""
    tied: bool = False
    """The head's matrix is the embedding's."""
    activation: Activation = "silu"
    """The MLP's nonlinearity."""
    windows: tuple[int, ...] = ()
    """Attention spans, repeated over the layers; 0 is the whole context."""
    query_scalar: int | None = None
    """Scores are divided by the root of this; None is head_width."""
    attention_softcap: float | None = None
    """Scores are kept within this bound by tanh (gemma2)."""
    softcap: float | None = None
    """Logits are kept within this bound by tanh."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("family", get_args(Family)),
            ("activation", get_args(Activation)),
            ("rope_scaling", get_args(RopeScaling)),
        ):
            if getattr(self, name) not in allowed:
                one_of = f"one of {', '.join(allowed)}"
                raise StackError(setting=name, given=getattr(self, name), allowed=one_of)
        self._check_sizes()
        self._check_numbers()

    def _check_sizes(self) -> None:
        most = {"layers": MAX_LAYERS, "context": MAX_POSITIONS, "rope_original_context": MAX_POSITIONS}
        sizes = ("layers", "width", "heads", "kv_heads", "head_width", "mlp_width", "vocab", "context")
        if self.trained_context is not None and not self.context <= self.trained_context <= MAX_POSITIONS:
            allowed = "at least the context"
            raise StackError(setting="trained_context", given=self.trained_context, allowed=allowed)
        for name in (*sizes, "rope_original_context"):
            value, bound = getattr(self, name), most.get(name, MAX_SIZE)
            if type(value) is not int or not 1 <= value <= bound:
                raise StackError(setting=name, given=value, allowed=f"a whole number in 1..{bound}")
        learned, wide = self.traits.learned_positions, self.heads * self.head_width
        spans = all(type(window) is int and 0 <= window <= MAX_POSITIONS for window in self.windows)
        check_rules(
            self,
            StackError,
            kv_heads=(not self.heads % self.kv_heads, f"a divisor of the {self.heads} heads"),
            heads=(wide <= MAX_SIZE, f"at most {MAX_SIZE} numbers together, of {self.head_width} each"),
            head_width=(learned or not self.head_width % 2, "even, for rotary positions"),
            windows=(spans, "spans of at least 0; 0 is the whole context"),
        )
        if learned and (self.kv_heads != self.heads or wide != self.width):
            allowed = f"as many as heads, which fill the width {self.width}: so it is in {self.family}"
            raise StackError(setting="kv_heads", given=self.kv_heads, allowed=allowed)

    def _check_numbers(self) -> None:
        positive = ("norm_eps", "rope_base", "rope_factor", "rope_low_factor", "rope_high_factor")
        optional = ("local_rope_base", "query_scalar", "attention_softcap", "softcap")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if not (value is None and name in optional) and not 0 < value < math.inf:
                raise StackError(setting=name, given=value, allowed="finite and above 0")
        ordered = self.rope_scaling != "llama3" or self.rope_low_factor < self.rope_high_factor
        capped = self.attention_softcap is None or self.traits.softcapped_attention
        check_rules(
            self,
            StackError,
            rope_low_factor=(ordered, "below rope_high_factor"),
            attention_softcap=(capped, f"left out: it is for gemma2, and the family is {self.family}"),
        )

    @property
    def kind(self) -> str:
        return self.family

    def to_dict(self) -> dict[str, Any]:
        table = asdict(self)
        return {"kind": table.pop("family"), **table}

    @classmethod
    def from_dict(cls, kind: str, table: Mapping[str, Any]) -> ModelSpec:
        return super().from_dict(kind, {"family": kind, **table})

    @property
    def traits(self) -> Traits:
        """The traits of the family."""
        return TRAITS[self.family]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads

    @property
    def positions(self) -> int:
        return self.trained_context or self.context

    def seeing(self, context: int) -> TransformerConfig:
        """With fewer positions than the model was made for."""
        trained = None if context == self.positions else self.positions
        return replace(self, context=context, trained_context=trained)

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        return (self.head_width if self.query_scalar is None else self.query_scalar) ** -0.5
