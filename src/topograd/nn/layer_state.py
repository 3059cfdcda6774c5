"""What decoding remembers of positions: keys and values of an attention layer, messages of a relay.

Buffers are preallocated, and entry t belongs to position t. So going back is free: `rewind(marks)` forgets
what lies behind, later entries are overwritten, and each row is just where it was asked to be. A recurrent
layer's state is another thing (`recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from topograd.errors import StackError


class LayerState(Protocol):
    """What a layer remembers while it decodes."""

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Go back, in each row to its mark or before it; returns to where. The rest is replayed."""


class KVState:
    """Keys and values of shape (batch, heads, capacity, head width), filled up to `length`."""

    def __init__(
        self, batch: int, heads: int, capacity: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Zeros: a slot that no query may see has weight 0, and 0 times whatever was there could be NaN.
        self.keys = torch.zeros(batch, heads, capacity, width, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store new positions; returns all the keys and values so far (views).

        They follow the last ones, in every row, unless `positions` (batch, time) says where each belongs.
        """
        if positions is not None and positions.dim() == 2:
            return self._scatter(keys, values, positions)
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise StackError(
                f"the state holds {self.capacity} positions and {stop} are needed; make it with more capacity"
            )
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def _scatter(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        stop = int(positions.max()) + 1
        if stop > self.capacity:
            raise StackError(
                f"the state holds {self.capacity} positions and {stop} are needed; make it with more capacity"
            )
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, :, positions] = keys.transpose(1, 2)
        self.values[rows, :, positions] = values.transpose(1, 2)
        self.length = max(self.length, stop)
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Forget what lies behind these positions, row by row; returns where each row now is."""
        self.length = min(self.length, max(marks))
        return list(marks)


class History:
    """Values of shape (batch, positions, ...) so far; the buffer is made when the first of them come."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._values: Tensor | None = None

    def append(self, values: Tensor, positions: Tensor) -> Tensor:
        """Store new positions, as `KVState.append` does; returns all so far (a view)."""
        if self._values is None:
            self._values = values.new_zeros(len(values), self.capacity, *values.shape[2:])
        if positions.dim() == 2:
            rows = torch.arange(len(positions), device=positions.device)[:, None]
            self._values[rows, positions] = values
            self.length = max(self.length, int(positions.max()) + 1)
        else:
            self._values[:, self.length : self.length + values.shape[1]] = values
            self.length += values.shape[1]
        return self._values[:, : self.length]

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Forget what lies behind these positions, row by row."""
        self.length = min(self.length, max(marks))
        return list(marks)
