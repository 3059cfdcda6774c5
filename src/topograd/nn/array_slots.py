"""The buffers of `nn/slots.py` in arrays, for runtimes that compute without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topograd.nn.slots import KVSlots, Place, SlotBuffer

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

        return torch.from_numpy(self.array(room, slots))

    def array(self, room: int, slots: int) -> NDArray[np.float32]:
        """The array of a room, with at least so many slots; new ones are zero."""
        array = self.rooms.get(room)
        if array is None or len(array) < slots:
            larger = _zeros((slots, *self.lead, room, *self.tail))
            if array is not None:
                larger[: len(array)] = array
            self.rooms[room] = array = larger
            ArrayBuffer.version = object()
        return array

    def copy(self, source: Place, target: Place, length: int, slots: int) -> None:
        axis = len(self.lead)
        new = np.moveaxis(self.array(target.room, slots)[target.slot], axis, 0)
        old = self.rooms.get(source.room)
        if old is None or len(old) <= source.slot:
            length = 0
        else:
            new[:length] = np.moveaxis(old[source.slot], axis, 0)[:length]
        new[length:] = 0

    def grow(self, old: int, new: int) -> None:
        array = self.rooms.pop(old, None)
        ArrayBuffer.version = object()
        if array is not None:
            axis = 1 + len(self.lead)
            np.moveaxis(self.array(new, len(array)), axis, 0)[:old] = np.moveaxis(array, axis, 0)

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


def _zeros(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Zeros that begin at a multiple of 64 bytes, as those of torch."""
    size = math.prod(shape)
    memory = np.zeros(size + 16, np.float32)
    first = -memory.ctypes.data % 64 // 4
    return memory[first : first + size].reshape(shape)
