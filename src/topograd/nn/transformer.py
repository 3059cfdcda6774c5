"""A transformer of a published family as a stack that decodes: Llama, Mistral, Qwen, GPT-2, Gemma.

    h ← h + W_o Attn(norm(h));   h ← h + W_down (act(W_gate x) ⊙ W_up x),  x = norm(h)      per layer
    z = cap((W + W_k) norm(h)),  norm(x) = x / sqrt(mean(x²) + ε) ⊙ gain

with what the family adds to that (`transformer_config.py`): rotary or learned positions, grouped keys and
values, windows, biases, norms of queries and keys, norms behind attention and MLP. "LLaMA" (Touvron et al.
2023) §2.2, "Qwen3 Technical Report" (2025) §2, GPT-2 (Radford et al. 2019) §2.3, "Gemma 2" (2024) §2,
"Gemma 3" (2025) §2. The rotation of a head of width d at position p, "RoFormer" (Su et al. 2021) eq. 34:

    (x_i, x_{i+d/2}) ← (x_i c_i - x_{i+d/2} s_i,  x_{i+d/2} c_i + x_i s_i),   c, s = cos, sin of p ω_i

The logits of a whole sequence in float32 on a CPU are those of transformers bit for bit: the same operations
in the same order on the same memory (a single row's last bits depend on whether a matrix starts at a multiple
of 16 bytes, there as here). In float64 norms and rotary tables are too, where transformers has float32.
Learned positions are added by the first layer, because the embedding does not know where its tokens stand:
another stage that hears the embedding hears no positions. No dropout. Cost per token and layer, in
multiply-adds forward: 2 (heads + kv_heads) head_width width + 3 mlp_width width (2 if not gated), and
2 context heads head_width for attention. For decoding see `transformer_decoding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.heads import Head
from topograd.nn.layer_state import KVState
from topograd.nn.stack import Bus, Projection, Stack
from topograd.nn.transformer_attention import (
    capped_attention,
    check_reach,
    repeated,
    rope_frequencies,
    rotary_tables,
    seen,
    turned,
)
from topograd.nn.transformer_config import TransformerConfig
from topograd.nn.transformer_decoding import DecodingTransformer

INIT_STD = 0.02


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh, written out as GPT-2 has it; the fused one rounds otherwise."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh, fused."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) ⊙ gain, the gain being the weight or 1 + the weight; in float32 or better."""

    def __init__(self, width: int, epsilon: float, around_one: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if around_one else torch.ones(width))
        self.epsilon, self.around_one = epsilon, around_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.around_one:
            return (unit * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * unit.to(x.dtype)


def norm_of(config: TransformerConfig, width: int) -> RMSNorm | nn.LayerNorm:
    """The family's norm."""
    if config.traits.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, config.traits.norm == "rms-around-one")


class TransposedLinear(nn.Module):
    """y = x W + b with W (in, out), as GPT-2 keeps it: the last bits of a product depend on the layout."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return y.view(*x.shape[:-1], -1)


def linear_of(
    config: TransformerConfig, inputs: int, outputs: int, bias: bool
) -> nn.Linear | TransposedLinear:
    """A linear map in the family's layout."""
    if config.traits.transposed:
        return TransposedLinear(inputs, outputs, bias)
    return nn.Linear(inputs, outputs, bias=bias)


class TransformerAttention(nn.Module):
    """Causal attention over the whole past or a window of it."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_width
        self.window, self.scale = config.window(index), config.attention_scale
        self.local = self.window > 0 and config.local_rope_base is not None
        self.rotary = not config.traits.learned_positions
        self.capped, self.softcap = config.traits.softcapped_attention, config.attention_softcap
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        if config.traits.learned_positions:
            self.qkv = linear_of(config, config.width, queries + 2 * keys, config.qkv_bias)
        else:
            self.query = linear_of(config, config.width, queries, config.qkv_bias)
            self.key = linear_of(config, config.width, keys, config.qkv_bias)
            self.value = linear_of(config, config.width, keys, config.qkv_bias)
        self.output = linear_of(config, queries, config.width, config.output_bias)
        self.query_norm = norm_of(config, self.head_width) if config.qk_norm else None
        self.key_norm = norm_of(config, self.head_width) if config.qk_norm else None

    def forward(self, x: Tensor, bus: Bus, state: KVState | None = None) -> Tensor:
        split = (*x.shape[:2], -1, self.head_width)
        if self.rotary:
            q, k, v = (linear(x).view(split) for linear in (self.query, self.key, self.value))
        else:
            q, k, v = (part.view(split) for part in self.qkv(x).chunk(3, dim=-1))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.rotary:
            cos, sin = bus.extras["local" if self.local else "rotary"]
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        if state is not None:
            k, v = state.append(k, v, bus.positions)
        y = self._attend(q, k, v, seen(bus, k.shape[2], self.window))
        return self.output(y.transpose(1, 2).reshape(*x.shape[:2], -1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.capped:
            return capped_attention(q, k, v, mask, self.scale, self.softcap)
        share = self.heads // self.kv_heads
        grouped = share > 1 and mask is None and self.head_width <= 256  # as transformers chooses
        if not grouped:
            k, v = repeated(k, share), repeated(v, share)
        causal = mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, is_causal=causal, enable_gqa=grouped
        )


class TransformerMLP(nn.Module):
    """down(act(gate x) ⊙ up x), or down(act(up x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        gated, bias = config.traits.gated, config.mlp_bias
        self.gate = linear_of(config, config.width, config.mlp_width, bias) if gated else None
        self.up = linear_of(config, config.width, config.mlp_width, bias)
        self.down = linear_of(config, config.mlp_width, config.width, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class TransformerLayer(nn.Module):
    """One layer: attend, transform; the first adds learned positions, where the family has them."""

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.positions: nn.Embedding | None = None
        if config.traits.learned_positions and index == 0:
            self.positions = table(config.context, config.width)
        self.attention_norm = norm_of(config, config.width)
        self.attention = TransformerAttention(config, index)
        self.mlp_norm = norm_of(config, config.width)
        self.mlp = TransformerMLP(config)
        post = config.traits.post_norms
        self.attention_post_norm = norm_of(config, config.width) if post else None
        self.mlp_post_norm = norm_of(config, config.width) if post else None

    def forward(self, h: Tensor, bus: Bus, state: KVState | None = None) -> Tensor:
        if self.positions is not None:
            h = h + self.positions(bus.positions.clamp(max=len(self.positions.weight) - 1))
        y = self.attention(self.attention_norm(h), bus, state)
        h = h + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(h))
        return h + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))

    def new_state(self, batch: int, capacity: int) -> KVState:
        a, like = self.attention, self.attention.output.weight
        return KVState(batch, a.kv_heads, capacity, a.head_width, like.device, like.dtype)


class Transformer(Stack):
    """The stack, with random weights; `models.families` fills it. It may be built on the meta device."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = table(config.vocab, config.width)
        self.layers = nn.ModuleList(TransformerLayer(config, i) for i in range(config.layers))
        self.norm = norm_of(config, config.width)
        weight = self.embedding.weight if config.tied else table(config.vocab, config.width).weight
        self.head = Head(weight, softcap=config.softcap)
        self.apply(_initialize)
        # Not buffers: converting the stack to half precision must not round them.
        self.frequencies = rope_frequencies(config)
        self.local_frequencies = None if config.local_rope_base is None else rope_frequencies(config, True)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x = self.embedding(inputs)
        return x * x.new_tensor(self.config.width**0.5) if self.config.traits.scaled_embedding else x

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        positions = super().bus(x0, inputs, offset).positions
        extras: dict[str, object] = {"seen": {}}
        if self.config.traits.learned_positions:
            check_reach(self.config, inputs, offset)
        else:
            extras["rotary"] = rotary_tables(self.frequencies, positions, x0)
            if self.local_frequencies is not None:
                extras["local"] = rotary_tables(self.local_frequencies, positions, x0)
        return Bus(x0, inputs, positions, extras)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return self.head(self.norm(h), stage, rows)

    def projection(self, stage: int) -> Projection:
        return self.head.projection(self.norm, stage)

    def for_decoding(self) -> Stack:
        if self.embedding.weight.dtype in (torch.float32, torch.float64):
            return DecodingTransformer(self)
        return super().for_decoding()

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        return self.head.add(stages, rank)

    def has_head(self, stage: int) -> bool:
        return self.head.has_delta(stage)

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return self.head.own_parameters(stage)

    def append_layers(self, count: int, index: int | None = None) -> None:
        """Put new layers behind the last one; they are the identity until they learn.

        `index` is what the first new one counts as, where that is not its place: see `GPT.append_layers`.
        """
        self.config = replace(self.config, layers=self.config.layers + count)
        like = self.embedding.weight
        first_new = len(self.layers) if index is None else index
        for i in range(first_new, first_new + count):
            layer = TransformerLayer(self.config, i).to(like.device, like.dtype)
            layer.apply(_initialize)
            for linear in (layer.attention.output, layer.mlp.down):
                nn.init.zeros_(linear.weight)
            self.layers.append(layer)

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def last_stage(self) -> int:
        return self.head.last_stage


def table(rows: int, width: int) -> nn.Embedding:
    """An embedding with small random weights."""
    weight = torch.empty(rows, width)
    if not weight.is_meta:  # where drawing nothing takes seconds
        nn.init.normal_(weight, std=INIT_STD)
    return nn.Embedding(rows, width, _weight=weight)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | TransposedLinear) and not module.weight.is_meta:
        nn.init.normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
