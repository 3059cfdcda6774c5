"""Layers of the GPT: attention with an MLP, or another mixer in the place of attention.

    h ← h + s x0;  h ← h + Mixer(norm(h));  h ← h + MLP(norm(h))         s a learned scalar

Attention has rotary positions, norms of queries and keys, grouped keys and values, sliding windows, and value
embeddings v ← v + g V[token]. A mixer that is an MLP too (Mamba) comes without one. Output matrices start at
zero: a new layer adds s x0 and nothing else, and one that is appended to a trained stack (`appended`) starts
with s = 0, so that it is the identity, bit for bit ("Product of Experts" §6.1).

Cost per token and layer, in multiply-adds forward: (4 + 2·mlp_ratio) width² with ReLU² and (4 + 3·mlp_ratio)
width² with SwiGLU, less where keys and values are grouped; and 2·context·width for attention.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.attention import attention_mask, rotate
from topograd.nn.config import MIXERS, GPTConfig
from topograd.nn.layer_state import KVState, LayerState
from topograd.nn.mixers import Mixer, RowMixer
from topograd.nn.stack import Bus

X0_SCALE = 0.1
"""What a new layer adds of x0."""


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
        given = bus.extras.get("mask")
        mask = attention_mask(where, k.shape[2], self.window) if given is None else given
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
        self.attention = Attention(config, window, config.has_value_embedding(index))
        self.mlp = MLP(config)
        self.x0_scale = nn.Parameter(torch.tensor(X0_SCALE)) if config.x0_blend else None

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


class MixerBlock(nn.Module):
    """One layer with any other mixer: blend x0, mix, and transform unless the mixer does that too."""

    takes_rows = True

    def __init__(self, config: GPTConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer
        self.mlp = MLP(config) if getattr(mixer, "with_mlp", True) else None
        self.x0_scale = nn.Parameter(torch.tensor(X0_SCALE)) if config.x0_blend else None

    def forward(
        self, h: Tensor, bus: Bus, state: LayerState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        if self.x0_scale is not None:
            h = h + self.x0_scale * bus.x0
        if rows is None:
            h = h + self.mixer(norm(h), bus, state)
        elif getattr(self.mixer, "takes_rows", False):
            h = h[:, rows] + cast(RowMixer, self.mixer)(norm(h), bus, state, rows)
        else:
            h = (h + self.mixer(norm(h), bus, state))[:, rows]
        return h if self.mlp is None else h + self.mlp(norm(h))

    def new_state(self, batch: int, capacity: int) -> LayerState:
        return self.mixer.new_state(batch, capacity)


def layer_of(config: GPTConfig, index: int, appended: bool = False) -> Block | MixerBlock:
    """Layer `index` of the architecture; one that is appended to a trained stack starts as the identity."""
    name = config.mixer(index)
    layer = Block(config, index) if name == "attention" else MixerBlock(config, MIXERS[name](config, index))
    if appended and layer.x0_scale is not None:
        nn.init.zeros_(layer.x0_scale)
    return layer
