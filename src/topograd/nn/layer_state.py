"""Decoding states of layers: KV caches and histories.

A state belongs to a batch of equally long sequences. Entry t of a buffer belongs to position t, so
`truncate(length)` only sets the length. A recurrent layer's state rolls back to a snapshot instead
(`mamba/recurrent.py`). Sequences of different lengths share the buffers of
`nn/slots.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from topograd.errors import StackError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class LayerState(Protocol):
    """The state of a layer between tokens."""

    def truncate(self, length: int) -> int:
        """Roll back to `length` positions, or fewer; returns how many remain. The rest must run again."""

    def copy(self) -> Self:
        """An independent copy."""


FIRST = 256
"""Positions that a buffer has room for at first; it doubles until its capacity."""


def grown(buffer: Tensor, dim: int, wanted: int, capacity: int) -> Tensor:
    """`buffer` with room for `wanted` positions along `dim`: itself, or a larger copy whose rest is zero.

    Zeros: a masked position has weight 0, and 0 times uninitialized memory could be NaN.
    """
    room = buffer.shape[dim]
    if wanted <= room:
        return buffer
    shape = list(buffer.shape)
    shape[dim] = min(capacity, max(wanted, 2 * room, FIRST))
    larger = buffer.new_zeros(shape)
    larger.narrow(dim, 0, room).copy_(buffer)
    return larger


class KVState:
    """Keys and values of shape (batch, heads, positions, head width), filled up to `length`."""

    def __init__(
        self, batch: int, heads: int, capacity: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        import torch

        self.capacity = capacity
        room = min(capacity, FIRST)
        self.keys = torch.zeros(batch, heads, room, width, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions; returns all the keys and values so far (views)."""
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            allowed = f"at least {stop}, the positions so far"
            raise StackError(setting="capacity", given=self.capacity, allowed=allowed)
        self.keys = grown(self.keys, 2, stop, self.capacity)
        self.values = grown(self.values, 2, stop, self.capacity)
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def truncate(self, length: int) -> int:
        self.length = min(self.length, length)
        return self.length

    def copy(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.capacity, twin.length = self.capacity, self.length
        twin.keys, twin.values = self.keys.clone(), self.values.clone()
        return twin


class History:
    """Values of shape (batch, positions, ...) so far; the buffer is made at the first append."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._values: Tensor | None = None

    def append(self, values: Tensor) -> Tensor:
        """Store new positions; returns all so far (a view)."""
        if self._values is None:
            self._values = values.new_zeros(len(values), min(self.capacity, FIRST), *values.shape[2:])
        stop = self.length + values.shape[1]
        self._values = grown(self._values, 1, stop, self.capacity)
        self._values[:, self.length : stop] = values
        self.length = stop
        return self._values[:, :stop]

    def truncate(self, length: int) -> int:
        self.length = min(self.length, length)
        return self.length

    def copy(self) -> Self:
        twin = type(self)(self.capacity)
        twin.length, twin._values = self.length, None if self._values is None else self._values.clone()
        return twin
