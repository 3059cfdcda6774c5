"""Rows in one buffer: any schedule is torch's, whoever lies between; rows that leave, or are too long."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from topograd.decode.cache import Cache
from topograd.decode.engine import Engine
from topograd.decode.rows import Rows, copy_prefix
from topograd.nn.stack import Stack
from topograd.runtime import joined, onnx_memory
from topograd.runtime.joined import Buffer, JoinedStage
from topograd.runtime.onnx_runtime import OnnxRuntime

ROWS = 6


def _act(engine: Engine, rows: list[Cache], dice: random.Random) -> torch.Tensor:
    """Something happens to some rows; what they predict after it."""
    what, (one, other) = dice.random(), dice.sample(range(ROWS), 2)
    if what < 0.2:
        rows[one].truncate([dice.randint(1, len(rows[one].tokens[0]))])
    elif what < 0.35:
        length = dice.randint(1, len(rows[other].tokens[0]))
        Rows([rows[one]]).truncate([0])
        copy_prefix(rows[other], rows[one], length)
    elif what < 0.45:
        rows[one] = _started(engine, one)
    some = Rows([rows[i] for i in dice.sample(range(ROWS), dice.randint(1, ROWS))])
    some.truncate([min(n, 12) for n in some.lengths()])
    most = dice.choice([1, 1, 3])
    some.push([[dice.randrange(20) for _ in range(dice.randint(1, most))] for _ in range(some.rows)])
    stage = dice.choice(engine.exits)
    engine.run(some, stage)
    return engine.logits(some, stage)


def _started(engine: Engine, token: int) -> Cache:
    cache = engine.start([[token]])
    assert isinstance(cache, Cache)
    return cache


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows ran together, each time."""
    found: list[int] = []
    run = Buffer.run

    def counted(self: Buffer, rows: list[JoinedStage], *rest: object) -> object:
        found.append(len(rows))
        return run(self, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Buffer, "run", counted)
    return found


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "qwen3", "mistral", "gemma3"])
def test_any_schedule_is_torchs(stack_of: Callable[[str], Stack], name: str, batches: list[int]) -> None:
    stack = stack_of(name)
    runtime = OnnxRuntime(stack)
    engines = [Engine(stack, "2,1,1"), Engine(stack, "2,1,1", runtime=runtime)]
    with torch.inference_mode():
        both = [[_started(engine, k) for k in range(ROWS)] for engine in engines]
        for step in range(40):
            theirs, ours = (
                _act(engine, rows, random.Random(step)) for engine, rows in zip(engines, both, strict=True)
            )
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    grouped = runtime.session(engines[1].plan.stages[0], True) is not None
    assert bool(batches) == grouped, "heads of a multiple of 16 run together, others one by one"
    assert not grouped or max(batches) > 2


def _memory(cache: Cache) -> JoinedStage:
    memory = cache.memories[0]
    assert isinstance(memory, JoinedStage)
    return memory


@torch.inference_mode()
def test_rows_take_the_first_free_place_and_leave_it(stack_of: Callable[[str], Stack]) -> None:
    stack = stack_of("qwen3")
    engine = Engine(stack, "4", runtime=OnnxRuntime(stack))
    rows = [_started(engine, k) for k in range(3)]
    Rows(rows).run(0)
    buffer = _memory(rows[0]).buffer
    assert buffer is not None
    assert [_memory(row).place for row in rows] == [0, 1, 2]
    assert (buffer.places, buffer.room) == (4, onnx_memory.STEP)
    kept = _memory(rows[2]).states["keys.0"][:, :, :1].copy()
    del rows[1]
    assert sorted(buffer.members) == [0, 2]
    rows.append(_started(engine, 5))
    assert _memory(rows[-1]).place == 1
    assert (_memory(rows[1]).states["keys.0"][:, :, :1] == kept).all()
    rows.clear()
    assert not buffer.members
    again = _started(engine, 1)
    assert (_memory(again).place, buffer.places) == (0, 1), "nobody is left, so it is small again"


@torch.inference_mode()
def test_a_row_that_is_too_long_has_memory_of_its_own(
    stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch, batches: list[int]
) -> None:
    stack = stack_of("qwen3")
    monkeypatch.setattr(onnx_memory, "STEP", 4)
    engine, theirs = Engine(stack, "4", runtime=OnnxRuntime(stack)), Engine(stack, "4")
    rows, other = ([_started(each, k) for k in range(3)] for each in (engine, theirs))
    Rows(rows).run(0)
    buffer = _memory(rows[0]).buffer
    assert buffer is not None
    size = sum(state.nbytes for state in buffer.states.values())
    monkeypatch.setattr(joined, "MOST_BYTES", size)
    for token in range(9):
        for some in (rows, other):
            Rows(some).push([[token], [token] if token < 1 else [], [token] if token < 1 else []])
            Rows(some).run(0)
    assert _memory(rows[0]).buffer is None
    assert sorted(buffer.members) == [1, 2]
    assert sum(state.nbytes for state in buffer.states.values()) == size
    for some in (rows, other):
        Rows(some).push([[3]] * 3)
        Rows(some).run(0)
    ours, expected = engine.logits(Rows(rows), 0), theirs.logits(Rows(other), 0)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert batches[-1] == 2, "the other two go on together"
