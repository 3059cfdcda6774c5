"""What is run late gives what running everything at once gives, in hidden states, keys and values, for any
sequences together; and no position is run twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from tests.oracles.decoding import next_logits
from topograd.decode.cache import Batch, Cache
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Engine
from topograd.decode.sequence import Sequence
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth
from topograd.errors import StackError
from topograd.exec.forward import stage_outputs
from topograd.nn import slots
from topograd.nn.config import SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.slots import KVSlots
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

VOCAB, CAPACITY = 17, 12
ROOT = Edge(EMBEDDING, grad_scale=1.0)


class Half(nn.Module):
    """Sends half of h and of what was heard, receives that and 1."""

    def send(self, h: Tensor, heard: Tensor | None) -> Tensor:
        assert heard is not None
        return (h + heard) / 2

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message + ctx.x0 + 1


TOPOLOGIES = {
    "chain": Topology.chain("1,1,2"),
    "fine chain": Topology.chain("1,1,1,1"),
    "input bus": Topology.chain("1,2,1").with_input_bus(),
    "regions": Topology.regions("1,1,2"),
    "canvas": Topology.regions("1,1,2", canvas=1),
    "forest": Topology.forest(["1,1", "2"]),
    "cover": Topology.cover([(0, 3), (1, 4)]),
    "diamond": Topology(
        4,
        (
            Stage(0, 1, (ROOT,)),
            Stage(1, 2, (Edge(0),)),
            Stage(2, 3, (Edge(0),)),
            Stage(3, 4, (Edge(1), Edge(2))),
        ),
    ),
    "relay": Topology(
        4,
        (
            Stage(0, 2, (ROOT,)),
            Stage(2, 3, (Edge(0, layer=1, relay="halving"),)),
            Stage(3, 4, (Edge(1), Edge(0))),
        ),
    ),
}


@pytest.fixture(scope="module")
def stacks(make_gpt: Callable[..., GPT]) -> dict[str, Stack]:
    gpt = make_gpt(width=16, vocab=VOCAB, context=CAPACITY, windows=(0, 3))
    gpt.add_relay("halving", Half())
    add_interfaces(gpt, SegmentInterface(segments=4, rank=4, pool="cumulative"), 3, 16, CAPACITY)
    for relay in gpt.learned_relays().values():
        for parameter in relay.parameters():
            nn.init.normal_(parameter, std=0.3)
    kin = {
        kind: make_gpt(width=16, vocab=VOCAB, context=CAPACITY, architecture=kind, ssm_state=4)
        for kind in ("mamba2", "mamba3", "hybrid")
    }
    for stack in kin.values():
        for name, relay in gpt.learned_relays().items():
            stack.add_relay(name, relay)
    return {"gpt": gpt, "decoding": gpt.for_decoding(), **{k: v.for_decoding() for k, v in kin.items()}}


def plan_of(topology: Topology) -> Plan:
    return Plan.of(topology, 4)


def start(cache: Cache, count: int) -> list[Sequence]:
    return [cache.new() for _ in range(count)]


def check(cache: Cache, batch: Batch) -> None:
    """Everything that has run, against a new cache that reads all tokens of one sequence at once."""
    for sequence in batch:
        if not sequence.tokens:
            continue
        fresh = Cache(cache.stack, cache.plan, CAPACITY)
        (whole,) = start(fresh, 1)
        fresh.push([whole], [sequence.tokens])
        for stage, mark in enumerate(sequence.marks):
            fresh.run([whole], stage)
            if not mark:
                continue
            close(cache.hidden([sequence], stage, [mark]), fresh.hidden([whole], stage, [len(whole)])[:mark])
            for own, expected in zip(cache.stages[stage].slots, fresh.stages[stage].slots, strict=True):
                if own is not None and expected is not None:
                    for mine, theirs in zip(kept(own, sequence), kept(expected, whole), strict=True):
                        close(mine[:, :mark], theirs[:, :mark])


def kept(held: KVSlots, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """The keys and values (heads, room, width) of a sequence."""
    room, slot = sequence.place.key
    return held.keys.rooms[room][slot], held.values.rooms[room][slot]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


def act(cache: Cache, batch: list[Sequence], chance: random.Random) -> str:
    """Something that a strategy or a server could do, with some of the sequences."""
    kind = chance.choices(["push", "run", "truncate", "fork", "free"], [6, 6, 2, 1, 1])[0]
    some = chance.sample(batch, chance.randint(1, len(batch)))
    if kind == "push":
        counts = [chance.randint(0, min(3, CAPACITY - len(s))) for s in some]
        cache.push(some, [[chance.randrange(VOCAB) for _ in range(n)] for n in counts])
    elif kind == "run":
        cache.run(some, chance.randrange(len(cache.plan.stages)))
    elif kind == "fork" and len(batch) < 5:
        batch.append(cache.fork(some[0], chance.randint(0, len(some[0]))))
    elif kind == "free" and len(batch) > 1:
        batch.remove(some[0])
        cache.free(some[0])
    elif kind == "truncate":
        cache.truncate(some, [chance.randint(max(len(s) - 4, 0), len(s)) for s in some])
    return kind


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("decoding", name) for name in TOPOLOGIES),
        *(("gpt", name) for name in ("chain", "relay")),
        *(
            (kind, name)
            for kind in ("mamba2", "mamba3", "hybrid")
            for name in ("chain", "regions", "canvas", "diamond")
        ),
    ],
)
def test_any_schedule_gives_what_running_everything_at_once_gives(
    stacks: dict[str, Stack], kind: str, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "STEP", 4)  # so that rooms grow within a short text
    for seed in range(2):
        chance = random.Random(seed)
        cache = Cache(stacks[kind], plan_of(TOPOLOGIES[name]), CAPACITY)
        batch = start(cache, count)
        done = [act(cache, batch, chance) for _ in range(40)]
        assert {"push", "run", "truncate", "fork", "free"} <= set(done)
        check(cache, batch)
        cache.push(batch, [[1] * min(1, CAPACITY - len(s)) for s in batch])
        for stage in reversed(range(len(cache.plan.stages))):
            cache.run(batch, stage)
            assert not any(cache.pending(s, stage) for s in batch)
        check(cache, batch)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["decoding", "mamba2"])
def test_sequences_too_long_to_share_a_room_have_others(
    stacks: dict[str, Stack], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap on the bytes of the shared room: then sequences of one batch lie in several buffers."""
    monkeypatch.setattr(slots, "STEP", 2)
    monkeypatch.setattr(slots, "MAX_SHARED_BYTES", 1 << 13)
    chance = random.Random(3)
    cache = Cache(stacks[kind], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    batch = start(cache, 4)
    rooms = set()
    for _ in range(40):
        act(cache, batch, chance)
        rooms.add(len({s.place.room for s in batch}))
    check(cache, batch)
    if kind == "decoding":
        assert max(rooms) > 1


@torch.no_grad()
def test_a_sequence_of_numbers_that_are_none_leaves_its_slot_clean(stacks: dict[str, Stack]) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    bad, other = start(cache, 2)
    cache.push([bad, other], [[1] * 8, [2, 3]])
    cache.run([bad, other], 2)
    for stage in cache.stages:
        for held in stage.slots:
            assert held is not None
            for tensor in kept(held, bad):
                tensor.fill_(torch.nan)
    cache.free(bad)
    fresh = cache.new()
    assert fresh.place.slot == 0, "the slot is taken again"
    for tokens in ([4], [5], [6]):
        cache.push([fresh, other], [tokens, tokens])
        cache.run([fresh, other], 2)
    check(cache, [fresh, other])


@torch.no_grad()
def test_hidden_states_are_those_of_the_gpt_itself(stacks: dict[str, Stack]) -> None:
    plan, tokens = plan_of(TOPOLOGIES["chain"]), [[3, 1, 4, 1, 5, 9], [2, 6]]
    cache = Cache(stacks["decoding"], plan, CAPACITY)
    batch = start(cache, 2)
    cache.push(batch, [row[:1] for row in tokens])
    cache.run(batch, 1)
    cache.push(batch, [row[1:] for row in tokens])
    cache.run(batch, 2)
    for sequence, ids in zip(batch, tokens, strict=True):
        whole = stage_outputs(stacks["gpt"], plan, torch.tensor([ids]), range(3))
        for stage in range(3):
            close(cache.hidden([sequence], stage, [len(ids)]), whole[stage][0])


@torch.no_grad()
def test_sequences_are_read_in_the_order_in_which_they_are_asked_for(stacks: dict[str, Stack]) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    batch = start(cache, 3)
    cache.push(batch, [[1, 2, 3], [4], [5, 6]])
    cache.run(batch, 0)
    a, b, c = batch
    found = cache.hidden([c, a, b], 0, [2, 1, 1])
    expected = [cache.hidden([s], 0, [n]) for s, n in ((c, 2), (a, 1), (b, 1))]
    assert torch.equal(found, torch.cat(expected))


@torch.no_grad()
def test_sequences_may_drift_apart_and_meet_again(stacks: dict[str, Stack]) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    batch = start(cache, 2)
    for tokens in ([[1, 2, 3], [4]], [[], [5, 6]], [[7], [8]], [[9, 1], [2, 3]]):
        cache.push(batch, tokens)
        cache.run(batch, 2)
        check(cache, batch)
    assert [len(s) for s in batch] == [6, 6]


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
def test_another_token_in_the_same_place(stacks: dict[str, Stack], count: int) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    batch = start(cache, count)
    cache.push(batch, [[1, 2, 3], [4]][:count])
    cache.run(batch, 2)
    for token in (5, 6):
        cache.push(batch, [[token]] * count)
        cache.run(batch, 2)
        check(cache, batch)
        cache.truncate(batch, [3, 1][:count])


@torch.no_grad()
def test_what_is_pending_is_one_batch_and_no_position_runs_twice(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack = stacks["decoding"]
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["chain"]), CAPACITY)
    (sequence,) = batch = start(cache, 1)
    cache.push(batch, [[1, 2, 3]])
    assert visits.calls == [[], [], [], []], "pushing runs no layer"
    cache.run(batch, 0)
    cache.push(batch, [[4]])
    cache.run(batch, 0)
    cache.run(batch, 0)
    cache.push(batch, [[5]])
    cache.run(batch, 1)
    cache.push(batch, [[6]])
    assert cache.pending(sequence, 2) == 6
    assert cache.pending(sequence, 1) == 1
    cache.run(batch, 2)
    cache.run(batch, 1)
    assert visits.calls[0] == [[[0, 1, 2]], [[3]], [[4]], [[5]]]
    assert visits.calls[1] == [[[0, 1, 2, 3, 4]], [[5]]]
    assert visits.calls[2] == visits.calls[3] == [[[0, 1, 2, 3, 4, 5]]]
    visits.clear()
    cache.truncate(batch, [4])
    cache.push(batch, [[7]])
    cache.run(batch, 2)
    assert visits.calls == [[[[4]]]] * 4


@torch.no_grad()
def test_only_stages_that_are_read_are_run(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack = stacks["decoding"]
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["forest"]), CAPACITY)
    batch = start(cache, 1)
    cache.push(batch, [[1, 2]])
    cache.run(batch, 2)
    assert visits.calls == [[], [], [[[0, 1]]], [[[0, 1]]]]


@torch.no_grad()
def test_sequences_of_any_lengths_are_one_pass_without_padding(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack, chance = stacks["decoding"], random.Random(5)
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["chain"]), CAPACITY)
    batch = start(cache, 3)
    for _ in range(12):
        cache.push(batch, [[1] * chance.randint(0, min(2, CAPACITY - len(s))) for s in batch])
        stage, before = chance.randrange(3), [list(s.marks) for s in batch]
        visits.clear()
        cache.run(batch, stage)
        for k in range(3):
            due = [p for s, marks in zip(batch, before, strict=True) for p in range(marks[k], s.marks[k])]
            assert visits.calls[k] == ([[due]] if due else []), "the positions of all, one after another"
    assert len({len(s) for s in batch}) > 1


@torch.no_grad()
def test_what_cannot_be_is_refused(stacks: dict[str, Stack]) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    a, b = batch = start(cache, 2)
    with refused(StackError, setting="counts", given=1):
        cache.hidden(batch, 0)
    cache.push(batch, [[1] * 9, [2] * 3])
    with refused(StackError, setting="stop", given=13):
        cache.push(batch, [[1] * 4, []])
    assert [len(a), len(b)] == [9, 3], "nothing was pushed"
    cache.run(batch, 1)
    with refused(StackError, setting="counts", given=4):
        cache.hidden(batch, 1, [4, 4])
    with refused(StackError, setting="counts", given=1):
        cache.hidden(batch, 2)
    with refused(StackError, setting="length", given=10):
        cache.fork(a, 10)
    assert [len(a), len(b)] == [9, 3]


@torch.no_grad()
def test_a_prompt_is_read_once_and_continued_in_many_ways(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack = stacks["decoding"]
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["chain"]), CAPACITY)
    a, b = start(cache, 2)
    cache.push([a, b], [[1, 2, 3], [4]])
    cache.run([a, b], 2)
    batch = [a, cache.fork(a), b, cache.fork(a)]
    cache.push(batch, [[5], [6, 7], [8], []])
    cache.run(batch, 2)
    assert [s.tokens for s in batch] == [[1, 2, 3, 5], [1, 2, 3, 6, 7], [4, 8], [1, 2, 3]]
    assert [len(calls) for calls in visits.calls] == [2] * 4
    check(cache, batch)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["decoding", "mamba2", "hybrid"])
def test_a_fork_is_as_far_as_each_stage_had_come(stacks: dict[str, Stack], kind: str) -> None:
    """Where a recurrent state cannot be cut, the stage runs the rest again."""
    cache = Cache(stacks[kind], plan_of(TOPOLOGIES["fine chain"]), CAPACITY)
    (source,) = start(cache, 1)
    for tokens in ([1, 2], [3, 4, 5]):
        cache.push([source], [tokens])
        cache.run([source], 1)
    twin = cache.fork(source, 4)
    assert twin.tokens == [1, 2, 3, 4]
    assert twin.marks == ([4, 4, 0, 0] if kind == "decoding" else [2, 2, 0, 0])
    for sequence, more in ((twin, [7, 7]), (source, [8])):
        cache.push([sequence], [more])
        cache.run([sequence], 3)
    check(cache, [source, twin])


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[2, 4], [0, -1]], ids=["too long", "below zero"])
def test_one_sequence_that_cannot_go_back_keeps_all_as_they_are(
    stacks: dict[str, Stack], lengths: list[int]
) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY)
    batch = start(cache, 2)
    cache.push(batch, [[1, 2, 3, 4, 5], [6, 7, 8]])
    cache.run(batch, 1)
    with refused(StackError, setting="lengths", given=lengths[1]):
        cache.truncate(batch, lengths)
    assert [s.tokens for s in batch] == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert [s.marks for s in batch] == [[5, 5, 0], [3, 3, 0]]
    cache.run(batch, 2)
    check(cache, batch)


def test_buffers_grow_past_their_first_size_in_sequences_of_unlike_lengths(
    make_gpt: Callable[..., GPT],
) -> None:
    model = make_gpt(context=600)
    plan = Plan.of("2,2", 4)
    cache = Cache(model.for_decoding(), plan, 600)
    batch = start(cache, 2)
    tokens = torch.randint(VOCAB, (2, 520)).tolist()
    with torch.inference_mode():
        for step in range(0, 520, 64):  # across the steps of rooms, one sequence one token ahead
            cache.push(batch, [tokens[0][step : step + 64], tokens[1][step + (step > 0) : step + 65]])
            cache.run(batch, 1)
        found = cache.hidden(batch, 1)
        for row in range(2):
            alone = stage_outputs(model, plan, torch.tensor([tokens[row]]), [1])[1][0, -1]
            torch.testing.assert_close(found[row], alone, rtol=1e-9, atol=1e-9)


# Strategies over sequences of one cache


CONTEXT, LAST = 24, 3
PROMPTS = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 1, 9, 1, 9, 1, 9], [4, 4, 4]]
SIZES: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8}
SIZES |= {"mlp_width": 48, "vocab": 50, "context": CONTEXT}


@pytest.mark.parametrize(
    "more",
    [
        {"family": "llama"},
        {"family": "gpt2", "heads": 4, "kv_heads": 4},
        {"family": "gemma2", "attention_softcap": 20.0, "windows": (3, 0)},
    ],
    ids=["llama", "gpt2", "gemma2"],
)
@torch.inference_mode()
def test_published_families_run_packed_too(more: dict[str, Any], visits_of: Callable[[Stack], Any]) -> None:
    torch.manual_seed(0)
    stack = Transformer(TransformerConfig(**SIZES | more)).double().eval()
    engine = Engine(stack, "1,1,1,1", CONTEXT)
    visits, batch = visits_of(engine.stack), engine.start(PROMPTS)
    engine.run(batch[:3], 1)
    engine.run(batch, LAST)
    assert len(visits.calls[LAST]) == 1, "one pass for all"
    for sequence, z in zip(batch, engine.logits(batch, LAST), strict=True):
        expected = next_logits(stack, engine.plan, sequence.tokens, LAST)
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-10 * expected.abs().max().item())


def test_sequences_of_several_depths_take_turns_and_write_what_each_writes_alone(
    gpt: GPT, engine: Engine
) -> None:
    """Full depth, a prefix and speculation over sequences of one cache."""
    batch = engine.start(PROMPTS)
    strategies: list[tuple[DecodeStrategy, list[int]]] = [
        (FixedDepth(engine), [0, 3]),
        (FixedDepth(engine, 1), [1, 4]),
        (Speculate(engine, DraftRule(0.0, 3)), [2]),
    ]
    for _ in range(8):
        for strategy, members in strategies:
            strategy.step([batch[i] for i in members])
    for strategy, members in strategies:
        for i in members:
            (alone,) = engine.start([PROMPTS[i]])
            while len(alone) < len(PROMPTS[i]) + 8:
                strategy.step([alone])
            found = batch[i].tokens[: len(PROMPTS[i]) + 8]
            assert found == alone.tokens[: len(found)]
            assert len(found) == len(PROMPTS[i]) + 8
    assert batch[1].marks[LAST] == 0, "no stage ran that was not asked for"
