"""A stage's cache in the native backend: any sequences in any company, in rooms that grow and differ."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from operator_runtimes import PLAN, act, check, close
from topograd.decode.cache import Cache
from topograd.decode.engine import Engine
from topograd.nn import slots
from topograd.nn.stack import Stack
from topograd.nn.transformer.stack import Transformer
from topograd.runtime.native import library
from topograd.runtime.native.cache import NativeStageCache
from topograd.runtime.native.runtime import NativeRuntime
from topograd.runtime.protocol import ArrayRuntime, ArrayStageCache, ChainStageCache

if library.missing_reason():
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

VOCAB = 23


@pytest.fixture(scope="module")
def long(stack_of: Callable[[str], Stack]) -> NativeRuntime:
    small = stack_of("qwen3")
    assert isinstance(small, Transformer)
    torch.manual_seed(0)
    return NativeRuntime(Transformer(small.config.changed(context=300)).eval(), threads=2)


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "qwen3", "mistral", "gemma3"])
@torch.inference_mode()
def test_any_schedule_is_torchs(stack_of: Callable[[str], Stack], name: str) -> None:
    stack = stack_of(name)
    engines = [Engine(stack, "2,1,1"), Engine(stack, "2,1,1", runtime=NativeRuntime(stack, threads=2))]
    both = [engine.start([[k] for k in range(8)]) for engine in engines]
    for step in range(60):
        theirs, ours = (
            act(engine, batch, random.Random(step)) for engine, batch in zip(engines, both, strict=True)
        )
        close(ours, theirs)


@pytest.mark.parametrize("cap", [slots.MAX_SHARED_BYTES, 0], ids=["one room", "rooms"])
@torch.inference_mode()
def test_rooms_grow_and_forget_nothing(
    long: NativeRuntime, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_SHARED_BYTES", cap)
    chance, cache = random.Random(1), Cache(long, PLAN, 300)
    batch, rest = [cache.new() for _ in range(2)], cache.new()
    cache.push([rest], [[5, 6]])
    for start in range(0, 200, 40):
        new = [[chance.randrange(VOCAB) for _ in range(count)] for count in (40, 39 + (start == 0))]
        cache.push([*batch, rest], [*new, [start % VOCAB]])
        cache.run([*batch, rest], 1)
        check(long, [*batch, rest])
        cache.truncate(batch, [len(sequence) - 1 for sequence in batch])
    assert (rest.place.room == batch[0].place.room) == bool(cap)


@torch.inference_mode()
def test_a_sequence_begins_as_another_does(long: NativeRuntime) -> None:
    cache = Cache(long, PLAN, 300)
    one = cache.new()
    cache.push([one], [[1, 2, 3, 4, 5]])
    cache.run([one], 1)
    two = cache.fork(one, 4)
    cache.push([two], [[7]])
    cache.run([one, two], 1)
    check(long, [two, one])


@torch.inference_mode()
def test_addresses_are_found_once_until_buffers_grow(long: NativeRuntime) -> None:
    cache = Cache(long, PLAN, 300)
    sequence, seen = cache.new(), []
    stage = cache.stages[0]
    assert isinstance(stage, NativeStageCache)
    for count in (1, 1, 1, 100):
        cache.push([sequence], [[1] * count])
        cache.run([sequence], 1)
        check(long, [sequence])
        seen.append(next(reversed(stage._bindings.values())))
    assert seen[0] is seen[1] is seen[2]
    assert seen[3] is not seen[2]


@torch.inference_mode()
def test_stages_that_have_run_equally_far_are_one_call(
    long: NativeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[int] = []
    run = library.run_stage

    def counted(given: library.Run) -> None:
        layers.append(given.layers)
        run(given)

    monkeypatch.setattr(library, "run_stage", counted)
    cache = Cache(long, PLAN, 300)
    one, two = cache.new(), cache.new()
    cache.push([one, two], [[1, 2], [3]])
    cache.run([one, two], 1)
    cache.push([one, two], [[4], [5]])
    cache.run([one], 0)
    cache.run([one, two], 1)  # the first stage has run further in one of them
    check(long, [one, two])
    assert layers == [4, 2, 2, 2]


def test_it_takes_arrays(long: NativeRuntime) -> None:
    assert isinstance(long, ArrayRuntime)
    for kind in (ArrayStageCache, ChainStageCache):
        assert all(isinstance(stage, kind) for stage in long.stage_caches(PLAN, 8))
