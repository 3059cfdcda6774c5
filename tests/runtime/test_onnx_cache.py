"""A stage's cache in ONNX Runtime: any sequences in any company are torch's, whoever lies between them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("onnxruntime")

from operator_runtimes import PLAN, act, check, close
from topograd.decode.cache import Cache
from topograd.decode.engine import Engine
from topograd.nn import slots
from topograd.nn.slots import STEP
from topograd.nn.stack import Stack
from topograd.nn.transformer.stack import Transformer
from topograd.runtime import onnx_cache
from topograd.runtime.onnx_cache import GAP, PADDED, OnnxStageCache
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.topology.plan import Plan

VOCAB, CONTEXT = 23, 20
GROUPED, PACKED = "qwen3", "llama"
"""Heads of 16 numbers may be grouped, heads of 6 may not."""


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "qwen3", "mistral", "gemma3"])
@torch.inference_mode()
def test_any_schedule_is_torchs(stack_of: Callable[[str], Stack], name: str) -> None:
    stack = stack_of(name)
    runtime = OnnxRuntime(stack)
    engines = [Engine(stack, "2,1,1"), Engine(stack, "2,1,1", runtime=runtime)]
    both = [engine.start([[k] for k in range(8)]) for engine in engines]
    for step in range(60):
        theirs, ours = (
            act(engine, batch, random.Random(step)) for engine, batch in zip(engines, both, strict=True)
        )
        close(ours, theirs)
    layouts = {key[-1] for key in runtime._sessions}
    grouped = runtime.session(engines[1].plan.stages[0], grouped=True) is not None
    assert layouts == ({True, False} if grouped else {False})
    assert grouped == (name != "llama"), "heads of a multiple of 16 are grouped"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of x0 of each run of a session."""
    found: list[tuple[int, ...]] = []
    run = onnx_cache.Binding.run

    def counted(self: onnx_cache.Binding) -> None:
        found.append(self.frame.x0.shape[:2])
        run(self)

    monkeypatch.setattr(onnx_cache.Binding, "run", counted)
    return found


class Both:
    """The same sequences in onnxruntime and in torch."""

    def __init__(self, stack: Stack, prompts: list[list[int]], plan: Plan = PLAN) -> None:
        self.engines = [Engine(stack, plan, runtime=OnnxRuntime(stack)), Engine(stack, plan)]
        self.batches = [engine.start(prompts) for engine in self.engines]

    @property
    def cache(self) -> OnnxStageCache:
        stage = self.batches[0][0].cache.stages[1]
        assert isinstance(stage, OnnxStageCache)
        return stage

    def step(self, tokens: dict[int, list[int]]) -> None:
        """New tokens of some sequences, by number, run in both and compared."""
        results = []
        for engine, batch in zip(self.engines, self.batches, strict=True):
            some = [batch[i] for i in tokens]
            some[0].cache.push(some, list(tokens.values()))
            engine.run(some, engine.exits[-1])
            counts = [max(len(new), 1) for new in tokens.values()]
            results.append(engine.logits(some, engine.exits[-1], counts))
        close(*results)


@torch.inference_mode()
def test_which_session_runs_what(stack_of: Callable[[str], Stack], runs: list[tuple[int, ...]]) -> None:
    """One sequence, and one position of each of several, are grouped; anything else is packed."""
    both = Both(stack_of(GROUPED), [[i] for i in range(5)], Plan.of("4", 4))
    for tokens, expected in (
        ({2: [1, 2, 3]}, (1, 4)),
        ({0: [4], 1: [5], 3: [6], 4: [7]}, (1, 8)),
        ({0: [4], 1: [5], 3: [6], 4: [7]}, (5, 1)),
        ({0: [4], 1: [5], 2: [6, 7], 3: [8]}, (1, PADDED)),
        ({4: [8], 3: [1]}, (2, 1)),
    ):
        runs.clear()
        both.step(tokens)
        assert runs == [expected], tokens


@torch.inference_mode()
def test_those_between_run_too_and_keep_what_they_have(
    stack_of: Callable[[str], Stack], runs: list[tuple[int, ...]]
) -> None:
    count = GAP + 6
    both = Both(stack_of(GROUPED), [[i] for i in range(count)], Plan.of("4", 4))
    both.step({i: [i + 1] for i in range(count)})
    runs.clear()
    both.step({0: [1], GAP + 1: [2]})
    assert runs == [(GAP + 2, 1)], "a gap is bridged"
    runs.clear()
    both.step({0: [1], GAP + 2: [2]})
    assert runs == [(1, 1), (1, 1)], "a wider one is not"
    for _ in range(3):
        both.step({0: [3], GAP + 1: [4], count - 1: [5]})
    both.step({i: [7] for i in range(count)})
    both.step({i: [7, 8][: 1 + i % 2] for i in range(count)})


@torch.inference_mode()
def test_a_full_sequence_lies_between_others(stack_of: Callable[[str], Stack]) -> None:
    """It has a position behind its last for what is written there."""
    both = Both(stack_of(GROUPED), [[1], [2] * CONTEXT, [3]])
    for step in range(3):
        both.step({0: [step], 2: [step]})
    for batch in both.batches:
        batch[0].cache.truncate([batch[1]], [CONTEXT - 1])
    both.step({1: [5]})


@torch.inference_mode()
def test_who_left_lies_between_others(stack_of: Callable[[str], Stack]) -> None:
    both = Both(stack_of(GROUPED), [[1], [2, 3, 4, 5], [3]])
    both.step({0: [1], 1: [1], 2: [1]})
    for batch in both.batches:
        batch[0].cache.free(batch[1])
    both.step({0: [2], 2: [2]})
    for batch in both.batches:
        batch[1] = batch[0].cache.new()
        assert batch[1].place.slot == 1, "the first free slot"
    both.step({0: [3], 2: [3]})
    both.step({1: [4, 4]})
    both.step({0: [5], 1: [5], 2: [5]})


@pytest.mark.parametrize("name", [GROUPED, PACKED, "gpt-windows", "gpt2"])
@torch.inference_mode()
def test_drafts_of_unlike_lengths_are_packed(stack_of: Callable[[str], Stack], name: str) -> None:
    both = Both(stack_of(name), [[1, 2, 3], [4], [5] * 6, [7, 8]])
    for draft in ({0: [1, 2, 3], 1: [4], 3: [5, 6]}, {1: [2, 2], 2: [3, 3, 3, 3]}, {0: [1, 9], 2: [1, 9]}):
        both.step(draft)
        for batch in both.batches:
            some = [batch[i] for i in draft]
            some[0].cache.truncate(some, [len(sequence) - 1 for sequence in some])


@pytest.fixture(scope="module", params=[GROUPED, PACKED])
def long(request: pytest.FixtureRequest, stack_of: Callable[[str], Stack]) -> OnnxRuntime:
    small = stack_of(request.param)
    assert isinstance(small, Transformer)
    torch.manual_seed(0)
    return OnnxRuntime(Transformer(small.config.changed(context=300)).eval())


@pytest.mark.parametrize("cap", [slots.MAX_SHARED_BYTES, 0], ids=["one room", "rooms"])
@torch.inference_mode()
def test_rooms_grow_in_steps_and_forget_nothing(
    long: OnnxRuntime, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_SHARED_BYTES", cap)
    tokens = torch.randint(VOCAB, (2, 200), generator=torch.Generator().manual_seed(1)).tolist()
    cache = Cache(long, PLAN, 300)
    batch, rest = [cache.new() for _ in range(2)], cache.new()
    cache.push([rest], [[5, 6]])
    for start in range(0, 200, 40):  # one sequence a token ahead
        new = [tokens[0][start : start + 40], tokens[1][start + (start > 0) : start + 41], [start % VOCAB]]
        cache.push([*batch, rest], new)
        cache.run([*batch, rest], 1)
        for sequence in batch:
            assert sequence.place.room % STEP == 0
            assert len(sequence) < sequence.place.room <= 2 * len(sequence) + STEP
        cache.push(batch, [[1], [2]])
        cache.run(batch, 1)
        check(long, [*batch, rest])
        cache.truncate(batch, [len(sequence) - 1 for sequence in batch])
    assert (rest.place.room == batch[0].place.room) == bool(cap)


@torch.inference_mode()
def test_a_shape_is_bound_once_and_stages_share_its_frame(long: OnnxRuntime) -> None:
    cache = Cache(long, PLAN, 300)
    sequence = cache.new()
    seen = []
    for _ in range(3):
        cache.push([sequence], [[1]])
        cache.run([sequence], 1)
        found = []
        for stage in cache.stages:
            assert isinstance(stage, OnnxStageCache)
            (binding,) = stage._bindings.values()
            found.append(binding)
        seen.append(found)
    assert seen[0] == seen[1] == seen[2]
    first, second = seen[0]
    assert first.frame is second.frame, "stages share what they read"


@torch.inference_mode()
def test_bindings_of_buffers_that_have_grown_are_let_go(stack_of: Callable[[str], Stack]) -> None:
    both = Both(stack_of(GROUPED), [[1]])
    both.step({0: [1]})
    assert {key[2] for key in both.cache._bindings} == {1}
    for batch in both.batches:
        batch += [batch[0].cache.new() for _ in range(2)]
    both.step({1: [1, 2], 2: [3]})
    both.step({0: [2], 1: [1], 2: [3]})
    assert {key[2] for key in both.cache._bindings} == {4}, "slots, which are now four"
    for batch in both.batches:
        for sequence in batch:
            sequence.cache.free(sequence)
    assert not both.cache._bindings
    assert not both.cache.slots[0].keys.rooms  # type: ignore[union-attr]


@torch.inference_mode()
def test_a_sequence_begins_as_another_does(long: OnnxRuntime) -> None:
    cache = Cache(long, PLAN, 300)
    one = cache.new()
    cache.push([one], [[1, 2, 3, 4, 5]])
    cache.run([one], 1)
    two = cache.fork(one, 4)
    assert two.marks == [4, 4], "nothing of it is run again"
    cache.push([two], [[7]])
    cache.run([one, two], 1)
    check(long, [two, one])
    three = cache.fork(two)
    cache.push([one, two, three], [[1], [2], [3]])
    cache.run([three, one, two], 1)
    check(long, [one, three, two])


@torch.inference_mode()
def test_other_tokens_at_the_same_positions(long: OnnxRuntime) -> None:
    """A frame is filled once for its positions; going back makes them others."""
    cache = Cache(long, PLAN, 300)
    batch = [cache.new(), cache.new()]
    cache.push(batch, [[1, 2], [3]])
    for token in range(4):
        cache.push(batch, [[token], [token + 1, 5]])
        cache.run(batch, 1)
        check(long, batch)
        cache.truncate(batch, [2, 1])
