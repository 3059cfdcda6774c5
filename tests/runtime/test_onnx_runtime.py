"""ONNX Runtime gives what torch gives: logits of every exit of every stack to float32's rounding, over any
schedule of pushes, runs, rollbacks and forks, at any lengths, past the context; and equal texts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")

from raising import refused
from topograd.decode.agreement import is_tie
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Engine
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, PathEnsemble, generate_batch
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.runtime.onnx_runtime import OnnxRuntime, shared_settings, unsupported_reason
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
    """The same sequences in torch and in onnxruntime."""

    def __init__(self, stack: Stack, topology: Topology | str, rows: int) -> None:
        plan = Plan.of(topology, 4)
        runtime = OnnxRuntime(stack)
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


@pytest.fixture(scope="module")
def pairs(stack_of: Callable[[str], Stack]) -> Callable[[str, str, int], Pair]:
    made: dict[tuple[str, str, int], Pair] = {}

    def get(name: str, topology: str, rows: int) -> Pair:
        key = name, topology, rows
        if key not in made:
            made[key] = Pair(stack_of(name), TOPOLOGIES.get(topology, topology), rows)
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
    """Relays run in torch between the sessions, interfaces with their histories too."""
    for rows in (1, 2):
        for seed in range(3):
            follow(pairs("gpt", topology, rows), seed)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), name=st.sampled_from(["gpt", "llama", "gemma3"]))
def test_random_schedules(pairs: Callable[[str, str, int], Pair], seed: int, rows: int, name: str) -> None:
    follow(pairs(name, "2,1,1", rows), seed)


def engines_of(stack: Stack, topology: str = "2,1,1") -> list[Engine]:
    plan = Plan.of(topology, 4)
    return [Engine(stack, plan, CONTEXT), Engine(stack, plan, CONTEXT, OnnxRuntime(stack))]


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "gemma2", "gpt2"])
def test_texts_are_equal_but_for_ties(stack_of: Callable[[str], Stack], name: str) -> None:
    """Greedy, of ragged rows, at each exit, past the context; and with drafts."""
    engines = engines_of(stack_of(name))
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
def test_paths_share_sessions_and_agree(stack_of: Callable[[str], Stack]) -> None:
    engines = engines_of(stack_of("gpt-plain"))
    texts = [generate_batch(PathEnsemble(e, {(0, 2): 1.0, (0, 1): 2.0}), [[1, 2], [3]], 12) for e in engines]
    assert [[e.token for e in row] for row in texts[0]] == [[e.token for e in row] for row in texts[1]]
    runtime = engines[1].runtime
    assert isinstance(runtime, OnnxRuntime)
    intervals, layouts = {key[:2] for key in runtime._sessions}, {key[-1] for key in runtime._sessions}
    assert (len(intervals), layouts) == (3, {True, False})
    assert len(runtime._sessions) == 6, "one for each interval and layout, whichever path runs it"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt", "gemma2"])
def test_the_head_on_some_tokens(stack_of: Callable[[str], Stack], name: str) -> None:
    engine = engines_of(stack_of(name))[1]
    batch = engine.start([[1, 2, 3]])
    some = torch.tensor([4, 0, 9])
    for stage in engine.exits:
        engine.run(batch, stage)
        whole = engine.logits(batch, stage)
        torch.testing.assert_close(
            engine.logits(batch, stage, tokens=some), whole[..., some], rtol=1e-4, atol=1e-4
        )


def test_what_cannot_be_run_is_refused(stack_of: Callable[[str], Stack]) -> None:
    assert unsupported_reason(stack_of("llama")) is None
    mamba = GPT(layers=2, width=32, heads=2, vocab=9, context=8, architecture="mamba3", ssm_state=4)
    with refused(ConfigError, setting="runtime"):
        OnnxRuntime(mamba)
    wide = GPT(layers=2, width=32, heads=2, vocab=9, context=8).double()
    with refused(ConfigError, setting="runtime"):
        OnnxRuntime(wide)
    with refused(ConfigError, setting="provider", given="cuda"):
        shared_settings("cuda")
