"""Slots of shared buffers: whoever comes, grows, moves and goes, each sequence reads what it wrote."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from topograd.nn import slots
from topograd.nn.array_slots import ArrayBuffer
from topograd.nn.slots import MAX_RAGGED, STEP, KVSlots, Place, PlaceTable, SlotBuffer, Spans

CPU = torch.device("cpu")
BYTES = 8
CAP = slots.MAX_SHARED_BYTES


class Texts:
    """Sequences in slots, beside one plain list for each; the order of calls is that of `decode/cache.py`."""

    def __init__(self, capacity: int) -> None:
        self.table = PlaceTable(capacity, BYTES)
        self.buffer = SlotBuffer((), (2,), torch.float64, CPU)
        self.kv = KVSlots(3, 2, torch.float64, CPU)
        self.kept: dict[Place, list[Tensor]] = {}

    def buffers(self) -> list[SlotBuffer]:
        return [self.buffer, self.kv.keys, self.kv.values]

    def new(self, source: Place | None = None, length: int = 0) -> Place:
        place = self.table.take(length + 1)
        for buffer in self.buffers():
            buffer.copy(source or Place(place.room, -1), place, length, self.table.slots[place.room])
        self.kept[place] = [] if source is None else self.kept[source][:length]
        return place

    def free(self, place: Place) -> None:
        del self.kept[place]
        self._leave(place)

    def _leave(self, place: Place) -> None:
        self.table.free(place)
        for buffer in self.buffers():
            buffer.keep_rooms(list(self.table.slots))

    def reserve(self, place: Place, positions: int) -> None:
        if positions <= place.room:
            return
        room = self.table.growth(place, positions)
        if room is not None:
            old_room = place.room
            self.table.grow(room)
            for buffer in self.buffers():
                buffer.grow(old_room, room)
            return
        new = self.table.take(positions)
        old = self.table.move(place, new)
        for buffer in self.buffers():
            buffer.copy(old, place, len(self.kept[place]), self.table.slots[place.room])
        self._leave(old)

    def spans(self, places: Sequence[Place], starts: Sequence[int], counts: Sequence[int]) -> Spans:
        return Spans(places, starts, counts, self.table, CPU)

    def write(self, places: Sequence[Place], counts: Sequence[int], arrays: bool) -> None:
        """New positions of some sequences, packed."""
        for place, count in zip(places, counts, strict=True):
            self.reserve(place, len(self.kept[place]) + count)
        pairs = sorted(zip(places, counts, strict=True), key=lambda pair: pair[0].key)
        places, counts = [place for place, _ in pairs], [count for _, count in pairs]
        starts = [len(self.kept[place]) for place in places]
        spans = self.spans(places, starts, counts)
        assert spans.total == sum(counts)
        values = torch.randn(1, spans.total, 2, dtype=torch.float64)
        if arrays:
            spans.write_array(self.buffer, values[0].numpy())
        else:
            spans.write(self.buffer, values)
        for place, columns in zip(places, spans.slices(), strict=True):
            self.kept[place] += list(values[0, columns])
        result = torch.from_numpy(spans.read_array(self.buffer))[None] if arrays else spans.read(self.buffer)
        assert torch.equal(result, values)
        heads = torch.stack([values, 2 * values, 3 * values], dim=1)
        for group in spans.attended:
            keys, held = self.kv.append(group, heads, -heads)
            assert keys.shape == held.shape == (group.rows, 3, group.stop, 2)
            flat = group.unpack(heads, 2).transpose(1, 2).flatten(0, 1)
            assert torch.equal(group.pack(flat), heads[0, :, group.columns].transpose(0, 1))

    def check(self) -> None:
        """Every sequence, by itself and all of them packed."""
        places = sorted((place for place, kept in self.kept.items() if kept), key=lambda place: place.key)
        if not places:
            return
        lengths = [len(self.kept[place]) for place in places]
        wanted = torch.stack([row for place in places for row in self.kept[place]])
        together = self.spans(places, [0] * len(places), lengths)
        assert torch.equal(together.read(self.buffer)[0], wanted)
        assert torch.equal(torch.from_numpy(together.read_array(self.buffer)), wanted)
        for place in places:
            kept = torch.stack(self.kept[place])
            slot = self.kv.keys.rooms[place.room][place.slot][:, : len(kept)]
            assert torch.equal(slot, torch.stack([kept, 2 * kept, 3 * kept]))
            assert torch.equal(self.kv.values.rooms[place.room][place.slot][:, : len(kept)], -slot)
        keys = [place.key for place in self.kept]
        assert len(set(keys)) == len(keys), "two sequences in one slot"
        assert all(buffer.rooms.keys() <= self.table.slots.keys() for buffer in self.buffers())


def act(texts: Texts, chance: random.Random, capacity: int) -> None:
    """Something happens to some sequences."""
    places = list(texts.kept)
    what = chance.random()
    if not places or (what < 0.15 and len(places) < 9):
        texts.new()
    elif what < 0.25 and len(places) < 9:
        source = chance.choice(places)
        texts.new(source, chance.randint(0, len(texts.kept[source])))
    elif what < 0.35:
        texts.free(chance.choice(places))
    elif what < 0.5:
        place = chance.choice(places)
        del texts.kept[place][chance.randint(0, len(texts.kept[place])) :]
    else:
        some = chance.sample(places, chance.randint(1, len(places)))
        most = chance.choice([1, 1, 4, STEP])
        some = [place for place in some if len(texts.kept[place]) < capacity]
        counts = [chance.randint(1, min(most, capacity - len(texts.kept[place]))) for place in some]
        if some:
            texts.write(some, counts, arrays=chance.random() < 0.5)


@pytest.mark.parametrize("cap", [CAP, 6 * STEP * BYTES, 0], ids=["all share", "some", "none"])
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_is_one_list_for_each_sequence(
    cap: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_SHARED_BYTES", cap)
    torch.manual_seed(seed)
    chance, capacity = random.Random(seed), 5 * STEP + 3
    texts, rooms = Texts(capacity), set()
    for _ in range(120):
        act(texts, chance, capacity)
        texts.check()
        rooms.add(len(texts.table.slots))
        shared = texts.table.shared
        assert shared in (0, capacity) or texts.table.slots[shared] * shared * BYTES <= cap
    assert (max(rooms) > 1) == (cap != CAP), rooms


def test_one_room_for_all_until_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SHARED_BYTES", 4 * 2 * STEP * BYTES)
    texts = Texts(100 * STEP)
    places = [texts.new() for _ in range(4)]
    assert [place.key for place in places] == [(STEP, slot) for slot in range(4)]
    texts.write(places[:1], [STEP + 1], arrays=False)
    assert [place.key for place in places] == [(2 * STEP, slot) for slot in range(4)], "all grow together"
    texts.write(places[1:2], [2 * STEP + 1], arrays=False)
    assert places[1].key == (4 * STEP, 0), "one more step for all would pass the cap, so it moves"
    assert [place.room for place in places if place is not places[1]] == [2 * STEP] * 3
    texts.write(places[2:3], [3 * STEP], arrays=False)
    assert places[2].key == (4 * STEP, 1), "with others of that length"
    texts.check()
    assert texts.new().key == (2 * STEP, 1), "the lowest free slot"
    for place in places[1:3]:
        texts.free(place)
    assert list(texts.buffer.rooms) == [2 * STEP], "an empty room is let go"


def test_short_texts_beside_a_long_one_do_not_have_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SHARED_BYTES", 40 * STEP * BYTES)
    texts = Texts(100 * STEP)
    long = texts.new()
    texts.write([long], [30 * STEP], arrays=False)
    short = [texts.new() for _ in range(5)]
    assert [place.key for place in short] == [(STEP, slot) for slot in range(5)]
    texts.write(short, [STEP] * 5, arrays=False)
    texts.write(short[:2], [1, 1], arrays=False)
    assert [place.key for place in short[:2]] == [(2 * STEP, 0), (2 * STEP, 1)]
    texts.check()
    sizes = [buffer.shape[0] * room for room, buffer in texts.buffer.rooms.items()]
    assert sum(sizes) <= 30 * STEP + 8 * STEP + 2 * 2 * STEP


def test_growth_stops_at_the_capacity() -> None:
    table = PlaceTable(STEP + 5, BYTES)
    place = table.take(1)
    assert table.growth(place, STEP + 5) == STEP + 5
    table.grow(STEP + 5)
    assert place.key == (STEP + 5, 0)
    assert table.slots == {STEP + 5: 1}


def test_an_empty_table_begins_anew() -> None:
    table = PlaceTable(1000, BYTES)
    place = table.take(300)
    assert table.shared == place.room == 5 * STEP
    table.free(place)
    assert (table.shared, table.slots) == (0, {})
    assert table.take(1).key == (STEP, 0), "a long text that left does not make the next ones large"


def spans_of(slots_: list[int], starts: list[int], counts: list[int]) -> Spans:
    table = PlaceTable(1000, BYTES)
    places = [table.take(1) for _ in range(max(slots_) + 1)]
    return Spans([places[slot] for slot in slots_], starts, counts, table, CPU)


def test_neighbours_with_equally_many_positions_are_a_group() -> None:
    spans = spans_of([0, 1, 2, 4, 5, 6], [3, 3, 5, 0, 0, 0], [2, 2, 2, 2, 1, 1])
    result = [(g.low, g.high, g.starts, g.count, g.columns, g.even, g.stop) for g in spans.groups]
    assert result == [
        (0, 3, (3, 3, 5), 2, slice(0, 6), False, 7),
        (4, 5, (0,), 2, slice(6, 8), True, 2),
        (5, 7, (0, 0), 1, slice(8, 10), True, 1),
    ]
    assert [g.positions.tolist() for g in spans.groups] == [[[3, 4], [3, 4], [5, 6]], [0, 1], [0]]
    assert isinstance(spans.offset, Tensor)
    assert spans.offset.tolist() == [[3, 4, 3, 4, 5, 6, 0, 1, 0, 0]]
    assert spans_of([2], [7], [3]).offset == 7
    assert spans.slices() == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8), slice(8, 9), slice(9, 10)]


def test_neighbours_with_few_positions_attend_as_one_rectangle() -> None:
    few, many = MAX_RAGGED, MAX_RAGGED + 1
    spans = spans_of([0, 1, 2, 4, 5, 6], [3, 0, 5, 0, 0, 0], [2, few, 1, 1, many, 1])
    result = [(g.low, g.high, g.count, g.columns, g.stop) for g in spans.attended]
    assert result == [
        (0, 3, few, slice(0, few + 3), few),
        (4, 5, 1, slice(few + 3, few + 4), 1),
        (5, 6, many, slice(few + 4, few + many + 4), many),
        (6, 7, 1, slice(few + many + 4, few + many + 5), 1),
    ]
    rows = spans.attended[0].positions.tolist()
    assert [row[:3] for row in rows] == [[3, 4, 0], [0, 1, 2], [5, 0, 0]], "places without a position see 0"


@pytest.mark.parametrize("dim", [1, 2])
def test_unpacked_columns_are_those_of_their_rows(dim: int) -> None:
    spans = spans_of([0, 1, 3], [4, 1, 0], [2, 2, 3])
    x = torch.arange(7)
    x = x.view(1, 7, 1) if dim == 1 else torch.stack([x, 10 + x])[None, :, :, None]
    first, second = (group.unpack(x, dim) for group in spans.groups)
    if dim == 1:
        assert first[..., 0].tolist() == [[0, 1], [2, 3]]
        assert second[..., 0].tolist() == [[4, 5, 6]]
    else:
        assert first[..., 0].tolist() == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
        assert second[..., 0].tolist() == [[[4, 5, 6], [14, 15, 16]]]


def test_spans_know_the_same_positions_again() -> None:
    spans = spans_of([0, 1], [4, 1], [2, 2])
    assert spans.matches(spans.places, [4, 1], [2, 2])
    assert not spans.matches(spans.places, [4, 1], [2, 1])
    assert not spans.matches(spans.places, [4, 2], [2, 2])
    spans.places[0].room += STEP
    assert not spans.matches(spans.places, [4, 1], [2, 2]), "a sequence that has moved is read elsewhere"


def test_what_lies_behind_a_copy_is_zero() -> None:
    """A position that no query may see has weight 0, and 0 times whatever was there could be NaN."""
    texts = Texts(1000)
    one, other = texts.new(), texts.new()
    for buffer in texts.buffers():
        buffer.at(STEP, 2).fill_(float("nan"))
    texts.write([one], [3], arrays=False)
    buffer = texts.buffer
    buffer.copy(one, other, 2, 2)
    assert torch.equal(buffer.rooms[STEP][1, :2], buffer.rooms[STEP][0, :2])
    assert not buffer.rooms[STEP][1, 2:].any()
    buffer.copy(Place(STEP, 7), other, 2, 2)
    assert not buffer.rooms[STEP][1].any(), "nobody has written to a slot that is not there"


@pytest.mark.parametrize(
    "buffer", [SlotBuffer((), (2,), torch.float32, CPU), ArrayBuffer((), (2,))], ids=["tensors", "arrays"]
)
def test_the_array_is_the_memory_of_the_tensor(buffer: SlotBuffer) -> None:
    buffer.array(STEP, 1)[0, 3] = 7
    assert buffer.at(STEP, 1)[0, 3].tolist() == [7, 7]
    buffer.at(STEP, 4)[0, 4] = 8
    assert buffer.array(STEP, 4)[0, 3:5].tolist() == [[7, 7], [8, 8]]
    buffer.grow(STEP, 2 * STEP)
    buffer.at(2 * STEP, 4)[3, 2 * STEP - 1] = 9
    assert buffer.array(2 * STEP, 4)[3, 2 * STEP - 1].tolist() == [9, 9]
    assert buffer.array(2 * STEP, 4)[0, 3].tolist() == [7, 7]


def test_arrays_are_copied_and_grown_as_tensors_are() -> None:
    both = SlotBuffer((3,), (2,), torch.float32, CPU), ArrayBuffer((3,), (2,))
    numbers = torch.randn(2, 3, STEP, 2)
    for buffer in both:
        buffer.at(STEP, 2)[:] = numbers
        buffer.copy(Place(STEP, 1), Place(2 * STEP, 0), 5, 1)
        buffer.copy(Place(STEP, 1), Place(STEP, 0), 7, 2)
        buffer.grow(STEP, 3 * STEP)
        buffer.copy(Place(3 * STEP, 9), Place(3 * STEP, 1), 4, 4)
        buffer.keep_rooms([2 * STEP, 3 * STEP])
    assert both[0].rooms.keys() == both[1].rooms.keys() == {2 * STEP, 3 * STEP}
    for room, count in ((2 * STEP, 1), (3 * STEP, 4)):
        assert torch.equal(both[0].at(room, count), both[1].at(room, count))
        assert both[1].array(room, count).ctypes.data % 64 == 0
