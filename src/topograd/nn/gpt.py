"""A GPT of nanochat's class, as a stack.

    x0 = norm(E[token] + E'[previous token])                      the second term is the smear
    h  ← h + s x0;  h ← h + Attn(norm(h));  h ← h + MLP(norm(h))     per layer, s a learned scalar
    z  = cap((W + W_k) norm(h))

Rotary positions, norm of queries and keys, grouped keys and values, ReLU² or SwiGLU, value embeddings
v ← v + g V[token], sliding windows. Some or all layers may be Mamba-2 or Mamba-3 instead
(`recurrent_block.py`). The norm is RMSNorm without a gain. Output matrices of attention and MLP
start at zero and the head near it, so that every stage first predicts almost the uniform distribution.

Cost per token and layer, in multiply-adds forward: (4 + 2·mlp_ratio) width² with ReLU² and (4 + 3·mlp_ratio)
width² with SwiGLU, less where keys and values are grouped; and 2·context·width for attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.attention import attention_mask, rotate
from topograd.nn.gpt_decoding import DecodingGPT
from topograd.nn.heads import Head
from topograd.nn.layer_state import KVState
from topograd.nn.recurrent_block import RecurrentBlock, mixer_kind
from topograd.nn.stack import Bus, Projection, Stack

Architecture = Literal["transformer", "mamba2", "mamba3", "hybrid"]
ARCHITECTURES = get_args(Architecture)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT."""

    layers: int = 6
    width: int = 96
    heads: int = 3
    vocab: int = 1024
    context: int = 128
    kv_heads: int | None = None
    """Heads of keys and values; None is as many as queries have."""
    architecture: Architecture = "transformer"
    """What the layers are: attention with MLP, Mamba-2, Mamba-3, or three Mamba-3 and one attention."""
    ssm_state: int = 32
    """Numbers that a Mamba layer remembers of each of its channels."""
    mlp: Literal["relu2", "swiglu"] = "relu2"
    mlp_ratio: float = 4.0
    """Hidden width of the MLP over the width."""
    rope_base: float = 10_000.0
    smear: bool = True
    """Add an embedding of the previous token to x0."""
    x0_blend: bool = True
    """Every layer adds a learned multiple of x0."""
    value_embeddings: Literal["none", "alternate", "all"] = "alternate"
    """Which layers add an embedding of the token to their values; alternate ends with the last layer."""
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
            if getattr(self, name) < 1:
                raise StackError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise StackError(
                f"width {self.width} does not split into {self.heads} heads of even width; "
                "choose a width that is a multiple of twice the heads"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise StackError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads; use a divisor")
        if int(self.mlp_ratio * self.width) < 1:
            raise StackError(f"mlp_ratio {self.mlp_ratio} leaves the MLP no width; use at least 1 / width")
        if not self.head_std >= 0:
            raise StackError(f"head_std is {self.head_std}; it must be at least 0")
        if self.softcap is not None and not self.softcap > 0:
            raise StackError(f"softcap is {self.softcap}; it must be positive, or None for no cap")
        if any(window < 0 for window in self.windows):
            raise StackError(f"windows {self.windows} has a negative span; use 0 for the whole context")
        if self.architecture not in ARCHITECTURES:
            raise StackError(
                f"architecture {self.architecture!r} is unknown; choose one of {', '.join(ARCHITECTURES)}"
            )
        if self.ssm_state % 4:
            raise StackError(f"ssm_state is {self.ssm_state}; it must be a multiple of 4")
        if self.mlp not in ("relu2", "swiglu"):
            raise StackError(f"mlp {self.mlp!r} is unknown; choose 'relu2' or 'swiglu'")
        if self.value_embeddings not in ("none", "alternate", "all"):
            raise StackError(
                f"value_embeddings {self.value_embeddings!r} is unknown; choose 'none', 'alternate' or 'all'"
            )


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.shape[-1],))


def matrix(rows: int, columns: int, scale: float) -> nn.Linear:
    """A bias-free linear map, uniform in ±sqrt(3) scale / sqrt(columns); scale 0 gives zeros."""
    layer = nn.Linear(columns, rows, bias=False)
    bound = 3**0.5 * scale / columns**0.5
    nn.init.uniform_(layer.weight, -bound, bound)
    return layer


class Attention(nn.Module):
    """Causal attention with rotary positions, over the whole past or a window of it."""

    def __init__(self, config: GPTConfig, window: int, value_embedding: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_width = config.width // config.heads
        self.window = window
        inner = self.kv_heads * self.head_width
        self.query = matrix(config.width, config.width, 1.0)
        self.key = matrix(inner, config.width, 1.0)
        self.value = matrix(inner, config.width, 1.0)
        self.output = matrix(config.width, config.width, 0.0)
        self.value_embedding = nn.Embedding(config.vocab, inner) if value_embedding else None
        if self.value_embedding is not None:
            nn.init.uniform_(self.value_embedding.weight, -(3**0.5) / inner**0.5, 3**0.5 / inner**0.5)
            self.value_gate = nn.Parameter(torch.tensor(0.5))

    def forward(
        self, x: Tensor, bus: Bus, state: KVState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """(batch, time, width), or only the positions in `rows` (E,): (batch, E, width)."""
        batch, time, width = x.shape
        asking = x if rows is None else x[:, rows]
        q = self.query(asking).view(batch, -1, self.heads, self.head_width).transpose(1, 2)
        k = self.key(x).view(batch, time, self.kv_heads, self.head_width).transpose(1, 2)
        v = self.value(x)
        if self.value_embedding is not None:
            v = v + self.value_gate * self.value_embedding(bus.inputs)
        v = v.view(batch, time, self.kv_heads, self.head_width).transpose(1, 2)
        cos, sin = bus.extras["rotary"]
        k = norm(rotate(k, cos, sin))
        q = norm(rotate(q, cos, sin) if rows is None else rotate(q, cos[rows], sin[rows]))
        if state is not None:
            k, v = state.append(k, v, bus.positions)
        where = bus.positions if rows is None else rows[None]
        mask = attention_mask(where, k.shape[2], self.window)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and time > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(y.transpose(1, 2).reshape(batch, -1, width))


class MLP(nn.Module):
    """ReLU² or SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = int(config.mlp_ratio * config.width)
        self.up = matrix(inner, config.width, 1.0)
        self.gate = matrix(inner, config.width, 1.0) if config.mlp == "swiglu" else None
        self.down = matrix(config.width, inner, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: blend x0, attend, transform."""

    takes_rows = True

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        window = config.windows[index % len(config.windows)] if config.windows else 0
        every = {"none": 0, "alternate": 2, "all": 1}[config.value_embeddings]
        valued = every > 0 and (config.layers - 1 - index) % every == 0
        self.attention = Attention(config, window, valued)
        self.mlp = MLP(config)
        self.x0_scale = nn.Parameter(torch.tensor(0.1)) if config.x0_blend else None

    def forward(
        self, h: Tensor, bus: Bus, state: KVState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        if self.x0_scale is not None:
            h = h + self.x0_scale * bus.x0
        kept = h if rows is None else h[:, rows]
        h = kept + self.attention(norm(h), bus, state, rows)
        return h + self.mlp(norm(h))

    def new_state(self, batch: int, capacity: int) -> KVState:
        a, like = self.attention, self.mlp.up.weight
        return KVState(batch, a.kv_heads, capacity, a.head_width, like.device, like.dtype)


def layer_of(config: GPTConfig, index: int) -> Block | RecurrentBlock:
    """Layer `index` of the architecture."""
    kind = mixer_kind(config, index)
    return Block(config, index) if kind is None else RecurrentBlock(config, kind)


class GPT(Stack):
    """The stack; `GPT(layers=6, width=96, heads=3, vocab=1024, context=128)` and the rest of GPTConfig."""

    frequencies: Tensor

    def __init__(self, config: GPTConfig | None = None, **settings: Any) -> None:
        super().__init__()
        if config is not None and settings:
            raise StackError(f"GPT got a config and also {sorted(settings)}; put everything into one of them")
        self.config = config = config or GPTConfig(**settings)
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.previous = nn.Embedding(config.vocab, config.width) if config.smear else None
        for table in (self.embedding, self.previous):
            if table is not None:
                nn.init.normal_(table.weight, std=1.0 if not config.tied else config.width**-0.5)
        self.layers = nn.ModuleList(layer_of(config, i) for i in range(config.layers))
        own = nn.Parameter(config.head_std * torch.randn(config.vocab, config.width))
        weight = self.embedding.weight if config.tied else own
        self.head = Head(weight, rank=config.head_rank, softcap=config.softcap)
        half = config.width // config.heads // 2
        frequencies = config.rope_base ** (-torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x = self.embedding(inputs)
        if self.previous is not None:
            before = self.previous(inputs[:, :-1])
            first = torch.zeros_like(x[:, :1]) if previous is None else self.previous(previous[:, None])
            x = x + torch.cat((first, before), dim=1)
        return norm(x)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        bus = super().bus(x0, inputs, offset)
        angles = bus.positions[..., None] * self.frequencies  # in the buffer's own precision
        if angles.dim() == 3:
            angles = angles[:, None]  # one for all heads
        return Bus(x0, inputs, bus.positions, {"rotary": (angles.cos().to(x0), angles.sin().to(x0))})

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return self.head(norm(h), stage, rows)

    def projection(self, stage: int) -> Projection:
        return Projection(norm, self.head.matrix(stage), self.head.bias, self.head.softcap)

    def for_decoding(self) -> Stack:
        if self.config.architecture == "transformer":
            return DecodingGPT(self)
        return super().for_decoding()

    def add_heads(self, stages: int) -> bool:
        return self.head.add(stages)

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return self.head.own_parameters(stage)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage
