"""What decoding remembers of positions: keys and values of an attention layer, messages of a relay.

Buffers grow by doubling, and entry t belongs to position t. So going back is free: `rewind(marks)` forgets
what lies behind, later entries are overwritten, and each row is just where it was asked to be. A recurrent
layer's state is another thing (`recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.host_numbers import largest

if TYPE_CHECKING:
    from topograd.nn.stack import Bus


class LayerState(Protocol):
    """What a layer remembers while it decodes."""

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Go back, in each row to its mark or before it; returns to where. The rest is replayed."""

    def select(self, rows: Tensor) -> None:
        """Become the memory of these rows, in this order; a row may be taken several times, or not at all."""


FIRST = 256
"""Positions that a buffer has room for at first; it doubles until its capacity."""
MORE = 64
"""Positions that a buffer has room for behind what it holds, when rows were selected."""


def grown(buffer: Tensor, dim: int, wanted: int, capacity: int) -> Tensor:
    """`buffer` with room for `wanted` positions along `dim`: itself, or a larger copy whose rest is zero.

    Zeros: a slot that no query may see has weight 0, and 0 times whatever was there could be NaN.
    """
    room = buffer.shape[dim]
    if wanted <= room:
        return buffer
    shape = list(buffer.shape)
    shape[dim] = min(capacity, max(wanted, 2 * room, FIRST))
    larger = buffer.new_zeros(shape)
    larger.narrow(dim, 0, room).copy_(buffer)
    return larger


def selected(buffer: Tensor, rows: Tensor, dim: int, length: int, capacity: int) -> Tensor:
    """The first `length` positions of some rows of `buffer`, with room for a few more behind them."""
    shape = list(buffer.shape)
    shape[0], shape[dim] = len(rows), min(capacity, length + MORE)
    chosen = buffer.new_zeros(shape)
    chosen.narrow(dim, 0, length).copy_(buffer.narrow(dim, 0, length)[rows])
    return chosen


class KVState:
    """Keys and values of shape (batch, heads, positions, head width), filled up to `length`."""

    def __init__(
        self, batch: int, heads: int, capacity: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.capacity = capacity
        room = min(capacity, FIRST)
        self.keys = torch.zeros(batch, heads, room, width, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def _reserve(self, stop: int) -> None:
        """Room for positions up to `stop`."""
        if stop > self.capacity:
            raise StackError(
                f"the state holds {self.capacity} positions and {stop} are needed; make it with more capacity"
            )
        if stop > self.keys.shape[2]:
            self.keys = grown(self.keys, 2, stop, self.capacity)
            self.values = grown(self.values, 2, stop, self.capacity)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store new positions; returns all the keys and values so far (views).

        They follow the last ones, in every row, unless `positions` (batch, time) says where each belongs.
        """
        if positions is not None and positions.dim() == 2:
            return self._scatter(keys, values, positions)
        stop = self.length + keys.shape[2]
        self._reserve(stop)
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _scatter(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        stop = largest(positions) + 1
        self._reserve(stop)
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, :, positions] = keys.transpose(1, 2)
        self.values[rows, :, positions] = values.transpose(1, 2)
        self.length = max(self.length, stop)
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Forget what lies behind these positions, row by row; returns where each row now is."""
        self.length = min(self.length, max(marks))
        return list(marks)

    def select(self, rows: Tensor) -> None:
        """Become the memory of these rows."""
        self.keys = selected(self.keys, rows, 2, self.length, self.capacity)
        self.values = selected(self.values, rows, 2, self.length, self.capacity)


class PackedStates:
    """The states of several rows whose new positions lie one behind the other, as if they were of one row.

    Whatever a layer does position by position it then does for all rows at once; only attention looks at
    them row by row (`decoding.look_back`). `buses` say where each row's positions are.
    """

    def __init__(self, states: Sequence[KVState], buses: Sequence[Bus]) -> None:
        self.states, self.buses = states, buses


class History:
    """Values of shape (batch, positions, ...) so far; the buffer is made when the first of them come."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._values: Tensor | None = None

    def append(self, values: Tensor, positions: Tensor) -> Tensor:
        """Store new positions, as `KVState.append` does; returns all so far (a view)."""
        if self._values is None:
            self._values = values.new_zeros(len(values), min(self.capacity, FIRST), *values.shape[2:])
        ragged = positions.dim() == 2
        stop = largest(positions) + 1 if ragged else self.length + values.shape[1]
        self._values = grown(self._values, 1, stop, self.capacity)
        if ragged:
            rows = torch.arange(len(positions), device=positions.device)[:, None]
            self._values[rows, positions] = values
            self.length = max(self.length, stop)
        else:
            self._values[:, self.length : self.length + values.shape[1]] = values
            self.length += values.shape[1]
        return self._values[:, : self.length]

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Forget what lies behind these positions, row by row."""
        self.length = min(self.length, max(marks))
        return list(marks)

    def select(self, rows: Tensor) -> None:
        """Become the memory of these rows."""
        if self._values is not None:
            self._values = selected(self._values, rows, 1, self.length, self.capacity)
