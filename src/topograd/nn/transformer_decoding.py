"""The transformer of `transformer.py`, rewritten for decoding: the same function in fewer operations.

    q, k, v       one matrix, its rows for q and k reordered so that a pair (x_i, x_{i+half}) is one complex
                  number; a rotation is then one complex product (`decoding.py`)
    gate, up      one matrix
    norm(x)       its gain, and a LayerNorm's bias, are in the matrix behind it: W (g ⊙ u + b) = (W g) u + W b
    h + W x       one operation, where nothing stands between

and matrices are packed for few rows (`packed.py`). Tested against `transformer.py` in float64. Limits: for
inference, and for the weights as they are now: make another when they have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.decoding import RotaryCache, attend, look_back, paired, rotate_pairs
from topograd.nn.heads import cap
from topograd.nn.layer_state import KVState, PackedStates
from topograd.nn.packed import PackedLinear
from topograd.nn.stack import Bus, Stack
from topograd.nn.transformer_attention import capped_attention, check_reach, seen

if TYPE_CHECKING:
    from topograd.nn.transformer import RMSNorm, Transformer, TransformerLayer, TransposedLinear

REACH = 1024
"""Positions whose rotations are made at first; more are made when they are asked for."""


class Unit:
    """A norm without gain and bias: x / sqrt(mean(x²) + ε), behind x - mean(x) for a LayerNorm."""

    def __init__(self, epsilon: float, centred: bool, like: Tensor) -> None:
        self.centred, self.number = centred, epsilon
        self.epsilon = torch.full((1,), epsilon, dtype=like.dtype, device=like.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], eps=self.number)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()


def gain_of(norm: RMSNorm | nn.LayerNorm) -> tuple[Tensor, Tensor | None]:
    """What a norm multiplies its unit by, and what it adds."""
    weight = norm.weight.detach()
    if isinstance(norm, nn.LayerNorm):
        return weight, norm.bias.detach()
    return (1 + weight if norm.around_one else weight), None


def joined(
    linears: list[nn.Linear | TransposedLinear],
    norm: RMSNorm | nn.LayerNorm | None = None,
    turned: int = 0,
    head_width: int = 0,
) -> PackedLinear:
    """Some maps as one behind a norm's unit; of the first `turned` of them the rows are in pairs."""
    weights = [_matrix(linear) for linear in linears]
    biases = [
        torch.zeros_like(weight[:, 0]) if linear.bias is None else linear.bias.detach()
        for linear, weight in zip(linears, weights, strict=True)
    ]
    for place in range(turned):
        weights[place], biases[place] = (paired(x[place], head_width) for x in (weights, biases))
    weight, bias = torch.cat(weights), torch.cat(biases)
    plain = all(linear.bias is None for linear in linears)
    if norm is not None:
        gain, shift = gain_of(norm)
        if shift is not None:
            bias, plain = bias + weight @ shift, False
        weight = weight * gain
    return PackedLinear(weight, None if plain else bias)


def _matrix(linear: nn.Linear | TransposedLinear) -> Tensor:
    """W (out, in)."""
    weight = linear.weight.detach()
    return weight if isinstance(linear, nn.Linear) else weight.t()


class DecodingLayer(nn.Module):
    """A `TransformerLayer` in fewer operations."""

    takes_packed = True

    def __init__(self, layer: TransformerLayer, unit: Unit) -> None:
        super().__init__()
        a, mlp = layer.attention, layer.mlp
        self.heads, self.kv_heads, self.head_width = a.heads, a.kv_heads, a.head_width
        self.window, self.scale, self.local = a.window, a.scale, a.local
        self.capped, self.softcap, self.rotary = a.capped, a.softcap, a.rotary
        self.rotated = (a.heads + a.kv_heads) * a.head_width
        self.key_pairs, self.key_scale = a.rotary, 1.0  # beside the keys of a `TransformerLayer`
        self.unit = unit
        self.positions = None if layer.positions is None else layer.positions.weight.detach()
        turned = 2 if a.rotary else 0
        maps = [a.query, a.key, a.value] if a.rotary else [a.qkv]
        self.qkv = joined(maps, layer.attention_norm, turned, a.head_width)
        self.qk_gains: Tensor | None = None
        if a.query_norm is not None and a.key_norm is not None:
            gains = [(gain_of(a.query_norm)[0], a.heads), (gain_of(a.key_norm)[0], a.kv_heads)]
            self.qk_gains = torch.cat([paired(g, a.head_width).expand(count, -1) for g, count in gains])
        self.output = joined([a.output])
        gate = [] if mlp.gate is None else [mlp.gate]
        self.gated, self.activation = mlp.gate is not None, mlp.activation
        self.hidden = joined([*gate, mlp.up], layer.mlp_norm)
        self.down = joined([mlp.down])
        post = (layer.attention_post_norm, layer.mlp_post_norm)
        self.attention_gain, self.mlp_gain = (None if norm is None else gain_of(norm)[0] for norm in post)

    def forward(self, h: Tensor, bus: Bus, state: KVState | PackedStates | None = None) -> Tensor:
        if self.positions is not None:
            h = h + F.embedding(bus.positions.clamp(max=len(self.positions) - 1), self.positions)
        rows = h.reshape(-1, h.shape[-1])
        rows = self._add(rows, self.output, self._attend(self.unit(rows), bus, state), self.attention_gain)
        x = self.hidden(self.unit(rows))
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = self.activation(gate).mul_(up)
        else:
            x = self.activation(x)
        return self._add(rows, self.down, x, self.mlp_gain).view(h.shape)

    def _add(self, rows: Tensor, linear: PackedLinear, x: Tensor, gain: Tensor | None) -> Tensor:
        """rows + W x, or rows + norm(W x) where the family norms what it adds."""
        return linear.onto(rows, x) if gain is None else torch.addcmul(rows, self.unit(linear(x)), gain)

    def _attend(self, x: Tensor, bus: Bus, state: KVState | PackedStates | None) -> Tensor:
        qkv = self.qkv(x)
        shape = (*bus.inputs.shape, -1, self.head_width)
        if self.rotary:
            both = qkv[:, : self.rotated]
            if self.qk_gains is not None:
                both = self.unit(both.view(-1, self.heads + self.kv_heads, self.head_width)) * self.qk_gains
                both = both.view(-1, self.rotated)
            turns = bus.extras["local"] if self.local else bus
            both = rotate_pairs(both, turns, self.head_width).transpose(1, 2)
        else:
            both = qkv[:, : self.rotated].view(shape).transpose(1, 2)
        q, k = both[:, : self.heads], both[:, self.heads :]
        v = qkv[:, self.rotated :].view(shape).transpose(1, 2)
        return look_back(q, k, v, bus, state, self._look)

    def _look(self, q: Tensor, k: Tensor, v: Tensor, bus: Bus) -> Tensor:
        if not self.capped:
            return attend(q, k, v, bus, self.window, self.scale)
        y = capped_attention(q, k, v, seen(bus, k.shape[2], self.window), self.scale, self.softcap)
        return y.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def new_state(self, batch: int, capacity: int) -> KVState:
        like = self.qkv.matrix
        return KVState(batch, self.kv_heads, capacity, self.head_width, like.device, like.dtype)


class DecodingTransformer(Stack):
    """The stack that `Transformer.for_decoding` gives."""

    def __init__(self, stack: Transformer) -> None:
        super().__init__()
        self.config = config = stack.config
        self.embedding, self.head = stack.embedding.weight.detach(), stack.head
        self.embedding_scale = config.width**0.5 if config.traits.scaled_embedding else None
        for name, relay in stack.own_relays().items():
            self.add_relay(name, relay)
        like = self.embedding
        self.unit = Unit(config.norm_eps, config.traits.norm == "layer", like)
        self.gain, self.shift = gain_of(stack.norm)
        self.layers = nn.ModuleList(DecodingLayer(layer, self.unit) for layer in stack.layers)  # type: ignore[arg-type]
        caches = (
            [stack.frequencies]
            if stack.local_frequencies is None
            else [
                stack.frequencies,
                stack.local_frequencies,
            ]
        )
        wide = [frequencies.to(like) for frequencies in caches]
        self.rotary = [RotaryCache(frequencies, like.dtype, 1, REACH) for frequencies in wide]
        self._heads: dict[int, PackedLinear] = {}

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x = F.embedding(inputs, self.embedding)
        return x if self.embedding_scale is None else x.mul_(self.embedding_scale)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        if self.config.traits.learned_positions:
            check_reach(self.config, inputs, offset)
        bus, *local = [cache.bus(x0, inputs, offset) for cache in self.rotary]
        if local or self.config.traits.softcapped_attention:
            more = {"seen": {}, "local": local[0] if local else bus}
            return Bus(x0, inputs, bus.positions, {**bus.extras, **more})
        return bus

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = self.unit(h.reshape(-1, h.shape[-1]))
        if rows is not None:
            normed = flat * self.gain if self.shift is None else torch.addcmul(self.shift, flat, self.gain)
            return self.head(normed, stage, rows).view(*h.shape[:-1], -1)
        factors = self.head.low_rank(stage)
        # stages without a delta, or with one of low rank, share one matrix
        which = stage if self.head.has_delta(stage) and factors is None else -1
        if which not in self._heads:
            self._heads[which] = self._packed_head(which)
        z = self._heads[which](flat)
        if factors is not None:
            up, down = factors
            normed = flat * self.gain if self.shift is None else torch.addcmul(self.shift, flat, self.gain)
            z.addmm_(normed @ down.t(), up.t())
        return cap(z, self.head.softcap).view(*h.shape[:-1], -1)

    def _packed_head(self, stage: int) -> PackedLinear:
        matrix = self.head.matrix(stage).detach()
        return PackedLinear(matrix * self.gain, None if self.shift is None else matrix @ self.shift)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage
