"""The memory of one attention layer while it decodes: keys and values, preallocated.

Going back is `truncate`: later entries are overwritten. A stack that decodes makes one state per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topograd.errors import StackError


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

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise StackError(f"cannot go back to {length}: the state holds {self.length} positions")
        self.length = length
