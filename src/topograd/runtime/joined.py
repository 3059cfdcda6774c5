"""Rows that come and go, side by side in one buffer: ONNX Runtime runs one new position of each at once.

A row's keys and values are a slice of a buffer that all rows of a stage share:

    states[name]  (places, kv heads, C, head width)      row i is states[name][place_i : place_i + 1]

Alone, a row runs on its slice as on memory of its own. Together, rows run on the part of the buffer that they
lie in, as a batch with a start of each row. Whatever else lies in that part runs too, and writes behind what
it remembers, where its own next position will be written. So nothing is copied when rows run, join or leave.
A gap of more than GAP places is not bridged.

Equal to each row alone to rounding (`tests/runtime/test_joined.py`). Cost: all rows have room for the
longest; a row for which the buffer would pass MOST_BYTES has memory of its own, and runs alone.

Limits: one new position a row; heads that GroupQueryAttention takes (`layers.py`); one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from topograd.nn.stack import Stack
from topograd.runtime.graph import Session
from topograd.runtime.onnx_memory import Array, Fixed, Frame, OnnxStage, Slot
from topograd.runtime.protocol import HeardRows
from topograd.topology.plan import PlannedStage

GAP = 2
MOST_BYTES = 1 << 29
"""Of one stage's buffer."""
MOST_PARTS = 64
"""Parts of the buffer that stay bound."""


class Buffer:
    """Keys and values of all rows of one stage."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.states: dict[str, NDArray[np.float32]] = {
            name: np.zeros((0, heads, 0, width), np.float32) for name, (heads, width) in shapes.items()
        }
        self.members: WeakValueDictionary[int, JoinedStage] = WeakValueDictionary()
        """Rows by their place; a row that nobody holds any more leaves it."""
        self._parts: dict[tuple[int, int], Slot] = {}

    @property
    def places(self) -> int:
        return len(next(iter(self.states.values())))

    @property
    def room(self) -> int:
        return next(iter(self.states.values())).shape[2]

    def add(self, row: JoinedStage) -> int | None:
        """The first place that is free; None where there can be no more."""
        place = next(i for i in range(self.places + 1) if i not in self.members)
        if not self.members:
            self._resize(1, 0)  # nobody needs what it has grown to
        elif place == self.places:
            if not self.takes(2 * place, self.room):
                return None
            self._resize(2 * place, self.room)
        self.members[place] = row
        return place

    def takes(self, places: int, room: int) -> bool:
        """Whether it may be that large."""
        each = sum(state.shape[1] * state.shape[3] for state in self.states.values())
        return 4 * places * room * each <= MOST_BYTES

    def grow(self, room: int) -> None:
        """More room for every row."""
        self._resize(self.places, room)

    def _resize(self, places: int, room: int) -> None:
        for name, old in self.states.items():
            new = np.zeros((places, old.shape[1], room, old.shape[3]), np.float32)
            kept, length = min(places, len(old)), min(room, old.shape[2])
            new[:kept, :, :length] = old[:kept, :, :length]
            self.states[name] = new
        self._parts.clear()
        for place, row in self.members.items():
            row.bind(place)

    def run(self, rows: Sequence[JoinedStage], h: Array, heard: HeardRows) -> Array:
        """The hidden states (rows, 1, width) behind the last layer, of one new position of each row."""
        found = np.empty_like(h)
        order = sorted(range(len(rows)), key=lambda i: rows[i].place)
        part = [order[0]]
        for i in order[1:]:
            if rows[i].place - rows[part[-1]].place > GAP + 1:
                self._run(rows, part, h, heard, found)
                part = []
            part.append(i)
        self._run(rows, part, h, heard, found)
        return found

    def _run(
        self, rows: Sequence[JoinedStage], part: Sequence[int], h: Array, heard: HeardRows, found: Array
    ) -> None:
        """Run rows that lie close together, and what lies between them."""
        low, high = rows[part[0]].place, rows[part[-1]].place + 1
        slot = self._slot(rows[part[0]], low, high, h.shape[2])
        places = [rows[i].place - low for i in part]
        starts = [self.members[i].held if i in self.members else 0 for i in range(low, high)]
        tokens, x0 = np.zeros((high - low, 1), np.int64), np.zeros((high - low, *h.shape[1:]), np.float32)
        for place, i in zip(places, part, strict=True):
            starts[place], tokens[place], x0[place] = heard.starts[i], heard.tokens[i], heard.x0[i]
            slot.h[place] = h[i]
        slot.frame.fill(tokens, x0, starts, rows[part[0]].fixed.most)
        slot.session.run(slot.binding)
        found[list(part)] = rows[part[0]].last_of(slot)[places]

    def _slot(self, row: JoinedStage, low: int, high: int, width: int) -> Slot:
        if (low, high) not in self._parts:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            session = row.session(True)
            assert session is not None, "rows run together where they can be grouped"
            values = {
                name: onnxruntime.OrtValue.ortvalue_from_numpy(state[low:high])
                for name, state in self.states.items()
            }
            frame = Frame(high - low, 1, 0, width, ())
            names = [f"h.{tap}" for tap in row.taps]
            self._parts[low, high] = Slot(session, frame, values, row.fixed.values, names)
        return self._parts[low, high]


class JoinedStage(OnnxStage):
    """A stage of one row whose keys and values lie beside those of other rows."""

    def __init__(
        self,
        stack: Stack,
        planned: PlannedStage,
        capacity: int,
        session: Callable[[bool], Session | None],
        shapes: Mapping[str, tuple[int, int]],
        fixed: Fixed,
        frames: dict[tuple[int, int, int], Frame],
        buffer: Buffer,
    ) -> None:
        super().__init__(stack, planned, 1, capacity, session, shapes, fixed, frames)
        self.held = 0
        """Positions behind which nothing is remembered."""
        place = buffer.add(self)
        self.place = -1 if place is None else place
        self.buffer = None if place is None else buffer
        """None where the row has memory of its own."""
        if place is not None:
            self.bind(place)

    def bind(self, place: int) -> None:
        """Take the slice of the buffer at a place."""
        assert self.buffer is not None
        self.states = {name: state[place : place + 1] for name, state in self.buffer.states.items()}
        self._bind()

    @property
    def together(self) -> bool:
        return self.buffer is not None

    def run_rows(self, others: Sequence[Any], h: Array, heard: HeardRows) -> Array | None:
        """One new position of this row and of others; None where one has left the buffer for it."""
        rows: list[JoinedStage] = [self, *others]
        if self.session(True) is None:
            return None
        for row, start, tokens in zip(rows, heard.starts, heard.tokens, strict=True):
            row.fixed.check(torch.from_numpy(tokens[None]), start)
            row._reserve(start + 1)
        if self.buffer is None or any(row.buffer is not self.buffer for row in rows):
            return None
        found = self.buffer.run(rows, h, heard)
        for row, start in zip(rows, heard.starts, strict=True):
            row.held = start + 1
        return found

    def _reserve(self, stop: int) -> None:
        super()._reserve(stop + 1)  # a place behind what is remembered

    def _slot(self, starts: list[int], columns: int, width: int) -> Slot:
        self.held = max(starts) + columns
        return super()._slot(starts, columns, width)

    def copy(self, source: Any, length: int) -> None:
        super().copy(source, length)
        self.held = length

    def _fit(self, room: int, rows: slice | list[int]) -> None:
        whole = rows == slice(None)
        if self.buffer is not None and whole and self.buffer.takes(self.buffer.places, room):
            self.buffer.grow(room)
            return
        if self.buffer is not None:
            del self.buffer.members[self.place]
            self.buffer = None
        super()._fit(room, rows)
