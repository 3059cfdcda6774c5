"""What the decoding forms of models share: rotations as complex numbers, masks made once, attention.

If the rows of a head's matrix are reordered so that the pair (x_i, x_{i+half}) is adjacent, a head is a
vector of complex numbers and a rotation is one product. Keys and queries in the same order have the same
products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.nn.attention import attention_mask
from topograd.nn.layer_state import KVState, PackedStates
from topograd.nn.stack import Bus


@cache
def pair_order(head_width: int) -> Tensor:
    """0, half, 1, half + 1, ..."""
    return torch.arange(head_width).view(2, head_width // 2).t().flatten()


def paired(weight: Tensor, head_width: int) -> Tensor:
    """The rows of a matrix (heads · head width, ...) with each pair (i, i + half) of a head adjacent."""
    order = pair_order(head_width)
    return weight.view(-1, head_width, *weight.shape[1:])[:, order].flatten(0, 1)


class RotaryCache:
    """exp(± i position frequency) of every position, as many as are asked for; `sign` is the direction."""

    def __init__(self, frequencies: Tensor, dtype: torch.dtype, sign: int, reach: int) -> None:
        self.frequencies, self.sign = frequencies, sign
        self.dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._extend(reach)

    def _extend(self, positions: int) -> None:
        self.positions = torch.arange(positions, device=self.frequencies.device)
        angles = self.positions[:, None] * self.frequencies
        self.table = torch.polar(torch.ones_like(angles), self.sign * angles).to(self.dtype)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor) -> Bus:
        """The bus of a decoding form: rotations, and a place for masks."""
        stop = int(offset.max()) + 1 if isinstance(offset, Tensor) else offset + inputs.shape[1]
        if stop > len(self.positions):
            self._extend(2 * stop)
        if isinstance(offset, Tensor):
            return Bus(x0, inputs, offset, {"rotary": self.table[offset][:, :, None], "masks": {}})
        here = slice(offset, stop)
        return Bus(x0, inputs, self.positions[here], {"rotary": self.table[here, None], "masks": {}})


def rotate_pairs(x: Tensor, bus: Bus, head_width: int) -> Tensor:
    """Heads (batch, time, heads, head width) of rows (batch · time, heads · head width) rotated."""
    batch, time = bus.inputs.shape
    pairs = torch.view_as_complex(x.view(batch, time, -1, head_width // 2, 2))
    return torch.view_as_real(pairs * bus.extras["rotary"]).flatten(3)


Look = Callable[[Tensor, Tensor, Tensor, Bus], Tensor]
"""What queries (batch, heads, time, head width) find: (batch · time, heads · head width)."""


def look_back(
    q: Tensor, k: Tensor, v: Tensor, bus: Bus, state: KVState | PackedStates | None, look: Look
) -> Tensor:
    """What queries find in these keys and values and in all that the state, or each row's, remembers."""
    if isinstance(state, PackedStates):
        widths = [each.positions.shape[-1] for each in state.buses]
        parts = zip(*(x.split(widths, dim=2) for x in (q, k, v)), state.states, state.buses, strict=True)
        found = []
        for q, k, v, own, here in parts:
            keys, values = own.append(k, v)
            found.append(look(q, keys, values, here))
        return torch.cat(found)
    if state is not None:
        k, v = state.append(k, v, bus.positions)
    return look(q, k, v, bus)


def attend(q: Tensor, k: Tensor, v: Tensor, bus: Bus, window: int, scale: float) -> Tensor:
    """What queries (batch, heads, time, head width) find: (batch · time, heads · head width)."""
    batch, heads, time, width = q.shape
    total, even = k.shape[2], bus.positions.dim() == 1
    free = even and not 0 < window < total and time in (1, total)
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if free else _mask(bus, total, window),
        is_causal=free and time > 1,  # a mask would have all pairs computed, this only half of them
        scale=scale,
        enable_gqa=k.shape[1] != heads,
    )
    return y.transpose(1, 2).reshape(batch * time, heads * width)


def _mask(bus: Bus, total: int, window: int) -> Tensor:
    """0 where a query may look and -inf elsewhere; made once for all layers of one kind."""
    masks: dict[tuple[int, int], Tensor] = bus.extras["masks"]
    if (total, window) not in masks:
        seen = attention_mask(bus.positions, total, window)
        assert seen is not None
        zeros = torch.zeros(seen.shape, dtype=bus.x0.dtype, device=seen.device)
        masks[total, window] = zeros.masked_fill_(~seen, float("-inf"))
    return masks[total, window]
