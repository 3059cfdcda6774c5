"""Queues filled late give what running everything at once gives, in hidden states, keys and values; and no
position is run twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.decode.cache import Cache, can_decode
from topograd.errors import StackError
from topograd.exec.forward import StageStates, stage_outputs
from topograd.nn.config import SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.layer_state import KVState
from topograd.nn.stack import Bus, Stack
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

VOCAB, CAPACITY = 17, 12
ROOT = Edge(EMBEDDING, transmissivity=1.0)


class Half(nn.Module):
    """Sends half of h and of what was heard, receives that and 1."""

    def send(self, h: Tensor, heard: Tensor | None) -> Tensor:
        assert heard is not None
        return (h + heard) / 2

    def receive(self, message: Tensor, bus: Bus) -> Tensor:
        return message + bus.x0 + 1


TOPOLOGIES = {
    "chain": Topology.chain("1,1,2"),
    "fine chain": Topology.chain("1,1,1,1"),
    "input bus": Topology.chain("1,2,1").with_input_bus(),
    "regions": Topology.regions("1,1,2"),
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
    for relay in gpt.own_relays().values():
        for parameter in relay.parameters():
            nn.init.normal_(parameter, std=0.3)
    kin = {
        kind: make_gpt(width=16, vocab=VOCAB, context=CAPACITY, architecture=kind, ssm_state=4)
        for kind in ("mamba2", "mamba3", "hybrid")
    }
    for stack in kin.values():
        for name, relay in gpt.own_relays().items():
            stack.add_relay(name, relay)
    return {"gpt": gpt, "decoding": gpt.for_decoding(), **{k: v.for_decoding() for k, v in kin.items()}}


def plan_of(topology: Topology) -> Plan:
    return Plan.of(topology, 4)


def check(cache: Cache) -> None:
    """Everything that has run, against all tokens of each row at once."""
    for row, tokens in enumerate(cache.tokens):
        if not tokens:
            continue
        states = StageStates(cache.stack, cache.plan, 1, CAPACITY)
        stages = range(len(cache.plan.stages))
        whole = stage_outputs(cache.stack, cache.plan, torch.tensor([tokens]), stages, states)
        for stage in stages:
            mark = cache.marks[stage][row]
            counts = [mark if i == row else 0 for i in range(cache.rows)]
            if mark:
                close(cache.hidden(stage, counts)[row], whole[stage][0, :mark])
            for own, expected in zip(cache.memories[stage].layers, states.stages[stage].layers, strict=True):
                if isinstance(own, KVState):
                    close(own.keys[row, :, :mark], expected.keys[0, :, :mark])
                    close(own.values[row, :, :mark], expected.values[0, :, :mark])


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


def act(cache: Cache, chance: random.Random) -> str:
    """Something that a mode could do."""
    lengths = cache.lengths()
    kind = chance.choices(["push", "run", "truncate", "select"], [5, 5, 1, 1])[0]
    if kind == "push":
        counts = [chance.randint(0, min(3, CAPACITY - n)) for n in lengths]
        cache.push([[chance.randrange(VOCAB) for _ in range(n)] for n in counts])
    elif kind == "run":
        cache.run(chance.randrange(len(cache.plan.stages)))
    elif kind == "select":
        cache.select([chance.randrange(cache.rows) for _ in range(chance.randint(1, 4))])
    else:
        cache.truncate([chance.randint(max(n - 4, 0), n) for n in lengths])
    return kind


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("decoding", name) for name in TOPOLOGIES),
        *(("gpt", name) for name in ("chain", "relay")),
        *(
            (kind, name)
            for kind in ("mamba2", "mamba3", "hybrid")
            for name in ("chain", "regions", "diamond")
        ),
    ],
)
def test_any_schedule_gives_what_running_everything_at_once_gives(
    stacks: dict[str, Stack], kind: str, name: str, rows: int
) -> None:
    for seed in range(2):
        chance = random.Random(seed)
        cache = Cache(stacks[kind], plan_of(TOPOLOGIES[name]), CAPACITY, rows)
        done = [act(cache, chance) for _ in range(30)]
        assert {"push", "run", "truncate", "select"} <= set(done)
        check(cache)
        cache.push([[1] * min(1, CAPACITY - n) for n in cache.lengths()])
        for stage in reversed(range(len(cache.plan.stages))):
            cache.run(stage)
            assert not any(cache.pending(stage))
        check(cache)


@torch.no_grad()
def test_hidden_states_are_those_of_the_gpt_itself(stacks: dict[str, Stack]) -> None:
    plan, tokens = plan_of(TOPOLOGIES["chain"]), [[3, 1, 4, 1, 5, 9], [2, 6]]
    cache = Cache(stacks["decoding"], plan, CAPACITY, 2)
    cache.push([row[:1] for row in tokens])
    cache.run(1)
    cache.push([row[1:] for row in tokens])
    cache.run(2)
    for row, ids in enumerate(tokens):
        whole = stage_outputs(stacks["gpt"], plan, torch.tensor([ids]), range(3))
        for stage in range(3):
            counts = [len(ids) if i == row else 1 for i in range(2)]
            close(cache.hidden(stage, counts)[row, : len(ids)], whole[stage][0])


@torch.no_grad()
def test_rows_may_drift_apart_and_meet_again(stacks: dict[str, Stack]) -> None:
    """Then a row's padding, which went behind the longest row, must not count as a position."""
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY, 2)
    for tokens in ([[1, 2, 3], [4]], [[], [5, 6]], [[7], [8]], [[9, 1], [2, 3]]):
        cache.push(tokens)
        cache.run(2)
        check(cache)
    assert cache.lengths() == [6, 6]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_another_token_in_the_same_place(stacks: dict[str, Stack], rows: int) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY, rows)
    cache.push([[1, 2, 3], [4]][:rows])
    cache.run(2)
    for token in (5, 6):
        cache.push([[token]] * rows)
        cache.run(2)
        check(cache)
        cache.truncate([3, 1][:rows])


@torch.no_grad()
def test_each_queue_is_one_batch_and_no_position_runs_twice(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack = stacks["decoding"]
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["chain"]), CAPACITY)
    cache.push([[1, 2, 3]])
    assert visits.calls == [[], [], [], []], "pushing runs no layer"
    cache.run(0)
    cache.push([[4]])
    cache.run(0)
    cache.run(0)
    cache.push([[5]])
    cache.run(1)
    cache.push([[6]])
    assert cache.pending(2) == [6]
    assert cache.pending(1) == [1]
    cache.run(2)
    cache.run(1)
    assert visits.calls[0] == [[[0, 1, 2]], [[3]], [[4]], [[5]]]
    assert visits.calls[1] == [[[0, 1, 2, 3, 4]], [[5]]]
    assert visits.calls[2] == visits.calls[3] == [[[0, 1, 2, 3, 4, 5]]]
    visits.clear()
    cache.truncate([4])
    cache.push([[7]])
    cache.run(2)
    assert visits.calls == [[[[4]]]] * 4


@torch.no_grad()
def test_only_stages_that_are_heard_are_run(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack = stacks["decoding"]
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["forest"]), CAPACITY)
    cache.push([[1, 2]])
    cache.run(2)
    assert visits.calls == [[], [], [[[0, 1]]], [[[0, 1]]]]


@torch.no_grad()
def test_in_ragged_rows_every_row_runs_its_own_queue_once(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack, chance = stacks["decoding"], random.Random(5)
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["chain"]), CAPACITY, 3)
    due: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(3)]
    for _ in range(12):
        counts = [chance.randint(0, min(2, CAPACITY - n)) for n in cache.lengths()]
        cache.push([[1] * n for n in counts])
        stage, before = chance.randrange(3), [list(marks) for marks in cache.marks]
        visits.clear()
        cache.run(stage)
        for k in range(3):
            calls = visits.calls[k]
            assert len(calls) == (k <= stage and before[k] != cache.lengths()), "a queue is one batch"
            for row in range(3 if calls else 0):
                own = [p for p in calls[0][row] if p < len(cache.tokens[row])]
                assert own == list(range(before[k][row], len(cache.tokens[row])))
                assert set(calls[0][row]) <= {*own, max(cache.lengths())}, "the rest goes behind all rows"
                due[k][row] += own
    assert len(set(cache.lengths())) > 1
    for k in range(3):
        assert due[k] == [list(range(mark)) for mark in cache.marks[k]]


@torch.no_grad()
def test_what_cannot_be_is_refused(stacks: dict[str, Stack]) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY, 2)
    with pytest.raises(StackError, match="stage 1 has not run that many positions; run it first"):
        cache.hidden(0)
    cache.push([[1] * 9, [2] * 3])
    with pytest.raises(StackError, match="a row would pass 12 positions; make a cache with more capacity"):
        cache.push([[1] * 4, []])
    assert cache.lengths() == [9, 3], "nothing was pushed"
    cache.run(1)
    with pytest.raises(StackError, match="stage 2 has not run that many positions"):
        cache.hidden(1, [4, 4])
    with pytest.raises(StackError, match="stage 3 has not run that many"):
        cache.hidden(2)
    with pytest.raises(StackError, match="cannot go back to 10: row 1 has 9 positions"):
        cache.truncate([10, 1])
    with pytest.raises(StackError, match="cannot go back to -1: row 1 has 9 positions"):
        cache.truncate([-1, 1])
    for rows in ([], [0, 2], [-1]):
        with pytest.raises(StackError, match="cannot be selected; give at least one of 0 to 1"):
            cache.select(rows)
    assert cache.lengths() == [9, 3]


@torch.no_grad()
def test_a_prompt_is_read_once_and_continued_in_many_ways(
    stacks: dict[str, Stack], visits_of: Callable[[Stack], Any]
) -> None:
    stack = stacks["decoding"]
    visits, cache = visits_of(stack), Cache(stack, plan_of(TOPOLOGIES["chain"]), CAPACITY, 2)
    cache.push([[1, 2, 3], [4]])
    cache.run(2)
    cache.select([0, 0, 1, 0])
    cache.push([[5], [6, 7], [8], []])
    cache.run(2)
    assert cache.tokens == [[1, 2, 3, 5], [1, 2, 3, 6, 7], [4, 8], [1, 2, 3]]
    assert [len(calls) for calls in visits.calls] == [2] * 4
    check(cache)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[2, 4], [0, -1]], ids=["too long", "below zero"])
def test_one_row_that_cannot_go_back_keeps_all_rows_as_they_are(
    stacks: dict[str, Stack], lengths: list[int]
) -> None:
    cache = Cache(stacks["decoding"], plan_of(TOPOLOGIES["chain"]), CAPACITY, 2)
    cache.push([[1, 2, 3, 4, 5], [6, 7, 8]])
    cache.run(1)
    marks = [list(row) for row in cache.marks]
    with pytest.raises(StackError, match=rf"^cannot go back to {lengths[1]}: row 2 has 3 positions$"):
        cache.truncate(lengths)
    assert cache.tokens == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert cache.marks == marks == [[5, 3], [5, 3], [0, 0]]
    cache.run(2)
    check(cache)


def test_a_stack_without_memory_is_refused() -> None:
    class Forgetful(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    assert not can_decode(Forgetful())
    with pytest.raises(StackError, match="Linear layers lack new_state, so they keep no memory"):
        Cache(Forgetful(), Plan.of(Topology.chain("1"), 1), CAPACITY)


def test_buffers_grow_past_their_first_size_in_ragged_rows(make_gpt: Callable[..., GPT]) -> None:
    model = make_gpt(context=600)
    plan = Plan.of("2,2", 4)
    together = Cache(model.for_decoding(), plan, 600, rows=2)
    tokens = torch.randint(VOCAB, (2, 520)).tolist()
    with torch.inference_mode():
        for step in range(0, 520, 64):  # across 256 and 512, where buffers double, one row one token ahead
            together.push([tokens[0][step : step + 64], tokens[1][step + (step > 0) : step + 65]])
            together.run(1)
            ends = [min(step + 64, 520), min(step + 65, 520)]
            if max(ends) < 520:
                assert together.lengths() == ends
        found = together.hidden(1, [1, 1])
        for row in range(2):
            alone = stage_outputs(model, plan, torch.tensor([tokens[row]]), [1])[1][0, -1]
            torch.testing.assert_close(found[row, 0], alone, rtol=1e-9, atol=1e-9)
