"""A stage's memory: buffers that grow in steps, slots that are bound once, rows that begin as others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("onnxruntime")

from topograd.decode.cache import Cache
from topograd.decode.rows import Rows, copy_prefix
from topograd.exec.forward import stage_outputs
from topograd.nn.stack import Stack
from topograd.nn.transformer.stack import Transformer
from topograd.runtime.onnx_memory import STEP, OnnxStage
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.topology.plan import Plan


@pytest.fixture(scope="module")
def runtime(stack_of: Callable[[str], Stack]) -> OnnxRuntime:
    small = stack_of("llama")
    assert isinstance(small, Transformer)
    torch.manual_seed(0)
    return OnnxRuntime(Transformer(small.config.changed(context=300)).eval())


PLAN = Plan.of("2,2", 4)


@torch.inference_mode()
def test_buffers_grow_in_steps_and_forget_nothing(runtime: OnnxRuntime) -> None:
    tokens = torch.randint(23, (2, 200)).tolist()
    cache = Cache(runtime, PLAN, 300, rows=2)
    stage = cache.memories[1]
    assert isinstance(stage, OnnxStage)
    for start in range(0, 200, 40):  # one row a token ahead
        cache.push([tokens[0][start : start + 40], tokens[1][start + (start > 0) : start + 41]])
        cache.run(1)
        room = stage.states["keys.2"].shape[2]
        assert room % STEP == 0
        assert max(cache.lengths()) <= room < max(cache.lengths()) + 41 + STEP
    found = cache.hidden(1)
    for row in range(2):
        wanted = stage_outputs(runtime.stack, PLAN, torch.tensor([tokens[row]]), [1])[1][0, -1]
        torch.testing.assert_close(found[row, 0], wanted, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_slot_is_bound_once(runtime: OnnxRuntime) -> None:
    cache = Cache(runtime, PLAN, 300)
    first, second = cache.memories
    assert isinstance(first, OnnxStage)
    assert isinstance(second, OnnxStage)
    slots = []
    for _ in range(3):
        cache.push([[1]])
        cache.run(1)
        slots.append((first._slots[1, True], second._slots[1, True]))
    assert slots[0] == slots[1] == slots[2]
    assert slots[0][0].frame is slots[0][1].frame, "stages share what they hear"


@torch.inference_mode()
def test_a_row_begins_as_another_does(runtime: OnnxRuntime) -> None:
    one, two = (Cache(runtime, PLAN, 300) for _ in range(2))
    one.push([[1, 2, 3, 4, 5]])
    one.run(1)
    assert copy_prefix(one, two, 4) == 4
    two.push([[7]])
    rows = Rows([one, two])
    rows.run(1)
    wanted = stage_outputs(runtime.stack, PLAN, torch.tensor([[1, 2, 3, 4, 7]]), [1])[1][0, -1]
    torch.testing.assert_close(rows.hidden(1)[1, 0], wanted, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_one_operator_attends_wherever_it_can(stack_of: Callable[[str], Stack]) -> None:
    """One row, rows that begin, and one column of each row; several columns of several rows ask for more."""
    runtime = OnnxRuntime(stack_of("gpt-plain"))
    grouped = {True}
    cache = Cache(runtime, PLAN, 20, rows=2)
    for tokens in ([[1, 2, 3], [4, 5]], [[6], [7]], [[8], []]):
        cache.push(tokens)
        cache.run(1)
        assert {key[-1] for key in runtime._sessions} == grouped
    cache.select([1])
    cache.push([[1, 2, 3]])
    cache.run(1)
    assert {key[-1] for key in runtime._sessions} == grouped
    cache.select([0, 0])
    cache.push([[1, 2], [3]])
    cache.run(1)
    assert {key[-1] for key in runtime._sessions} == {True, False}


@torch.inference_mode()
def test_heads_of_another_width_are_not_grouped(runtime: OnnxRuntime) -> None:
    cache = Cache(runtime, PLAN, 300)
    cache.push([[1, 2]])
    cache.run(1)
    assert not any(key[-1] for key in runtime._sessions)
