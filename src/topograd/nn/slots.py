"""Shared buffers of a KV cache, and spans: new positions of several sequences that run as one batch.

A sequence of a cache has a *place*: a slot of a buffer whose slots hold `room` positions each.

    buffer.at(room)     (slots, ..., room, ...)     one tensor for each room in use

Sequences share one room, that of the longest, so that all of them lie in one tensor. It grows with them, as
long as all slots together stay below MAX_SHARED_BYTES; one that would pass that has a room of STEP · 2ᵏ
positions, with others of about that length.
The new positions of several sequences are *packed*: N columns of one sequence, concatenated in the order of
their places. A matrix is then read once for all of them, and nothing is padded. Sequences in
neighbouring slots with equally many new positions are a *group*: attention, which reads each sequence's
own past, runs once for a group, on a view of the buffer.

Limits: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from topograd.nn.host_numbers import send

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from topograd.nn.stack import LayerContext, Stack


@dataclass(eq=False, slots=True)
class Place:
    """Where a sequence's positions lie: a slot among those with this room."""

    room: int = 0
    slot: int = -1

    @property
    def key(self) -> tuple[int, int]:
        return self.room, self.slot


STEP = 64
"""Rooms are multiples of this."""
MAX_SHARED_BYTES = 1 << 29


class PlaceTable:
    """Which slots of which room are taken, and how rooms grow."""

    def __init__(self, capacity: int, position_bytes: int) -> None:
        self.capacity, self.position_bytes = capacity, position_bytes
        self._taken: dict[int, dict[int, Place]] = {}
        self.slots: dict[int, int] = {}
        """How many slots a buffer of each room shall have."""
        self.shared = 0
        """The room that sequences have until they are too many or too long."""

    def take(self, positions: int) -> Place:
        """A free slot for so many positions, the lowest: neighbours run as one group."""
        room = self._room(positions)
        taken = self._taken.setdefault(room, {})
        slot = next(i for i in range(len(taken) + 1) if i not in taken)
        slots = self.slots.get(room, 1)
        self.slots[room] = slots if slot < slots else 2 * slots
        taken[slot] = place = Place(room, slot)
        return place

    def _room(self, positions: int) -> int:
        """The shared room, where it is large enough and another slot of it is not too much; or STEP · 2ᵏ."""
        if not self.shared and self._fits(1, self._steps(positions)):
            self.shared = self._steps(positions)
        slots = self.slots.get(self.shared, 1)
        free = len(self._taken.get(self.shared, ())) < slots
        if positions <= self.shared and (free or self._bytes(2 * slots, self.shared) <= MAX_SHARED_BYTES):
            return self.shared
        room = STEP
        while room < positions or room == self.shared:
            room *= 2
        return min(room, self.capacity)

    def growth(self, place: Place, positions: int) -> int | None:
        """The size that the shared room needs for so many positions; None if the sequence must move."""
        if place.room != self.shared:
            return None
        room = self._steps(max(positions, self.shared + self.shared // 8))
        return room if self._fits(self.slots[self.shared], room) else None

    def grow(self, room: int) -> None:
        """Make the shared room larger, for all sequences in it."""
        old, self.shared = self.shared, room
        self._taken[room], self.slots[room] = self._taken.pop(old), self.slots.pop(old)
        for place in self._taken[room].values():
            place.room = room

    def _steps(self, positions: int) -> int:
        return min(-(-positions // STEP) * STEP, self.capacity)

    def _fits(self, slots: int, room: int) -> bool:
        return room not in self.slots and self._bytes(slots, room) <= MAX_SHARED_BYTES

    def _bytes(self, slots: int, room: int) -> int:
        return slots * room * self.position_bytes

    def free(self, place: Place) -> None:
        del self._taken[place.room][place.slot]
        if not self._taken[place.room]:
            del self._taken[place.room], self.slots[place.room]
            self.shared = 0 if place.room == self.shared else self.shared

    def move(self, place: Place, new: Place) -> Place:
        """Give a sequence a new place, which was taken for it; returns the old one, to be freed."""
        old = Place(*place.key)
        self._taken[old.room][old.slot] = old
        place.room, place.slot = new.key
        self._taken[new.room][new.slot] = place
        return old


class SlotBuffer:
    """Numbers of every position of every sequence: (slots, *lead, room, *tail) for each room."""

    def __init__(
        self, lead: tuple[int, ...], tail: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.lead, self.tail, self.dtype, self.device = lead, tail, dtype, device
        self.rooms: dict[int, Any] = {}

    def memory(self, room: int, slots: int) -> Any:
        """What the numbers of a room lie in, with at least so many slots; new ones are zero."""
        buffer = self.rooms.get(room)
        if buffer is None or buffer.shape[0] < slots:  # len() of a tensor is slow
            larger = self._zeros((slots, *self.lead, room, *self.tail))
            if buffer is not None:
                larger[: len(buffer)] = buffer
            self.rooms[room] = buffer = larger
        return buffer

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        import torch

        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def at(self, room: int, slots: int) -> Tensor:
        """The tensor of a room."""
        found: Tensor = self.memory(room, slots)
        return found

    def array(self, room: int, slots: int) -> NDArray[Any]:
        """The same memory as an array, on a CPU."""
        return self.at(room, slots).numpy()

    def copy(self, source: Place, target: Place, length: int, slots: int) -> None:
        """Give `target` the first positions of `source`, and zeros behind them."""
        new, lead = self.memory(target.room, slots)[target.slot], (slice(None),) * len(self.lead)
        old = self.rooms.get(source.room)
        if old is None or len(old) <= source.slot:
            length = 0
        else:
            new[*lead, :length] = old[source.slot][*lead, :length]
        new[*lead, length:] = 0

    def positions(self, place: Place, start: int, stop: int, slots: int) -> Tensor:
        """Some positions of a sequence (*lead, stop - start, *tail), as they lie there."""
        return self.at(place.room, slots)[place.slot].narrow(len(self.lead), start, stop - start)

    def grow(self, old: int, new: int) -> None:
        """Make a room larger, for all sequences in it."""
        buffer = self.rooms.pop(old, None)
        if buffer is not None:
            self.memory(new, len(buffer))[:, *(slice(None),) * len(self.lead), :old] = buffer

    def keep_rooms(self, rooms: Sequence[int]) -> None:
        """Free all other rooms."""
        for room in [room for room in self.rooms if room not in rooms]:
            del self.rooms[room]


@dataclass(eq=False)
class Group:
    """Sequences in neighbouring slots, with equally many new positions."""

    room: int
    low: int
    high: int
    """Slots from `low` to before `high`."""
    starts: tuple[int, ...]
    """The first new position of each."""
    count: int
    columns: slice
    """Where their new positions are among the packed ones."""
    slots: int
    device: torch.device | None
    rows: int = field(init=False)
    even: bool = field(init=False)
    """Whether all begin at the same position."""
    stop: int = field(init=False)
    """Positions of the longest, new ones included."""

    def __post_init__(self) -> None:
        self.rows = self.high - self.low
        self.even = len(set(self.starts)) == 1
        self.stop = max(self.starts) + self.count

    @cached_property
    def positions(self) -> Tensor:
        """(time,) where all sequences are equally long, else (rows, time)."""
        each = [list(range(start, start + self.count)) for start in self.starts]
        return send(each[0] if self.even else each, self.device)

    def view(self, buffer: SlotBuffer) -> Tensor:
        """The slots of these sequences (rows, *lead, room, *tail)."""
        slots = buffer.at(self.room, self.slots)
        return slots if self.rows == slots.shape[0] else slots[self.low : self.high]

    def unpack(self, x: Tensor, dim: int) -> Tensor:
        """(1, ..., N, ...) to (rows, ..., time, ...); N along `dim`."""
        size = self.rows * self.count
        part = x if x.shape[dim] == size else x.narrow(dim, self.columns.start, size)
        if self.rows == 1:
            return part
        if self.count == 1:
            return part.transpose(0, dim)
        return part.unflatten(dim, (self.rows, self.count)).movedim(dim, 1)[0]

    @cached_property
    def row_index(self) -> Tensor:
        """(rows, 1), beside `positions`."""
        import torch

        return torch.arange(self.rows, device=self.device)[:, None]

    def read(self, buffer: SlotBuffer) -> Tensor:
        """The new positions (rows, time, ...) of a buffer without leading dimensions."""
        view = self.view(buffer)
        if self.even:
            return view[:, self.starts[0] : self.stop]
        return view[self.row_index, self.positions]

    def write(self, buffer: SlotBuffer, values: Tensor) -> None:
        """Store (rows, time, ...)."""
        if self.even:
            self.view(buffer)[:, self.starts[0] : self.stop] = values
        else:
            self.view(buffer)[self.row_index, self.positions] = values

    def store(self, buffer: SlotBuffer, x: Tensor) -> Tensor:
        """Put heads (1, heads, N, width) at the new positions; all so far (rows, heads, stop, width)."""
        view, new = self.view(buffer), self.unpack(x, 2)
        if self.even:
            view[:, :, self.starts[0] : self.stop] = new
        else:
            view[self.row_index, :, self.positions] = new.transpose(1, 2)
        return view[:, :, : self.stop]

    def pack(self, y: Tensor) -> Tensor:
        """Attention's output (rows · time, ...) at the new positions alone."""
        return y


MAX_RAGGED = 16
"""Sequences with at most so many new positions (drafts) attend together, even if their counts differ."""


class RaggedGroup(Group):
    """Neighbours with different small numbers of new positions, padded to the largest; for attention alone.

    Padding attends to position 0, and its output is dropped.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        first, last = groups[0], groups[-1]
        self.room, self.low, self.high = first.room, first.low, last.high
        self.starts = tuple(start for group in groups for start in group.starts)
        self.counts = [group.count for group in groups for _ in group.starts]
        self.count, self.slots, self.device = max(self.counts), first.slots, first.device
        self.columns = slice(first.columns.start, last.columns.stop)
        self.rows, self.even = self.high - self.low, False
        self.stop = max(group.stop for group in groups)

    @cached_property
    def positions(self) -> Tensor:
        """(rows, time)."""
        each = zip(self.starts, self.counts, strict=True)
        return send(
            [[start + i if i < n else 0 for i in range(self.count)] for start, n in each], self.device
        )

    @cached_property
    def _real(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each new position its row, position and padded index; of each padded index its column."""
        spans = zip(self.starts, self.counts, strict=True)
        rows = [(row, start + i, i) for row, (start, n) in enumerate(spans) for i in range(n)]
        ends = list(accumulate(self.counts, initial=0))
        columns = [
            [ends[row] + i if i < n else 0 for i in range(self.count)] for row, n in enumerate(self.counts)
        ]
        row, position, place = zip(*((r, p, r * self.count + i) for r, p, i in rows), strict=True)
        return (
            send(row, self.device),
            send(position, self.device),
            send(place, self.device),
            send(columns, self.device),
        )

    def unpack(self, x: Tensor, dim: int) -> Tensor:
        """(1, heads, N, width) to (rows, heads, time, width)."""
        part = x[0].narrow(1, self.columns.start, self.columns.stop - self.columns.start)
        return part[:, self._real[3]].transpose(0, 1)

    def store(self, buffer: SlotBuffer, x: Tensor) -> Tensor:
        view = self.view(buffer)
        row, position, _, _ = self._real
        view[row, :, position] = x[0, :, self.columns].transpose(0, 1)
        return view[:, :, : self.stop]

    def pack(self, y: Tensor) -> Tensor:
        return y[self._real[2]]


class Spans:
    """New positions of some sequences, in the order of their places."""

    def __init__(
        self,
        places: Sequence[Place],
        starts: Sequence[int],
        counts: Sequence[int],
        table: PlaceTable,
        device: torch.device | None,
    ) -> None:
        self.key = _key(places, starts, counts)
        self.tokens: list[int] | None = None
        """The tokens at these positions, if known."""
        self.places, self.starts, self.counts, self.device = places, starts, counts, device
        self.groups: list[Group] = []
        column = first = 0
        for i in range(len(places)):
            here, behind = places[i], places[i + 1] if i + 1 < len(places) else None
            if (
                behind is not None
                and behind.room == here.room
                and behind.slot == here.slot + 1
                and counts[i + 1] == counts[i]
            ):
                continue
            size = (i + 1 - first) * counts[i]
            low = places[first].slot
            self.groups.append(
                Group(
                    here.room, low, here.slot + 1, tuple(starts[first : i + 1]), counts[i],
                    slice(column, column + size), table.slots[here.room], device,
                )
            )  # fmt: skip
            column, first = column + size, i + 1
        self.total = column

    @property
    def offset(self) -> int | Tensor:
        """The positions of the packed columns, for `Stack.layer_context`."""
        if len(self.places) == 1:
            return self.starts[0]
        each = zip(self.starts, self.counts, strict=True)
        return send([[p for start, n in each for p in range(start, start + n)]], self.device)

    def read(self, buffer: SlotBuffer) -> Tensor:
        """The entries of a buffer at these positions: (1, N, ...)."""
        import torch

        parts = [group.read(buffer).reshape(1, -1, *buffer.tail) for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, buffer: SlotBuffer, values: Tensor) -> None:
        """Store (1, N, ...)."""
        for group in self.groups:
            group.write(buffer, group.unpack(values, 1))

    def matches(self, places: Sequence[Place], starts: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether these are the same positions."""
        return self.key == _key(places, starts, counts)

    def read_array(self, buffer: SlotBuffer) -> NDArray[Any]:
        """`read` as an array (N, ...); a view where there is one sequence."""
        if len(self.places) == 1:
            (group,) = self.groups
            return buffer.array(group.room, group.slots)[group.low, group.starts[0] : group.stop]
        parts = [
            buffer.array(place.room, group.slots)[place.slot, start : start + group.count]
            for place, start, group in self._each()
        ]
        return np.concatenate(parts)

    def write_array(self, buffer: SlotBuffer, values: NDArray[Any]) -> None:
        """`write` of an array (N, ...)."""
        column = 0
        for place, start, group in self._each():
            stop = column + group.count
            buffer.array(place.room, group.slots)[place.slot, start : start + group.count] = values[
                column:stop
            ]
            column = stop

    def _each(self) -> Iterator[tuple[Place, int, Group]]:
        places = iter(self.places)
        for group in self.groups:
            for start in group.starts:
                yield next(places), start, group

    def slices(self) -> list[slice]:
        """The columns of each sequence."""
        ends = list(accumulate(self.counts))
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]

    def bind(self, ctx: LayerContext, stack: Stack) -> LayerContext:
        """The layer context of the packed columns, for layers with slots."""
        self._ctx, self._stack = ctx, stack
        if len(self.places) == 1:
            self.group_contexts = [ctx]
        else:
            self.group_contexts = [
                replace(ctx, positions=group.positions, mask=None, masks={}, additive_masks={})
                for group in self.attended
            ]
        return replace(ctx, spans=self)

    @cached_property
    def attended(self) -> list[Group]:
        """The groups as attention runs them: neighbours with few new positions as one."""
        merged: list[list[Group]] = []
        for group in self.groups:
            last = merged[-1][-1] if merged else None
            if (
                last is not None
                and (last.room, last.high) == (group.room, group.low)
                and max(last.count, group.count) <= MAX_RAGGED
            ):
                merged[-1].append(group)
            else:
                merged.append([group])
        return [groups[0] if len(groups) == 1 else RaggedGroup(groups) for groups in merged]

    @cached_property
    def contexts(self) -> list[LayerContext]:
        """The layer context of each sequence by itself."""
        ctx, stack = self._ctx, self._stack
        if len(self.places) == 1:
            return [ctx]
        return [
            stack.layer_context(ctx.x0[:, columns], ctx.inputs[:, columns], start)
            for columns, start in zip(self.slices(), self.starts, strict=True)
        ]


def _key(places: Sequence[Place], starts: Sequence[int], counts: Sequence[int]) -> tuple[Any, ...]:
    return tuple([place.key for place in places]), tuple(starts), tuple(counts)


class KVSlots:
    """Keys and values of one attention layer, for every sequence of a cache."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys = SlotBuffer((heads,), (width,), dtype, device)
        self.values = SlotBuffer((heads,), (width,), dtype, device)
        self.position_bytes = 2 * heads * width * dtype.itemsize

    def append(self, group: Group, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of a group; all its keys and values so far (views)."""
        return group.store(self.keys, keys), group.store(self.values, values)
