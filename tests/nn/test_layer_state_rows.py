"""Keys and values of ragged rows, against one state for each row."""

import random

import pytest
import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.layer_state import KVState

HEADS, WIDTH, CAPACITY = 2, 3, 8


def state(rows: int, capacity: int = CAPACITY) -> KVState:
    return KVState(rows, HEADS, capacity, WIDTH, torch.device("cpu"), torch.float64)


def new(rows: int, time: int) -> tuple[Tensor, Tensor]:
    shape = (rows, HEADS, time, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_of_rows_is_each_row_by_itself(seed: int) -> None:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    together, alone = state(3), [state(1) for _ in range(3)]
    lengths = [0, 0, 0]
    while max(lengths) < CAPACITY - 1:
        counts = [chance.randint(0, min(3, CAPACITY - 1 - n)) for n in lengths]
        counts[0] = max(counts[0], 1)
        spare = max(n + count for n, count in zip(lengths, counts, strict=True))
        slots = [
            [n + i if i < count else spare for i in range(max(counts))]
            for n, count in zip(lengths, counts, strict=True)
        ]
        keys, values = new(3, max(counts))
        all_keys, all_values = together.append(keys, values, torch.tensor(slots))
        assert all_keys.shape[2] == all_values.shape[2] == max(map(max, slots)) + 1
        for row, (single, count) in enumerate(zip(alone, counts, strict=True)):
            part = keys[row : row + 1, :, :count], values[row : row + 1, :, :count]
            expected_keys, expected_values = single.append(*part)
            lengths[row] += count
            assert torch.equal(all_keys[row : row + 1, :, : lengths[row]], expected_keys)
            assert torch.equal(all_values[row : row + 1, :, : lengths[row]], expected_values)
    assert len(set(lengths)) > 1, "rows of one length would show nothing"


def test_rows_that_agree_are_the_plain_append() -> None:
    torch.manual_seed(0)
    plain, rows = state(2), state(2)
    for start, count in ((0, 3), (3, 1), (4, 2)):
        keys, values = new(2, count)
        expected = plain.append(keys, values, torch.arange(start, start + count))
        found = rows.append(keys, values, torch.arange(start, start + count).expand(2, count))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert rows.length == plain.length == start + count


def test_a_row_that_went_back_overwrites_its_own_slots_alone() -> None:
    torch.manual_seed(0)
    memory, (keys, values), (late_keys, late_values) = state(2), new(2, 4), new(2, 1)
    memory.append(keys, values)
    all_keys, all_values = memory.append(late_keys, late_values, torch.tensor([[1], [4]]))
    assert torch.equal(all_keys[0, :, 1], late_keys[0, :, 0])
    assert torch.equal(all_values[1, :, 4], late_values[1, :, 0])
    assert torch.equal(all_keys[0, :, [0, 2, 3]], keys[0, :, [0, 2, 3]])
    assert torch.equal(all_values[1, :, :4], values[1])
    assert memory.length == 5


def test_the_length_never_shrinks_by_an_append() -> None:
    memory = state(2)
    memory.append(*new(2, 5))
    keys, _ = memory.append(*new(2, 1), torch.tensor([[1], [2]]))
    assert keys.shape[2] == 3, "no query of these rows sees more"
    assert memory.length == 5
    memory.rewind([3, 1])
    assert memory.length == 3


def test_unseen_slots_are_finite() -> None:
    """They have weight 0 in attention, and 0 times NaN is NaN."""
    keys, values = state(2).append(*new(2, 1), torch.tensor([[0], [6]]))
    assert keys.isfinite().all()
    assert values.isfinite().all()


def test_a_slot_beyond_the_capacity_is_refused_and_nothing_is_stored() -> None:
    memory = state(2, capacity=4)
    memory.append(*new(2, 2))
    before = memory.keys.clone()
    with pytest.raises(StackError, match="holds 4 positions and 5 are needed; make it with more capacity"):
        memory.append(*new(2, 1), torch.tensor([[2], [4]]))
    assert torch.equal(memory.keys, before)
    assert memory.length == 2
