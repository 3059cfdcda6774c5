"""The Llama of `llama.py`, rewritten for decoding: the same function of the same weights in fewer operations.

q, k and v are one matrix, gate and up another, gains are in the matrices behind them, rotations are complex
products (`decoding.py`), and matrices are packed for few rows (`packed.py`). Tested against `llama.py` in
float64. Limits: for inference, and for the weights as they are now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.decoding import RotaryCache, attend, paired, rotate_pairs
from topograd.nn.layer_state import KVState
from topograd.nn.packed import PackedLinear
from topograd.nn.stack import Bus, Stack

if TYPE_CHECKING:
    from topograd.nn.llama import Llama, LlamaLayer


def normalize(x: Tensor, epsilon: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + ε) over the last dimension; the gain is in the next matrix."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()


class DecodingLlamaLayer(nn.Module):
    """A `LlamaLayer` in fewer operations."""

    epsilon: Tensor

    def __init__(self, layer: LlamaLayer, epsilon: Tensor) -> None:
        super().__init__()
        own = {name: None if p is None else p.detach() for name, p in layer._parameters.items()}
        self.head_width, self.kv_heads = layer.head_width, layer.kv_heads
        self.heads = layer.kv_heads * layer.share
        self.rotated = (self.heads + self.kv_heads) * self.head_width
        self.epsilon = epsilon
        width = self.head_width

        def joined(names: tuple[str, ...], turned: int, gain: Tensor | None) -> PackedLinear:
            """Some matrices as one, the first `turned` of them in pairs, behind a gain."""
            weights, biases = [], []
            for place, name in enumerate(names):
                weight, bias = own[name], own[f"{name}_bias"]
                assert weight is not None, "a layer has all its matrices"
                bias = torch.zeros_like(weight[:, 0]) if bias is None else bias
                weights.append(paired(weight, width) if place < turned else weight)
                biases.append(paired(bias, width) if place < turned else bias)
            weight = torch.cat(weights) if gain is None else torch.cat(weights) * gain
            plain = all(own[f"{name}_bias"] is None for name in names)
            return PackedLinear(weight, None if plain else torch.cat(biases))

        self.qkv = joined(("query", "key", "value"), 2, own["attention_gain"])
        self.output = joined(("output",), 0, None)
        self.hidden = joined(("gate", "up"), 0, own["mlp_gain"])
        self.down = joined(("down",), 0, None)

    def forward(self, h: Tensor, bus: Bus, state: KVState | None = None) -> Tensor:
        rows = h.reshape(-1, h.shape[-1])
        rows = self.output.onto(rows, self._attend(normalize(rows, self.epsilon), bus, state))
        gate, up = self.hidden(normalize(rows, self.epsilon)).chunk(2, dim=-1)
        return self.down.onto(rows, F.silu(gate).mul_(up)).view(h.shape)

    def _attend(self, x: Tensor, bus: Bus, state: KVState | None) -> Tensor:
        qkv = self.qkv(x)
        rotated = rotate_pairs(qkv[:, : self.rotated], bus, self.head_width).transpose(1, 2)
        q, k = rotated[:, : self.heads], rotated[:, self.heads :]
        v = qkv[:, self.rotated :].view(*bus.inputs.shape, self.kv_heads, self.head_width).transpose(1, 2)
        if state is not None:
            k, v = state.append(k, v, bus.positions)
        return attend(q, k, v, bus, 0, self.head_width**-0.5)

    def new_state(self, batch: int, capacity: int) -> KVState:
        like = self.qkv.matrix
        return KVState(batch, self.kv_heads, capacity, self.head_width, like.device, like.dtype)


class DecodingLlama(Stack):
    """The stack that `Llama.for_decoding` gives."""

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.embedding, self.head = llama.embedding, llama.head
        for name, relay in llama.own_relays().items():
            self.add_relay(name, relay)
        self.gain = llama.gain.detach()
        self.epsilon = torch.full((1,), llama.epsilon, dtype=self.gain.dtype, device=self.gain.device)
        self.layers = nn.ModuleList(DecodingLlamaLayer(layer, self.epsilon) for layer in llama.layers)  # type: ignore[arg-type]
        self.rotary = RotaryCache(llama.frequencies, self.gain.dtype, 1, 1024)
        self._heads: dict[int, PackedLinear] = {}

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.embedding(inputs).detach()

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        return self.rotary.bus(x0, inputs, offset)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = normalize(h.reshape(-1, h.shape[-1]), self.epsilon)
        if rows is not None:
            return self.head(flat * self.gain, stage, rows).view(*h.shape[:-1], -1)
        which = stage if self.head.has_delta(stage) else -1  # stages without a delta share one matrix
        if which not in self._heads:
            self._heads[which] = PackedLinear(self.head.matrix(stage).detach() * self.gain, self.head.bias)
        return self._heads[which](flat).view(*h.shape[:-1], -1)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage
