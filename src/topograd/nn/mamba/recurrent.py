"""The decoding state of a recurrent layer, with snapshots for rollback.

Attention keeps every position and rolls back by truncation. A recurrent mixer folds the past into tensors of
fixed size: it rolls back to a snapshot, and the positions after that run again.

A step never writes into a tensor; it makes new ones. So a snapshot, or a copy, is only references, and costs
the memory of the tensors that it keeps alive: at most MAX_SNAPSHOTS times the state.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from topograd.errors import StackError

MAX_SNAPSHOTS = 32
"""Snapshots that a state keeps."""


class RecurrentState:
    """Named tensors (sequences, ...), zero before the first position, and the newest snapshots of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        sizes = {len(tensor) for tensor in tensors.values()}
        if len(sizes) != 1:
            raise StackError(setting="tensors", given=sorted(sizes), allowed="of one batch size")
        (self.rows,) = sizes
        self.length = 0
        self._start = self._tensors = dict(tensors)
        self._snapshots: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=MAX_SNAPSHOTS)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def tensors(self) -> list[Tensor]:
        """What it is now."""
        return list(self._tensors.values())

    def advance(self, tensors: Mapping[str, Tensor], time: int) -> None:
        """The tensors after `time` more positions."""
        assert tensors.keys() == self._tensors.keys()
        self._snapshots.append((self.length, self._tensors))
        self.length += time
        self._tensors = dict(tensors)

    def truncate(self, length: int) -> int:
        """Roll back to the newest snapshot that is not beyond `length`; returns its length."""
        if length < 0:
            raise StackError(setting="length", given=length, allowed="at least 0")
        while self.length > length:
            before = self._snapshots.pop() if self._snapshots else (0, self._start)
            self.length, self._tensors = before
        return self.length

    def copy(self) -> Self:
        twin = type(self)(self._start)
        twin.length, twin._tensors = self.length, self._tensors
        twin._snapshots = self._snapshots.copy()
        return twin

    @classmethod
    def joined(cls, states: Sequence[Self]) -> Self:
        """The states of several sequences as one batch, for one run of a layer; `take` splits it again."""
        names = states[0]._tensors
        return cls({name: torch.cat([state[name] for state in states]) for name in names})

    def take(self, batch: Self, row: int, time: int) -> None:
        """Advance by `time` positions to entry `row` of a joined state."""
        own = {name: tensor[row : row + 1].clone() for name, tensor in batch._tensors.items()}
        self.advance(own, time)  # cloned: a view would keep the other rows alive


def last_columns(x: Tensor, width: int) -> Tensor:
    """The last `width` columns of x (rows, width + time, ...)."""
    return x[:, x.shape[1] - width :].clone()  # a view would keep all of x alive
