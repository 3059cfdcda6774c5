"""The buffers of `nn/slots.py` in arrays, for runtimes that compute without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topograd.nn.slots import KVSlots, SlotBuffer

if TYPE_CHECKING:
    from torch import Tensor


class ArrayBuffer(SlotBuffer):
    """The same in float32 on a CPU, in arrays: torch is imported where a tensor of them is asked for."""

    version = object()
    """Another one each time that the memory of any buffer is replaced: addresses are good until then."""

    def __init__(self, lead: tuple[int, ...], tail: tuple[int, ...]) -> None:
        self.lead, self.tail = lead, tail
        self.rooms: dict[int, NDArray[np.float32]] = {}

    def at(self, room: int, slots: int) -> Tensor:
        import torch

        return torch.from_numpy(self.memory(room, slots))

    array = SlotBuffer.memory

    def _zeros(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Zeros that begin at a multiple of 64 bytes, as those of torch."""
        ArrayBuffer.version = object()
        size = math.prod(shape)
        memory = np.zeros(size + 16, np.float32)
        first = -memory.ctypes.data % 64 // 4
        return memory[first : first + size].reshape(shape)

    def grow(self, old: int, new: int) -> None:
        ArrayBuffer.version = object()
        super().grow(old, new)

    def keep_rooms(self, rooms: Sequence[int]) -> None:
        if any(room not in rooms for room in self.rooms):
            ArrayBuffer.version = object()
        super().keep_rooms(rooms)


class ArrayKVSlots(KVSlots):
    """The same for a runtime that computes on arrays: float32 on a CPU."""

    keys: ArrayBuffer
    values: ArrayBuffer

    def __init__(self, heads: int, width: int) -> None:
        self.keys, self.values = (ArrayBuffer((heads,), (width,)) for _ in range(2))
        self.position_bytes = 8 * heads * width
