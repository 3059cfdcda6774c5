"""Keys and values while decoding: what goes in comes out, going back, and the two errors."""

import pytest
import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.layer_state import KVState


def state(capacity: int = 6) -> KVState:
    return KVState(2, 3, capacity, 4, torch.device("cpu"), torch.float64)


def positions(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, count, 4, dtype=torch.float64), torch.randn(2, 3, count, 4, dtype=torch.float64)


def test_append_returns_everything_so_far() -> None:
    memory = state()
    assert (memory.capacity, memory.length) == (6, 0)
    parts = [positions(n) for n in (2, 1, 3)]
    for i, (keys, values) in enumerate(parts):
        all_keys, all_values = memory.append(keys, values)
        assert torch.equal(all_keys, torch.cat([k for k, _ in parts[: i + 1]], dim=2))
        assert torch.equal(all_values, torch.cat([v for _, v in parts[: i + 1]], dim=2))
    assert memory.length == 6


def test_forgotten_positions_are_overwritten() -> None:
    memory = state()
    (keys, values), (later_keys, later_values) = positions(5), positions(2)
    memory.append(keys, values)
    assert memory.rewind([3, 2]) == [3, 2]
    assert memory.length == 3
    all_keys, all_values = memory.append(later_keys, later_values)
    assert torch.equal(all_keys, torch.cat((keys[:, :, :3], later_keys), dim=2))
    assert torch.equal(all_values, torch.cat((values[:, :, :3], later_values), dim=2))
    memory.rewind([0, 0])
    assert torch.equal(memory.append(later_keys, later_values)[0], later_keys)


def test_a_full_state_refuses_and_stays_as_it_is() -> None:
    memory = state(capacity=3)
    memory.append(*positions(2))
    with pytest.raises(StackError, match="holds 3 positions and 4 are needed; make it with more capacity"):
        memory.append(*positions(2))
    assert memory.length == 2
    memory.append(*positions(1))


def test_going_back_to_the_future_changes_nothing() -> None:
    memory = state()
    memory.append(*positions(2))
    memory.rewind([5, 5])
    assert memory.length == 2
