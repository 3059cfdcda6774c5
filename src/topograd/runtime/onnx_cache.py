"""KV cache of a stage in ONNX Runtime, for new positions of any sequences.

A session takes its inputs and gives its outputs in memory that was bound before. So for every shape of a run
there is a *binding*: arrays that are bound once and filled for each run. What all stages of a run read beside
their hidden states (tokens, x0, positions, masks) is a *frame* that they share, filled by the first of them.

A stage has two sessions (`layers.py`), each made when it is first wanted:

    grouped    new positions of one sequence, or one new position of each of several. Those that lie between
               them in the buffer run too, and write behind what they hold, where their own next position will
               be written; a gap of more than GAP slots is not bridged
    packed     any new positions of any sequences: drafts of many requests, prompts beside running texts

Keys and values are those of `nn/slots.py`, so nothing is copied when sequences run, join or leave.

Limits: float32 on a CPU; for one thread at a time, like any cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.exec.stage_cache import StageCache
from topograd.nn.array_slots import ArrayKVSlots
from topograd.nn.slots import Group, Place, Spans
from topograd.nn.stack import LayerContext
from topograd.runtime.graph import Session
from topograd.topology.plan import PlannedStage

if TYPE_CHECKING:
    from topograd.runtime.onnx_runtime import OnnxRuntime

GAP = 2
PADDED = 8
MAX_COLUMNS = 64
"""Bindings for more columns than this are not kept."""
MAX_FRAMES = 64
MAX_BINDINGS = 64
Array = NDArray[Any]


class GroupedFrame:
    """What the stages read of S new columns of some rows."""

    def __init__(self, rows: int, columns: int, width: int) -> None:
        self.last, self.total = np.zeros(rows, np.int32), np.zeros(1, np.int32)
        self.positions = np.zeros((rows, columns), np.int64)
        self.tokens = np.zeros((rows, columns), np.int64)
        self.x0 = np.zeros((rows, columns, width), np.float32)
        self._columns = np.arange(columns)
        self.filled: object = None
        """What it was filled with."""
        self.values = _bound(self, ("last", "total", "positions", "tokens", "x0"))

    def fill(self, tokens: Array, x0: Array, starts: Sequence[int], most: int) -> None:
        """Take what new columns are; `most` is the last position that a rotation is known for."""
        first = np.asarray(starts)
        columns = len(self._columns)
        self.tokens[:], self.x0[:] = tokens, x0
        self.last[:] = first + (columns - 1)
        self.total[0] = max(starts) + columns
        np.minimum(first[:, None] + self._columns, most, out=self.positions)


class PackedFrame:
    """What the stages read of N packed columns, of sequences in `rows` neighbouring slots."""

    def __init__(
        self, columns: int, rows: int, wide: int, room: int, heads: int, width: int, windows: Sequence[int]
    ) -> None:
        self.positions = np.zeros((1, columns), np.int64)
        self.tokens = np.zeros((1, columns), np.int64)
        self.x0 = np.zeros((1, columns, width), np.float32)
        self.scatter = np.zeros((columns, heads, 3), np.int64)
        self.scatter[:, :, 1] = np.arange(heads)
        self.unpack = np.zeros((rows, wide), np.int64)
        self.pack = np.zeros(columns, np.int64)
        self.masks = {window: np.zeros((rows, 1, wide, room), np.bool_) for window in windows}
        self._room = np.arange(room)
        self.filled: object = None
        names = ("positions", "tokens", "x0", "scatter", "unpack", "pack")
        self.values = _bound(self, names)
        self.values |= {
            f"mask.{window}": onnxruntime.OrtValue.ortvalue_from_numpy(mask)
            for window, mask in self.masks.items()
        }

    def fill(self, tokens: Sequence[int], x0: Array, rows: Sequence[tuple[int, int, int]], most: int) -> None:
        """`rows` are (slot in the part, first position, count) of each sequence, in order."""
        count = len(tokens)
        self.tokens[0, :count], self.x0[0, :count] = tokens, x0
        wide = self.unpack.shape[1]
        where = np.zeros(self.unpack.shape, np.int64)  # a place that no column has sees position 0
        self.scatter[count:, :, 0], self.scatter[count:, :, 2] = 0, len(self._room) - 1  # never read
        self.pack[count:], self.positions[0, count:] = 0, 0
        column = 0
        for slot, start, n in rows:
            columns, here = np.arange(column, column + n), np.arange(start, start + n)
            self.positions[0, column : column + n] = here
            self.scatter[columns, :, 0], self.scatter[columns, :, 2] = slot, here[:, None]
            self.unpack[slot, :n], self.pack[columns] = columns, slot * wide + np.arange(n)
            where[slot, :n] = here
            column += n
        np.minimum(self.positions, most, out=self.positions)
        last = where[:, None, :, None]
        for window, mask in self.masks.items():
            np.less_equal(self._room, last, out=mask)
            if window:
                mask &= self._room > last - window


def _bound(frame: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: onnxruntime.OrtValue.ortvalue_from_numpy(getattr(frame, name)) for name in names}


class Binding:
    """A session's inputs and outputs for one shape of a run."""

    def __init__(
        self,
        session: Session,
        frame: GroupedFrame | PackedFrame,
        states: dict[str, Array],
        fixed: dict[str, Any],
        outputs: Sequence[str],
    ) -> None:
        self.session, self.frame = session, frame
        self.h = np.zeros_like(frame.x0)
        self.outputs = [np.zeros_like(frame.x0) for _ in outputs]
        cached = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in states.items()}
        own = onnxruntime.OrtValue.ortvalue_from_numpy(self.h)
        self.binding = session.binding()
        known = {**frame.values, **cached, **fixed, "h": own}
        for name in session.inputs:
            self.binding.bind_ortvalue_input(name, known[name])
        results = {
            n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in zip(outputs, self.outputs, strict=True)
        }
        results |= {f"{name}.new": value for name, value in cached.items()}
        for name in session.outputs:
            self.binding.bind_ortvalue_output(name, results[name])
        self._states = states  # the memory that is bound

    def run(self) -> None:
        """Fill the outputs from `h` and the frame."""
        self.session.run(self.binding)


Frame = GroupedFrame | PackedFrame
Frames = dict[tuple[Any, ...], Frame]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New positions of sequences in one room, packed: `columns` of the spans that run."""

    h: Array
    """(N, width), like x0."""
    x0: Array
    spans: Spans
    columns: slice
    groups: Sequence[Group]
    wanted: Sequence[int]
    """Which of the stage's taps are returned."""

    @property
    def tokens(self) -> list[int]:
        assert self.spans.tokens is not None
        return self.spans.tokens[self.columns]


class OnnxStageCache(StageCache):
    """Keys and values of one stage, run by sessions."""

    def __init__(self, runtime: OnnxRuntime, planned: PlannedStage, capacity: int, frames: Frames) -> None:
        super().__init__(runtime.stack, planned, capacity)
        self.runtime, self.frames = runtime, frames
        self.fixed = runtime.positions(capacity)
        shapes = runtime.shapes(planned)
        self.slots = [ArrayKVSlots(*shapes[i]) for i in planned.layers]
        self.taps = planned.taps
        self._last = self.taps.index(planned.stage.stop)
        self._names = [f"h.{tap}" for tap in self.taps]
        self._bindings: dict[tuple[Any, ...], Binding] = {}
        self._held: dict[tuple[int, int], int] = {}
        """Of each slot of each room, behind how many positions nothing is kept."""

    # Sequences

    def truncate(self, place: Place, length: int) -> int:
        self._held[place.key] = min(self._held.get(place.key, 0), length)
        return super().truncate(place, length)

    def move(self, old: Place, new: Place, length: int, slots: int) -> None:
        super().move(old, new, length, slots)
        self._held[new.key] = length

    def grow(self, old: int, new: int) -> None:
        super().grow(old, new)
        self._held = {(new if room == old else room, slot): n for (room, slot), n in self._held.items()}
        self._bindings = {key: bound for key, bound in self._bindings.items() if key[1] != old}

    def keep_rooms(self, rooms: list[int]) -> None:
        super().keep_rooms(rooms)
        self._bindings = {key: bound for key, bound in self._bindings.items() if key[1] in rooms}

    # Running

    def layers(self, h: Tensor, ctx: LayerContext) -> dict[int, Tensor]:
        """The hidden states behind the last layer and those whose output is sent, by how many layers."""
        assert ctx.spans is not None, "a cache runs spans"
        spans = ctx.spans
        if spans.tokens is None:
            spans.tokens = ctx.inputs[0].tolist()
        states = self._run(h[0].numpy(), ctx.x0[0].numpy(), spans, range(len(self.taps)))
        return {tap: torch.from_numpy(a)[None] for tap, a in zip(self.taps, states, strict=True)}

    def run_arrays(self, h: Array, x0: Array, spans: Spans) -> Array:
        """The hidden states (N, width) behind the last layer; overwritten by the next run."""
        return self._run(h, x0, spans, [self._last])[0]

    @cached_property
    def _grouped_session(self) -> Session | None:
        return self.runtime.session(self.planned, grouped=True)

    def _run(self, h: Array, x0: Array, spans: Spans, wanted: Sequence[int]) -> list[Array]:
        grouped = self._grouped_session
        parts: list[list[Array]] = []
        for columns, groups in _rooms(spans):
            new = NewTokens(h[columns], x0[columns], spans, columns, groups, wanted)
            if grouped is not None and len(groups) == 1 and groups[0].rows == 1:
                parts.append(self._run_one(grouped, new))
            elif grouped is not None and all(group.count == 1 for group in groups):
                parts.append(self._run_next(grouped, new))
            else:
                parts.append(self._run_packed(new))
            for group in groups:
                for slot, start in zip(range(group.low, group.high), group.starts, strict=True):
                    self._held[group.room, slot] = start + group.count
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate([part[i] for part in parts]) for i in range(len(wanted))]

    def _run_one(self, session: Session, new: NewTokens) -> list[Array]:
        """New positions of one sequence."""
        (group,), (count, width) = new.groups, new.h.shape
        bound = self._grouped(session, group.room, group.low, group.high, group.slots, count, width)
        frame = bound.frame
        assert isinstance(frame, GroupedFrame)
        if frame.filled is not new.spans:
            self.fixed.check(group.stop)
            frame.fill(np.array([new.tokens]), new.x0, group.starts, self.fixed.most)
            frame.filled = new.spans if len(new.spans.groups) == 1 else None
        bound.h[0] = new.h
        bound.run()
        return [bound.outputs[i][0] for i in new.wanted]

    def _run_next(self, session: Session, new: NewTokens) -> list[Array]:
        """One new position of each of several sequences."""
        h, tokens, groups = new.h, new.tokens, new.groups
        slots = [slot for group in groups for slot in range(group.low, group.high)]
        starts = [start for group in groups for start in group.starts]
        self.fixed.check(max(starts) + 1)
        room, most = groups[0].room, groups[0].slots
        results = [np.empty_like(h) for _ in new.wanted]
        first = 0
        for i in range(1, len(slots) + 1):
            if i < len(slots) and slots[i] - slots[i - 1] <= GAP + 1:
                continue
            part = range(first, i)
            low, high = slots[first], slots[i - 1] + 1
            bound = self._grouped(session, room, low, high, most, 1, h.shape[1])
            frame = bound.frame
            assert isinstance(frame, GroupedFrame)
            places = [slots[j] - low for j in part]
            all_starts = [self._held.get((room, slot), 0) for slot in range(low, high)]
            all_tokens, all_x0 = np.zeros((high - low, 1), np.int64), np.zeros_like(frame.x0)
            for place, j in zip(places, part, strict=True):
                all_starts[place], all_tokens[place], all_x0[place] = starts[j], tokens[j], new.x0[j]
            frame.fill(all_tokens, all_x0, all_starts, self.fixed.most)
            frame.filled = None
            bound.h[places, 0] = h[first:i]
            bound.run()
            for result, k in zip(results, new.wanted, strict=True):
                result[first:i] = bound.outputs[k][places, 0]
            first = i
        return results

    def _run_packed(self, new: NewTokens) -> list[Array]:
        """Any new positions of any sequences."""
        groups, count = new.groups, len(new.h)
        low, high, room = groups[0].low, groups[-1].high, groups[0].room
        # Few shapes, so that bindings are used again: columns that are none fill up the last eight.
        wide, size = max(group.count for group in groups), count
        if len(new.spans.places) > 1:
            wide, size = 1 << (wide - 1).bit_length(), -(-size // PADDED) * PADDED
        session = self.runtime.session(self.planned)
        assert session is not None, "any stage can be packed"
        heads = self.slots[0].keys.lead[0] if self.slots[0] is not None else 0
        shape = size, high - low, wide, room
        bound = self._bound(
            session,
            (room, groups[0].slots, low, high, size, wide),
            ("packed", *shape),
            lambda: PackedFrame(*shape, heads, new.h.shape[1], self.fixed.windows),
        )
        frame = bound.frame
        assert isinstance(frame, PackedFrame)
        if frame.filled != (new.spans, new.columns.start):
            self.fixed.check(max(group.stop for group in groups))
            rows = [
                (slot - low, start, group.count)
                for group in groups
                for slot, start in zip(range(group.low, group.high), group.starts, strict=True)
            ]
            frame.fill(new.tokens, new.x0, rows, self.fixed.most)
            frame.filled = new.spans, new.columns.start
        bound.h[0, :count] = new.h
        bound.run()
        return [bound.outputs[i][0, :count] for i in new.wanted]

    def _grouped(
        self, session: Session, room: int, low: int, high: int, slots: int, columns: int, width: int
    ) -> Binding:
        return self._bound(
            session,
            (room, slots, low, high, columns),
            ("grouped", high - low, columns),
            lambda: GroupedFrame(high - low, columns, width),
        )

    def _bound(
        self, session: Session, where: tuple[int, ...], kind: tuple[Any, ...], make: Callable[[], Frame]
    ) -> Binding:
        """A binding of the slots `where` (room, slots, low, high, columns, ...) to a frame of a kind."""
        key, (room, slots, low, high, columns) = (kind[0], *where), where[:5]
        if key in self._bindings:
            return self._bindings[key]
        if kind not in self.frames:
            if len(self.frames) >= MAX_FRAMES:
                self.frames.clear()
            self.frames[kind] = make()
        states: dict[str, Array] = {}
        for index, layer in zip(self.planned.layers, self.slots, strict=True):
            assert isinstance(layer, ArrayKVSlots)
            states[f"keys.{index}"] = layer.keys.array(room, slots)[low:high]
            states[f"values.{index}"] = layer.values.array(room, slots)[low:high]
        bound = Binding(session, self.frames[kind], states, self.fixed.values, self._names)
        if columns <= MAX_COLUMNS:
            for old in [k for k in self._bindings if k[1] == room and k[2] != slots]:
                del self._bindings[old]  # of buffers that have grown since
            if len(self._bindings) >= MAX_BINDINGS:
                self._bindings.clear()
            self._bindings[key] = bound
        return bound


def _rooms(spans: Spans) -> Iterator[tuple[slice, list[Group]]]:
    """The groups of each room, and their columns."""
    first = 0
    for i, group in enumerate(spans.groups):
        if i + 1 == len(spans.groups) or spans.groups[i + 1].room != group.room:
            groups = spans.groups[first : i + 1]
            yield slice(groups[0].columns.start, group.columns.stop), groups
            first = i + 1
