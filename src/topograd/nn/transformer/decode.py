"""The decoding form of a transformer: the same function of the same weights in fewer operations.

A small model that decodes one token spends more time between operations than in them. So, per layer,

    q, k, v       one matrix, its rows for q and k reordered so that a pair (x_i, x_{i+half}) is one complex
                  number; a rotation is then one complex product
    gate, up      one matrix
    norm(x)       its gain g, and a LayerNorm's bias b, are in the matrix behind it: (W g) u + W b;
                  without a gain the unit is x / |x|, and sqrt(width) is in the matrix or in attention's scale
    g V[token]    the gate of value embeddings is in the table
    h + W x       one operation, where nothing stands between

and the rotations and masks are made once for all layers. Keys and queries whose rows are reordered alike have
the same products. Matrices are packed for small batches (`mkl_linear.py`). Tested against `stack.py` in
float64. Limits: for inference, and for the weights as they are now: make another when they have changed.
Norms without a gain have no ε here, but 0 still gives 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.heads import cap
from topograd.nn.host_numbers import largest
from topograd.nn.layer_state import KVState
from topograd.nn.mkl_linear import MklLinear
from topograd.nn.slots import KVSlots
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.attention import attention_mask, capped_attention, causal_mask, check_reach
from topograd.nn.transformer.parts import Linear, Norm, gain_of, matrix_of, relu2

if TYPE_CHECKING:
    from topograd.nn.transformer.block import Block
    from topograd.nn.transformer.config import BlockConfig
    from topograd.nn.transformer.stack import Transformer

REACH = 1024
"""Positions whose rotations are computed at first; the table grows on demand."""
_TINY = 1e-30  # |x| of x = 0, so that 0 / |x| is 0


# Rotations as complex numbers


def paired(weight: Tensor, head_width: int) -> Tensor:
    """The rows of a matrix (heads · head width, ...) with each pair (i, i + half) of a head adjacent."""
    order = torch.arange(head_width).view(2, head_width // 2).t().flatten()
    return weight.view(-1, head_width, *weight.shape[1:])[:, order].flatten(0, 1)


class RotaryCache:
    """exp(± i position frequency) of every position, growing on demand; `sign` is the direction."""

    def __init__(self, frequencies: Tensor, dtype: torch.dtype, sign: int, reach: int) -> None:
        self.frequencies, self.sign = frequencies, sign
        self.dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._extend(reach)

    def _extend(self, positions: int) -> None:
        self.positions = torch.arange(positions, device=self.frequencies.device)
        angles = self.positions[:, None] * self.frequencies
        self.table = torch.polar(torch.ones_like(angles), self.sign * angles).to(self.dtype)

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor) -> LayerContext:
        """The layer context of a decoding form, with the rotations of its positions."""
        stop = largest(offset) + 1 if isinstance(offset, Tensor) else offset + inputs.shape[1]
        if stop > len(self.positions):
            self._extend(2 * stop)
        if isinstance(offset, Tensor):
            return LayerContext(x0, inputs, offset, self.table[offset][:, :, None])
        here = slice(offset, stop)
        return LayerContext(x0, inputs, self.positions[here], self.table[here, None])


def rotate_pairs(x: Tensor, ctx: LayerContext, head_width: int, local: bool = False) -> Tensor:
    """Heads (batch, time, heads, head width) of x (batch · time, heads · head width), rotated."""
    batch, time = ctx.inputs.shape
    pairs = torch.view_as_complex(x.view(batch, time, -1, head_width // 2, 2))
    return torch.view_as_real(pairs * (ctx.local_rotary if local else ctx.rotary)).flatten(3)


# Attention over a cache


Attend = Callable[[Tensor, Tensor, Tensor, LayerContext], Tensor]
"""Attention of queries (batch, heads, time, head width): (batch · time, heads · head width)."""


def append_and_attend(
    q: Tensor, k: Tensor, v: Tensor, ctx: LayerContext, state: KVState | KVSlots | None, attend: Attend
) -> Tensor:
    """Attention over these keys and values and all that the state holds, sequence by sequence."""
    if isinstance(state, KVSlots):
        assert ctx.spans is not None, "slots are read by spans"
        parts = []
        for group, own in zip(ctx.spans.attended, ctx.spans.group_contexts, strict=True):
            keys, values = state.append(group, k, v)
            parts.append(group.pack(attend(group.unpack(q, 2), keys, values, own)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if state is not None:
        k, v = state.append(k, v)
    return attend(q, k, v, ctx)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, ctx: LayerContext, window: int, scale: float) -> Tensor:
    """Attention of queries (batch, heads, time, head width): (batch · time, heads · head width)."""
    batch, heads, time, width = q.shape
    total, even = k.shape[2], ctx.positions.dim() == 1
    free = even and not 0 < window < total and time in (1, total)
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if free else _additive_mask(ctx, total, window),
        is_causal=free and time > 1,  # a mask would have all pairs computed, this only half of them
        scale=scale,
        enable_gqa=k.shape[1] != heads,
    )
    return y.transpose(1, 2).reshape(batch * time, heads * width)


def _additive_mask(ctx: LayerContext, total: int, window: int) -> Tensor:
    """0 where a query may attend and -inf elsewhere; made once for all layers of one window."""
    masks = ctx.additive_masks
    if (total, window) not in masks:
        visible = attention_mask(ctx.positions, total, window)
        assert visible is not None
        zeros = torch.zeros(visible.shape, dtype=ctx.x0.dtype, device=visible.device)
        masks[total, window] = zeros.masked_fill_(~visible, float("-inf"))
    return masks[total, window]


# Norms and matrices


class Unit:
    """A norm without gain and bias.

    x / sqrt(mean(x²) + ε), behind x - mean(x) for a LayerNorm; where the model's norm has no gain, x / |x|.
    """

    def __init__(self, config: BlockConfig, like: Tensor) -> None:
        kind = config.traits.norm
        self.plain, self.centred, self.number = kind == "unit", kind == "layer", config.norm_eps
        self.epsilon = torch.full((1,), config.norm_eps, dtype=like.dtype, device=like.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], eps=self.number)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if self.plain:
            return x / size.clamp_min_(_TINY)
        return x * torch.addcmul(self.epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()

    def gain(self, norm: Norm, width: int) -> tuple[Tensor, Tensor | None]:
        """What a norm of `width` numbers is over this unit: the factor, and what is added."""
        gain, shift = gain_of(norm)
        return (self.epsilon.new_full((width,), width**0.5) if gain is None else gain), shift


def joined(
    linears: list[Linear],
    gains: tuple[Tensor, Tensor | None] | None = None,
    num_paired: int = 0,
    head_width: int = 0,
) -> MklLinear:
    """Some maps as one behind a norm's unit; the rows of the first `num_paired` are in pairs."""
    weights = [matrix_of(linear) for linear in linears]
    biases = [
        torch.zeros_like(weight[:, 0]) if linear.bias is None else linear.bias.detach()
        for linear, weight in zip(linears, weights, strict=True)
    ]
    for place in range(num_paired):
        weights[place], biases[place] = (paired(x[place], head_width) for x in (weights, biases))
    weight, bias = torch.cat(weights), torch.cat(biases)
    plain = all(linear.bias is None for linear in linears)
    if gains is not None:
        gain, shift = gains
        if shift is not None:
            bias, plain = bias + weight @ shift, False
        weight = weight * gain
    return MklLinear(weight, None if plain else bias)


class DecodingBlock(nn.Module):
    """A `Block` in fewer operations."""

    supports_varlen = True

    def __init__(self, block: Block, unit: Unit, width: int) -> None:
        super().__init__()
        a, mlp = block.attention, block.mlp
        self.heads, self.kv_heads, self.head_width = a.heads, a.kv_heads, a.head_width
        self.window, self.local, self.rotary = a.window, a.local, a.rotary
        self.traits, self.softcap = a.traits, a.softcap
        self.rotated = (a.heads + a.kv_heads) * a.head_width
        self.unit = unit
        self.unit_behind = a.traits.norm_behind_rotation  # queries and keys are then vectors of length 1
        self.scale = a.head_width**0.5 if a.scale is None else a.scale
        self.positions = None if block.positions is None else block.positions.weight.detach()
        self.x0_scale = None if block.x0_scale is None else float(block.x0_scale.detach())
        maps = [a.query, a.key, a.value] if a.rotary else [a.qkv]
        self.qkv = joined(maps, unit.gain(block.attention_norm, width), 2 if a.rotary else 0, a.head_width)
        self.qk_gains: Tensor | None = None
        if not self.unit_behind and a.query_norm is not None and a.key_norm is not None:
            gains = ((a.query_norm, a.heads), (a.key_norm, a.kv_heads))
            each = [(unit.gain(norm, a.head_width)[0], count) for norm, count in gains]
            self.qk_gains = torch.cat([paired(g, a.head_width).expand(count, -1) for g, count in each])
        self.values: Tensor | None = None
        if a.value_embedding is not None:
            self.values = a.value_gate.detach() * a.value_embedding.weight.detach()
        self.output = joined([a.output])
        self.gated = mlp.gate is not None
        squared: Callable[[Tensor], Tensor] = lambda x: torch.relu_(x).square_()  # noqa: E731  in place
        self.activation = squared if mlp.activation is relu2 else mlp.activation
        self.hidden = joined(
            [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up], unit.gain(block.mlp_norm, width)
        )
        self.down = joined([mlp.down])
        post = (block.attention_post_norm, block.mlp_post_norm)
        self.attention_gain, self.mlp_gain = (None if p is None else unit.gain(p, width)[0] for p in post)

    def forward(self, h: Tensor, ctx: LayerContext, state: KVState | KVSlots | None = None) -> Tensor:
        if self.positions is not None:
            h = h + F.embedding(ctx.positions.clamp(max=len(self.positions) - 1), self.positions)
        if self.x0_scale is not None:
            h = torch.add(h, ctx.x0, alpha=self.x0_scale)
        rows = h.reshape(-1, h.shape[-1])
        rows = self._add(rows, self.output, self._attend(self.unit(rows), ctx, state), self.attention_gain)
        x = self.hidden(self.unit(rows))
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = self.activation(gate).mul_(up)
        else:
            x = self.activation(x)
        return self._add(rows, self.down, x, self.mlp_gain).view(h.shape)

    def _add(self, rows: Tensor, linear: MklLinear, x: Tensor, gain: Tensor | None) -> Tensor:
        """rows + W x, or rows + norm(W x) where the family norms what it adds."""
        return linear.onto(rows, x) if gain is None else torch.addcmul(rows, self.unit(linear(x)), gain)

    def _attend(self, x: Tensor, ctx: LayerContext, state: KVState | KVSlots | None) -> Tensor:
        qkv = self.qkv(x)
        shape = (*ctx.inputs.shape, -1, self.head_width)
        both = qkv[:, : self.rotated]
        if self.qk_gains is not None:
            both = self.unit(both.view(-1, self.heads + self.kv_heads, self.head_width)) * self.qk_gains
            both = both.view(-1, self.rotated)
        both = rotate_pairs(both, ctx, self.head_width, self.local) if self.rotary else both.view(shape)
        if self.unit_behind:
            both = self.unit(both)
        both = both.transpose(1, 2)
        q, k = both[:, : self.heads], both[:, self.heads :]
        v = qkv[:, self.rotated :]
        if self.values is not None:
            v = v + F.embedding(ctx.inputs.reshape(-1), self.values)
        return append_and_attend(q, k, v.view(shape).transpose(1, 2), ctx, state, self._attention)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: LayerContext) -> Tensor:
        if not self.traits.softcapped_attention:
            return fused_attention(q, k, v, ctx, self.window, self.scale)
        mask = causal_mask(ctx, k.shape[2], self.window, self.traits.whole_window)
        y = capped_attention(q, k, v, mask, self.scale, self.softcap)
        return y.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def new_state(self, batch: int, capacity: int) -> KVState:
        like = self.qkv.matrix
        return KVState(batch, self.kv_heads, capacity, self.head_width, like.device, like.dtype)

    def new_slots(self) -> KVSlots:
        """The keys and values of every sequence of a cache."""
        like = self.qkv.matrix
        return KVSlots(self.kv_heads, self.head_width, like.dtype, like.device)


class DecodingTransformer(Stack):
    """The stack that `Transformer.for_decoding` gives."""

    def __init__(self, stack: Transformer) -> None:
        super().__init__()
        self.config = config = stack.config
        traits = config.traits
        self.embedding, self.head = stack.embedding.weight.detach(), stack.head
        self.previous = None if stack.previous is None else stack.previous.weight.detach()
        scaled = traits.scaled_embedding or traits.normed_embedding  # the latter behind its unit
        self.embedding_scale = config.width**0.5 if scaled else None
        for name, relay in stack.learned_relays().items():
            self.add_relay(name, relay)
        like = self.embedding
        self.unit = Unit(config, like)
        self.gain, self.shift = self.unit.gain(stack.norm, config.width)
        blocks = (DecodingBlock(block, self.unit, config.width) for block in stack.layers)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(blocks)
        tables = (stack.frequencies, stack.local_frequencies)
        wide = [frequencies.to(like) for frequencies in tables if frequencies is not None]
        sign, reach = (-1, config.context + 1) if traits.half_tables else (1, REACH)
        self.rotary = [RotaryCache(frequencies, like.dtype, sign, reach) for frequencies in wide]
        self._heads: dict[int, MklLinear] = {}

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x = F.embedding(inputs, self.embedding)
        if self.previous is not None:
            if previous is None:
                x[:, 1:] += F.embedding(inputs[:, :-1], self.previous)
            else:
                before = previous[:, None]
                if inputs.shape[1] > 1:
                    before = torch.cat((before, inputs[:, :-1]), dim=1)
                x = x.add_(F.embedding(before, self.previous))
        if self.config.traits.normed_embedding:
            x = self.unit(x)
        return x if self.embedding_scale is None else x.mul_(self.embedding_scale)

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        if self.config.traits.learned_positions:
            check_reach(self.config, inputs, offset)
        ctx, *local = [cache.layer_context(x0, inputs, offset) for cache in self.rotary]
        return replace(ctx, local_rotary=local[0].rotary) if local else ctx

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = self.unit(h.reshape(-1, h.shape[-1]))
        if rows is not None:
            return self.head(self._normed(flat), stage, rows).view(*h.shape[:-1], -1)
        factors = self.head.low_rank(stage)
        # stages without a delta, or with one of low rank, share one matrix
        which = stage if self.head.has_delta(stage) and factors is None else -1
        if which not in self._heads:
            matrix, bias = self.head.matrix(which).detach(), self.head.bias
            if self.shift is not None:
                bias = matrix @ self.shift if bias is None else bias + matrix @ self.shift
            self._heads[which] = MklLinear(matrix * self.gain, bias)
        z = self._heads[which](flat)
        if factors is not None:
            up, down = factors
            z.addmm_(self._normed(flat) @ down.t(), up.t())
        return cap(z, self.head.softcap).view(*h.shape[:-1], -1)

    def _normed(self, unit: Tensor) -> Tensor:
        return unit * self.gain if self.shift is None else torch.addcmul(self.shift, unit, self.gain)

    @property
    def vocab(self) -> int:
        return len(self.head.weight)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage
