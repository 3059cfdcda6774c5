"""The memory of one recurrent layer while it decodes, and how it goes back.

Attention remembers every position, so going back is trimming. A recurrent mixer folds the past into tensors
of fixed size and cannot be trimmed: it goes back to a snapshot, and the positions after it are replayed.

A step never writes into a tensor; it makes new ones. So a snapshot is only references, and costs the memory
of the tensors that it keeps alive: at most KEPT times the state. `marks[i]` is how many positions row i has
seen. Ragged rows advance by different counts, and go back by different amounts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.host_numbers import numbers_of

KEPT = 32
"""Snapshots that a state remembers."""


class RecurrentState:
    """Named tensors (rows, ...), zero before the first position, and the newest snapshots of them."""

    def __init__(self, tensors: Mapping[str, Tensor], rows: int) -> None:
        for name, tensor in tensors.items():
            if len(tensor) != rows:
                raise StackError(f"{name} has {len(tensor)} rows and the state {rows}; give them as many")
        self.marks = [0] * rows
        self._start = self._tensors = dict(tensors)
        self._snapshots: deque[tuple[list[int], dict[str, Tensor]]] = deque(maxlen=KEPT)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def advance(
        self, tensors: Mapping[str, Tensor], counts: Sequence[int] | Tensor | None, time: int
    ) -> None:
        """The tensors after `counts` more positions of each row, or after `time` of them in all rows."""
        assert tensors.keys() == self._tensors.keys()
        if isinstance(counts, Tensor):
            counts = numbers_of(counts)
        steps = [time] * len(self.marks) if counts is None else list(counts)
        if len(steps) != len(self.marks) or not all(0 <= step <= time for step in steps):
            raise StackError(
                f"counts are {steps} for {len(self.marks)} rows; give one per row, from 0 to {time} columns"
            )
        self._snapshots.append((self.marks, self._tensors))
        self.marks = [mark + step for mark, step in zip(self.marks, steps, strict=True)]
        self._tensors = dict(tensors)

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Go back until no row is beyond its mark; returns where each row now is, to be replayed from there.

        Each row takes the newest of the present, its snapshots and the start that is not beyond its mark.
        A snapshot stays if it is earlier: if no row of it is beyond the new place of that row.
        """
        if len(marks) != len(self.marks) or min(marks, default=0) < 0:
            raise StackError(
                f"marks are {list(marks)} for {len(self.marks)} rows; give one per row, from 0 on"
            )
        known = [([0] * len(marks), self._start), *self._snapshots, (self.marks, self._tensors)]
        picks = [max(i for i, (seen, _) in enumerate(known) if seen[row] <= m) for row, m in enumerate(marks)]
        here = self.marks = [known[pick][0][row] for row, pick in enumerate(picks)]
        if len(set(picks)) == 1:
            self._tensors = known[picks[0]][1]
        else:
            self._tensors = {
                name: torch.stack([known[pick][1][name][row] for row, pick in enumerate(picks)])
                for name in self._start
            }
        kept = [
            (seen, tensors)
            for seen, tensors in self._snapshots
            if seen != here and all(mark <= now for mark, now in zip(seen, here, strict=True))
        ]
        self._snapshots = deque(kept, maxlen=KEPT)
        return list(here)

    def select(self, rows: Tensor) -> None:
        """Become the memory of these rows, snapshots included."""
        order = numbers_of(rows)

        def chosen(seen: list[int], tensors: dict[str, Tensor]) -> tuple[list[int], dict[str, Tensor]]:
            return [seen[row] for row in order], {name: tensor[rows] for name, tensor in tensors.items()}

        self._start = chosen(self.marks, self._start)[1]
        self._snapshots = deque((chosen(*each) for each in self._snapshots), maxlen=KEPT)
        self.marks, self._tensors = chosen(self.marks, self._tensors)


def real_columns(counts: Tensor, time: int) -> Tensor:
    """(rows, time): True for the first `counts` columns of each row, which are not padding."""
    return torch.arange(time, device=counts.device) < counts[:, None]


def last_columns(x: Tensor, counts: Tensor | None, width: int) -> Tensor:
    """The `width` columns of x (rows, width + time, ...) that end at each row's own end.

    x begins with the `width` columns before the new ones, so that a row with count 0 gets those back.
    """
    if counts is None:
        return x[:, x.shape[1] - width :].clone()  # a view would keep all of x alive
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, counts[:, None] + torch.arange(width, device=x.device)]
