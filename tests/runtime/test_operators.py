"""Runtimes over a stack's parts give what torch gives: logits of every exit of every stack to float32's
rounding, over any schedule of pushes, runs, rollbacks and forks, past the context; and equal texts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operator_runtimes import NAMES as RUNTIMES
from operator_runtimes import make
from topograd.decode.agreement import is_tie
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Engine
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT = 23, 20
BOUND = 1e-4
"""On logits, over the largest of them: float32 keeps 1e-7, and four layers of noise multiply it."""
NAMES = (
    *("gpt", "gpt-windows", "gpt-plain", "llama", "llama-biases", "llama-long", "mistral", "qwen2"),
    *("qwen3", "gpt2", "gemma2", "gemma3"),
)
ROOT = Edge(EMBEDDING, grad_scale=1.0)
TOPOLOGIES = {
    "input bus": Topology.chain("1,2,1").with_input_bus(),
    "regions": Topology.regions("1,1,2"),
    "forest": Topology.forest(["1,1", "2"]),
    "cover": Topology.cover([(0, 3), (1, 4)]),
    "taps": Topology(
        4,
        (
            Stage(0, 2, (ROOT,)),
            Stage(2, 3, (Edge(0, layer=1, relay="pre-norm"),)),
            Stage(3, 4, (Edge(1), Edge(0))),
        ),
    ),
}


class Pair:
    """The same sequences in torch and in another runtime."""

    def __init__(self, stack: Stack, topology: Topology | str, rows: int, runtime_name: str) -> None:
        plan = Plan.of(topology, 4)
        runtime = make(runtime_name, stack)
        self.engines = [Engine(stack, plan, CONTEXT), Engine(stack, plan, CONTEXT, runtime)]
        self.rows = rows

    def begin(self) -> None:
        self.batches = [engine.start([[1]] * self.rows) for engine in self.engines]

    def act(self, chance: random.Random) -> None:
        """Something that a strategy could do, on both."""
        lengths = [len(sequence) for sequence in self.batches[0]]
        kind = chance.choices(["append", "push", "run", "truncate", "fork"], [3, 4, 5, 2, 1])[0]
        if kind == "append":  # may slide past the context
            new = [[chance.randrange(VOCAB)] * chance.randrange(2) for _ in lengths]
            for engine, batch in zip(self.engines, self.batches, strict=True):
                engine.append(batch, new)
            return
        stage = chance.randrange(len(self.engines[0].plan.stages))
        new = [
            [chance.randrange(VOCAB) for _ in range(chance.randint(0, min(4, CONTEXT - n)))] for n in lengths
        ]
        back = [chance.randint(max(n - 4, 0), n) for n in lengths]
        rows = [chance.randrange(len(lengths)) for _ in lengths]
        some = sorted(chance.sample(range(len(lengths)), chance.randint(1, len(lengths))))
        for which, batch in enumerate(self.batches):
            cache = batch[0].cache
            if kind == "push":
                cache.push(batch, new)
            elif kind == "run":
                cache.run([batch[i] for i in some], stage)
            elif kind == "truncate":
                cache.truncate(batch, back)
            else:
                self.batches[which] = [cache.fork(batch[row]) for row in rows]
                for sequence in batch:
                    cache.free(sequence)

    def check(self) -> None:
        """Logits of every exit, at the last positions that it has run."""
        for batch in self.batches:
            batch[0].cache.push(batch, [[2] * (not len(sequence)) for sequence in batch])
        counts = [min(3, len(sequence)) for sequence in self.batches[0]]
        for stage in self.engines[0].exits:
            for engine, batch in zip(self.engines, self.batches, strict=True):
                engine.run(batch, stage)
            a, b = (
                e.logits(batch, stage, counts) for e, batch in zip(self.engines, self.batches, strict=True)
            )
            assert len(a) == len(b) == sum(counts)
            assert (a - b).abs().max() <= BOUND * a.abs().max(), stage


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pairs(stack_of: Callable[[str], Stack], runtime_name: str) -> Callable[[str, str, int], Pair]:
    made: dict[tuple[str, str, int], Pair] = {}

    def get(name: str, topology: str, rows: int) -> Pair:
        key = name, topology, rows
        if key not in made:
            made[key] = Pair(stack_of(name), TOPOLOGIES.get(topology, topology), rows, runtime_name)
        made[key].begin()
        return made[key]

    return get


@torch.inference_mode()
def follow(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(14):
        pair.act(chance)
    pair.check()


@pytest.mark.covers("gpt", "runtime")
@pytest.mark.covers("imported", "runtime")
@pytest.mark.parametrize("name", NAMES)
def test_any_schedule_of_any_stack(pairs: Callable[[str, str, int], Pair], name: str) -> None:
    for rows in (1, 3):
        for seed in range(3):
            follow(pairs(name, "2,1,1", rows), seed)


@pytest.mark.covers("gpt", "runtime", feature="topologies")
@pytest.mark.covers("gpt", "runtime", feature="interfaces")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_any_schedule_of_any_topology(pairs: Callable[[str, str, int], Pair], topology: str) -> None:
    """Relays run in torch between the stages, interfaces with their histories too."""
    for rows in (1, 2):
        for seed in range(3):
            follow(pairs("gpt", topology, rows), seed)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), name=st.sampled_from(["gpt", "llama", "gemma3"]))
def test_random_schedules(pairs: Callable[[str, str, int], Pair], seed: int, rows: int, name: str) -> None:
    follow(pairs(name, "2,1,1", rows), seed)


def engines_of(stack: Stack, runtime_name: str) -> list[Engine]:
    plan = Plan.of("2,1,1", 4)
    return [Engine(stack, plan, CONTEXT), Engine(stack, plan, CONTEXT, make(runtime_name, stack))]


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "gemma2", "gpt2"])
def test_texts_are_equal_but_for_ties(stack_of: Callable[[str], Stack], name: str, runtime_name: str) -> None:
    """Greedy, of ragged rows, at each exit, past the context; and with drafts."""
    engines = engines_of(stack_of(name), runtime_name)
    prompts = [[1, 2, 3], [4], [5] * 9]
    for exit_ in range(3):
        ours, theirs = (generate_batch(FixedDepth(engine, exit_), prompts, 30) for engine in engines)
        check_texts(engines[0], exit_, prompts, ours, theirs)
    drafted = generate_batch(Speculate(engines[1], DraftRule(0.0, 3)), prompts, 30)
    check_texts(engines[0], 2, prompts, drafted, theirs)


def check_texts(engine: Engine, exit_: int, prompts: list[list[int]], ours: list, theirs: list) -> None:
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        left, right = [e.token for e in a], [e.token for e in b]
        if left == right:
            continue
        at = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
        assert len(prompt) + at < CONTEXT, "a tie behind the context is not looked for"
        with torch.inference_mode():
            batch = engine.start([[*prompt, *right[:at]]])
            engine.run(batch, engine.exits[exit_])
            logits = engine.logits(batch, engine.exits[exit_])[0]
        assert is_tie(logits, left[at], right[at])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt", "gemma2"])
def test_the_head_on_some_tokens(stack_of: Callable[[str], Stack], name: str, runtime_name: str) -> None:
    engine = engines_of(stack_of(name), runtime_name)[1]
    batch = engine.start([[1, 2, 3]])
    some = torch.tensor([4, 0, 9])
    for stage in engine.exits:
        engine.run(batch, stage)
        whole = engine.logits(batch, stage)
        torch.testing.assert_close(
            engine.logits(batch, stage, tokens=some), whole[..., some], rtol=1e-4, atol=1e-4
        )
