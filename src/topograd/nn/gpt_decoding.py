"""The GPT of `gpt.py`, rewritten for decoding: the same function of the same weights in fewer operations.

A small model that decodes one token spends more time between operations than in them. So, per layer,

    q, k, v       one matrix, its rows for q and k reordered so that a pair (x_i, x_{i+half}) is one complex
                  number; a rotation is then one complex product
    norm(x)       x / |x|; the factor sqrt(width) is in the next matrix, that of q and k in attention's scale
    g V[token]    the gate is in the table
    h + W x       one operation, where the matrix allows it

and the rotations and the mask are made once for all layers. Tested against `gpt.py` in float64. Limits: for
inference, and for the weights as they are now: make another when they have changed. norm(x) here has no ε,
but 0 still gives 0.
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

if TYPE_CHECKING:
    from topograd.nn.blocks import Block
    from topograd.nn.gpt import GPT

_TINY = 1e-30  # |x| of x = 0, so that 0 / |x| is 0


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(_TINY)


class DecodingBlock(nn.Module):
    """A `Block` in fewer operations."""

    takes_packed = True

    def __init__(self, block: Block) -> None:
        super().__init__()
        a, mlp = block.attention, block.mlp
        self.heads, self.kv_heads, self.head_width = a.heads, a.kv_heads, a.head_width
        self.window, self.width = a.window, a.query.in_features
        self.rotated = (a.heads + a.kv_heads) * a.head_width
        self.key_pairs, self.key_scale = True, a.head_width**-0.5  # beside the keys of a `Block`
        scale = self.width**0.5
        matrices = [paired(m.weight.detach(), a.head_width) for m in (a.query, a.key)]
        self.qkv = PackedLinear(scale * torch.cat([*matrices, a.value.weight.detach()]))
        self.values = None
        if a.value_embedding is not None:
            self.values = a.value_gate.detach() * a.value_embedding.weight.detach()
        self.output = PackedLinear(a.output.weight)
        self.up = PackedLinear(scale * mlp.up.weight.detach())
        self.gate = None if mlp.gate is None else PackedLinear(scale * mlp.gate.weight.detach())
        self.down = PackedLinear(mlp.down.weight)
        self.x0_scale = None if block.x0_scale is None else float(block.x0_scale.detach())

    def forward(self, h: Tensor, bus: Bus, state: KVState | PackedStates | None = None) -> Tensor:
        shape = h.shape
        if self.x0_scale is not None:
            h = torch.add(h, bus.x0, alpha=self.x0_scale)
        rows = h.reshape(-1, self.width)
        rows = self.output.onto(rows, self._attend(unit(rows), bus, state))
        return self.down.onto(rows, self._hidden(unit(rows))).view(shape)

    def _hidden(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return torch.relu_(self.up(x)).square_()
        return F.silu(self.gate(x)).mul_(self.up(x))

    def _attend(self, x: Tensor, bus: Bus, state: KVState | PackedStates | None) -> Tensor:
        qkv = self.qkv(x)
        rotated = unit(rotate_pairs(qkv[:, : self.rotated], bus, self.head_width)).transpose(1, 2)
        q, k = rotated[:, : self.heads], rotated[:, self.heads :]
        v = qkv[:, self.rotated :]
        if self.values is not None:
            v = v + F.embedding(bus.inputs.reshape(-1), self.values)
        v = v.view(*bus.inputs.shape, self.kv_heads, self.head_width).transpose(1, 2)
        return look_back(q, k, v, bus, state, self._look)

    def _look(self, q: Tensor, k: Tensor, v: Tensor, bus: Bus) -> Tensor:
        return attend(q, k, v, bus, self.window, self.head_width**0.5)

    def new_state(self, batch: int, capacity: int) -> KVState:
        like = self.qkv.matrix
        return KVState(batch, self.kv_heads, capacity, self.head_width, like.device, like.dtype)


class DecodingGPT(Stack):
    """The stack that `GPT.for_decoding` gives."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.config = gpt.config
        self.embedding = gpt.embedding.weight.detach()
        self.previous = None if gpt.previous is None else gpt.previous.weight.detach()
        self.layers = nn.ModuleList(DecodingBlock(block) for block in gpt.layers)  # type: ignore[arg-type]
        for name, relay in gpt.own_relays().items():
            self.add_relay(name, relay)
        self.head = gpt.head
        self.scale = gpt.config.width**0.5
        self._heads: dict[int, PackedLinear] = {}
        # (a + ib)(cos - i sin), as `rotate` turns
        self.rotary = RotaryCache(gpt.frequencies, self.embedding.dtype, -1, gpt.config.context + 1)

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
        return unit(x).mul_(self.scale)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        return self.rotary.bus(x0, inputs, offset)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = unit(h.reshape(-1, h.shape[-1]))
        bias = self.head.bias
        if rows is not None:
            some = F.linear(
                flat.mul_(self.scale), self.head.matrix(stage, rows), None if bias is None else bias[rows]
            )
            return cap(some, self.head.softcap).view(*h.shape[:-1], -1)
        factors = self.head.low_rank(stage)
        # stages without a delta, or with one of low rank, share one matrix
        which = stage if self.head.has_delta(stage) and factors is None else -1
        if which not in self._heads:
            self._heads[which] = PackedLinear(self.scale * self.head.matrix(which).detach(), bias)
        z = self._heads[which](flat)
        if factors is not None:
            up, down = factors
            z.addmm_((self.scale * flat) @ down.t(), up.t())
        return cap(z, self.head.softcap).view(*h.shape[:-1], -1)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage
