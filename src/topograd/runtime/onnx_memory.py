"""What a stage remembers in ONNX Runtime, and how its session is run on new positions.

A session takes its inputs and gives its outputs in memory that was bound before. So for every number of rows
and of new columns there is a slot: arrays that are bound once and filled for each run. What all stages of a
run hear (tokens, x0, positions, masks) is a frame that they share, filled by the first of them.

A stage has two sessions, each made when it is first wanted. The grouped one is the faster, and takes one row,
or one new column of each row, or rows that all begin; the other takes any rows and columns (`layers.py`).

Buffers of keys and values have room for a multiple of STEP positions, since attention's cost goes with their
room, and grow when they must; then slots are bound anew.

Limits: for one thread at a time, like any cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.exec.forward import StageMemory, histories_of
from topograd.nn.stack import Bus, Stack
from topograd.runtime.graph import Session
from topograd.runtime.protocol import Heard
from topograd.topology.plan import PlannedStage

STEP = 64
MOST_COLUMNS = 32
"""Slots for more columns than this are not kept."""
MOST_FRAMES = 64
Array = NDArray[Any]


class Frame:
    """What the stages hear of some new columns beside their hidden states."""

    def __init__(self, rows: int, columns: int, room: int, width: int, windows: Sequence[int]) -> None:
        self.starts = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int32)
        """Of each row, the position of its last new column."""
        self.total = np.zeros(1, np.int32)
        """Positions of the longest row."""
        self.positions = np.zeros((rows, columns), np.int64)
        self.tokens = np.zeros((rows, columns), np.int64)
        self.x0 = np.zeros((rows, columns, width), np.float32)
        self.masks = {window: np.zeros((rows, 1, columns, room), np.bool_) for window in windows}
        self._columns, self._slots = np.arange(columns), np.arange(room)
        self.filled: object = None
        """What it was filled with."""
        names = ("starts", "last", "total", "positions", "tokens", "x0")
        arrays: dict[str, Array] = {name: getattr(self, name) for name in names}
        arrays |= {f"mask.{window}": mask for window, mask in self.masks.items()}
        self.values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in arrays.items()}

    def fill(self, tokens: Array, x0: Array, starts: Sequence[int], most: int) -> None:
        """Take what new columns are; `most` is the last position that a rotation is known for."""
        self.starts[:] = starts
        self.tokens[:] = tokens
        self.x0[:] = x0
        columns = len(self._columns)
        self.last[:] = self.starts + (columns - 1)
        self.total[0] = max(starts) + columns
        where = self.starts[:, None] + self._columns
        np.minimum(where, most, out=self.positions)
        last = where[:, None, :, None]
        for window, mask in self.masks.items():
            np.less_equal(self._slots, last, out=mask)
            if window:
                mask &= self._slots > last - window


class Slot:
    """A session's inputs and outputs for some rows and columns."""

    def __init__(
        self,
        session: Session,
        frame: Frame,
        states: Mapping[str, Any],
        fixed: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> None:
        self.session, self.frame = session, frame
        self.h = np.zeros_like(frame.x0)
        self.outputs = {name: np.zeros_like(frame.x0) for name in outputs}
        self.tensors = [torch.from_numpy(array) for array in self.outputs.values()]
        own = onnxruntime.OrtValue.ortvalue_from_numpy(self.h)
        self.binding = session.binding()
        known = {**frame.values, **states, **fixed, "h": own}
        for name in session.inputs:
            self.binding.bind_ortvalue_input(name, known[name])
        results = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in self.outputs.items()}
        results |= {f"{name}.new": value for name, value in states.items()}
        for name in session.outputs:
            self.binding.bind_ortvalue_output(name, results[name])

    def run(self, h: Array) -> None:
        """Fill the outputs."""
        self.h[:] = h
        self.session.run(self.binding)


@dataclass(frozen=True)
class Fixed:
    """What no run changes."""

    values: Mapping[str, Any]
    """Tables of rotations."""
    windows: Sequence[int]
    most: int
    """The last position that a rotation is known for."""
    check: Callable[[Tensor, int], None]
    """Whether tokens from a position on are within the model's reach; raises where they are not."""


class OnnxStage(StageMemory):
    """A stage whose layers are run by sessions; `session(True)` is the grouped one, if there is one."""

    def __init__(
        self,
        stack: Stack,
        planned: PlannedStage,
        rows: int,
        capacity: int,
        session: Callable[[bool], Session | None],
        shapes: Mapping[str, tuple[int, int]],
        fixed: Fixed,
        frames: dict[tuple[int, int, int], Frame],
    ) -> None:
        self.layers, self.histories = [], histories_of(stack, planned, capacity)
        self.rows, self.session, self.fixed, self.frames = rows, session, fixed, frames
        self.taps = taps_of(planned)
        self.states: dict[str, NDArray[np.float32]] = {
            name: np.zeros((rows, heads, 0, width), np.float32) for name, (heads, width) in shapes.items()
        }
        self._last = self.taps.index(planned.stage.stop)
        self._room, self._slots, self._values = 0, dict[tuple[int, bool], Slot](), dict[str, Any]()

    def run(self, stack: Stack, planned: PlannedStage, h: Tensor, bus: Bus) -> dict[int, Tensor]:
        """The hidden states behind the last layer and those whose output is sent, by how many layers."""
        positions = bus.positions
        starts = positions[:1].tolist() * self.rows if positions.dim() == 1 else positions[:, 0].tolist()
        slot = self._slot(starts, h.shape[1], h.shape[2])
        if slot.frame.filled is not bus:
            slot.frame.fill(bus.inputs.numpy(), bus.x0.numpy(), starts, self.fixed.most)
            slot.frame.filled = bus
        slot.run(h.numpy())
        return dict(zip(self.taps, slot.tensors, strict=True))

    def run_row(self, h: Array, heard: Heard) -> Array:
        """The hidden state (1, S, width) behind the last layer, of one row; overwritten by the next run."""
        slot = self._slot([heard.start], h.shape[1], h.shape[2])
        if slot.frame.filled is not heard:
            self.fixed.check(torch.from_numpy(heard.tokens), heard.start)
            slot.frame.fill(heard.tokens, heard.x0, [heard.start], self.fixed.most)
            slot.frame.filled = heard
        slot.run(h)
        return self.last_of(slot)

    def last_of(self, slot: Slot) -> Array:
        """Of what a run gave, the hidden state behind the last layer."""
        return list(slot.outputs.values())[self._last]

    def _slot(self, starts: list[int], columns: int, width: int) -> Slot:
        self._reserve(max(starts) + columns)
        simple = self.rows == 1 or columns == 1 or not any(starts)
        slot = self._slots.get((columns, simple))
        if slot is None:
            session = self.session(True) if simple else None
            windows = self.fixed.windows if session is None else ()
            if session is None:
                session = self.session(False)
                assert session is not None, "any stage has a session for any rows"
            key = self.rows, columns, self._room if windows else 0
            if key not in self.frames:
                if len(self.frames) >= MOST_FRAMES:
                    self.frames.clear()
                self.frames[key] = Frame(*key, width, windows)
            names = [f"h.{tap}" for tap in self.taps]
            slot = Slot(session, self.frames[key], self._values, self.fixed.values, names)
            if columns <= MOST_COLUMNS:
                self._slots[columns, simple] = slot
        return slot

    def _reserve(self, stop: int) -> None:
        if stop > self._room:
            self._fit(-(-stop // STEP) * STEP, slice(None))

    def _fit(self, room: int, rows: slice | list[int]) -> None:
        """Room for `room` positions of these rows."""
        for name, old in self.states.items():
            kept = old[rows]
            new = np.zeros((len(kept), old.shape[1], room, old.shape[3]), np.float32)
            new[:, :, : kept.shape[2]] = kept
            self.states[name] = new
        self._bind()

    def _bind(self) -> None:
        """Run on the states as they are now."""
        self._values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in self.states.items()}
        self._room = next(iter(self.states.values())).shape[2]
        self._slots.clear()

    @property
    def copies(self) -> bool:
        return not self.histories

    def copy(self, source: StageMemory, length: int) -> None:
        assert isinstance(source, OnnxStage)
        self._reserve(length)
        for name, values in self.states.items():
            values[:, :, :length] = source.states[name][:, :, :length]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.rows = len(rows)
        self._fit(self._room, rows.tolist())


def taps_of(planned: PlannedStage) -> list[int]:
    """Behind how many layers of the stack a stage's hidden state is wanted: the last, and what it sends."""
    return sorted({planned.stage.stop, *(port.layer for port in planned.sends)})
