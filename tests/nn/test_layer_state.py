"""What a layer keeps while decoding: what goes in comes out, going back, copies, growth, and the refusal."""

import random

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import StackError
from topograd.nn import layer_state
from topograd.nn.layer_state import History, KVState


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
    assert memory.truncate(3) == 3
    assert memory.length == 3
    all_keys, all_values = memory.append(later_keys, later_values)
    assert torch.equal(all_keys, torch.cat((keys[:, :, :3], later_keys), dim=2))
    assert torch.equal(all_values, torch.cat((values[:, :, :3], later_values), dim=2))
    assert memory.truncate(0) == 0
    assert torch.equal(memory.append(later_keys, later_values)[0], later_keys)


def test_a_full_state_refuses_and_stays_as_it_is() -> None:
    memory = state(capacity=3)
    memory.append(*positions(2))
    before = memory.keys.clone()
    with refused(StackError, setting="capacity", given=3):
        memory.append(*positions(2))
    assert memory.length == 2
    assert torch.equal(memory.keys, before)
    memory.append(*positions(1))


def test_going_back_to_the_future_changes_nothing() -> None:
    memory, history = state(), History(6)
    memory.append(*positions(2))
    history.append(torch.randn(2, 2, 4))
    assert memory.truncate(5) == memory.length == 2
    assert history.truncate(5) == history.length == 2


@pytest.mark.parametrize("seed", range(5))
def test_any_schedule_is_a_plain_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends, going back, and copies of which either goes on, through buffers that grow."""
    monkeypatch.setattr(layer_state, "FIRST", 2)
    torch.manual_seed(seed)
    chance, memory, history = random.Random(seed), state(40), History(40)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(40):
        what = chance.random()
        if what < 0.25:
            length = chance.randint(0, len(kept) + 2)
            assert memory.truncate(length) == history.truncate(length) == min(length, len(kept))
            del kept[length:]
        elif what < 0.4:
            twins = memory.copy(), history.copy()
            left = chance.choice([twins, (memory, history)])
            memory, history = (memory, history) if left is twins else twins
            left[0].append(*positions(1))  # nothing of it may reach the other
            left[1].append(torch.randn(2, 1, 4, dtype=torch.float64))
        count = chance.randint(0, 3)
        if len(kept) + count > 39:
            continue
        keys, values = positions(count)
        kept += [(keys[:, :, i], values[:, :, i]) for i in range(count)]
        all_keys, all_values = memory.append(keys, values)
        seen = history.append(keys[:, 0])
        if kept:
            assert torch.equal(all_keys, torch.stack([k for k, _ in kept], dim=2))
            assert torch.equal(all_values, torch.stack([v for _, v in kept], dim=2))
            assert torch.equal(seen, torch.stack([k[:, 0] for k, _ in kept], dim=1))
    assert memory.keys.shape[2] > 2, "a buffer that never grew would show less"


def test_room_that_nobody_wrote_to_is_zero() -> None:
    """What no query sees has weight 0 in attention, and 0 times NaN is NaN."""
    memory = state(600)
    for count in (1, 300):
        memory.append(*positions(count))
        assert not memory.keys[:, :, memory.length :].any()
        assert not memory.values[:, :, memory.length :].any()
