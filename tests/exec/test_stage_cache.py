"""A stage's cache: sequences that run packed are what each is alone, with every kind of state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.decode.cache import Cache
from topograd.decode.sequence import Sequence
from topograd.exec.forward import stage_outputs
from topograd.exec.stage_cache import StageCache
from topograd.nn.config import ARCHITECTURES, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.layer_state import KVState
from topograd.nn.mamba.recurrent import RecurrentState
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, WIDTH, CONTEXT = 17, 16, 20
CHAIN, REGIONS = Topology.chain("1,2,1"), Topology.regions("1,2,1")
CANVAS = Topology.regions("1,2,1", canvas=1)


def gpt(architecture: str = "transformer", interfaces: bool = False, **more: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 4, "width": WIDTH, "heads": 2, "vocab": VOCAB, "context": CONTEXT}
    stack = GPT(**sizes, architecture=architecture, ssm_state=4, **more).double().eval()
    if interfaces:
        add_interfaces(stack, SegmentInterface(segments=5, rank=4, pool="mean"), 3, WIDTH, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


class Means(nn.Module):
    """A causal layer that keeps no state: the mean of all positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        ones = torch.arange(1, h.shape[1] + 1, device=h.device)[:, None]
        return h + self.map(h.cumsum(1) / ones + 0.01 * ctx.positions[:, None])


def stateless(interfaces: bool = False) -> GPT:
    """The second stage's second layer keeps no state; the others do."""
    stack = gpt(interfaces=interfaces)
    stack.layers[2] = Means().double()
    return stack


CASES: dict[str, tuple[Stack, Topology]] = {
    "varlen": (gpt().for_decoding(), CHAIN),
    "windows": (gpt(windows=(3, 0)).for_decoding(), CHAIN),
    "one by one": (gpt(), CHAIN),
    **{name: (gpt(name), CHAIN) for name in ARCHITECTURES if name != "transformer"},
    "from start": (stateless(), CHAIN),
    "relays that look back": (gpt(interfaces=True).for_decoding(), REGIONS),
    "recurrent, relays that look back": (gpt("mamba2", interfaces=True), REGIONS),
    "from start, relays that look back": (stateless(interfaces=True), REGIONS),
    "a canvas of layers": (gpt(interfaces=True).for_decoding(), CANVAS),
    "recurrent, a canvas of layers": (gpt("hybrid", interfaces=True), CANVAS),
    "cover": (gpt().for_decoding(), Topology.cover([(0, 3), (1, 3), (2, 4)])),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[Stack, Plan]:
    stack, topology = request.param
    return stack, Plan.of(topology, 4)


def check(stack: Stack, plan: Plan, cache: Cache, batch: list[Sequence], stage: int, count: int) -> None:
    """A stage's last outputs against the whole forward of each sequence by itself."""
    cache.run(batch, stage)
    counts = [min(count, len(sequence)) for sequence in batch]
    result = cache.hidden(batch, stage, counts).split(counts)
    for sequence, n, h in zip(batch, counts, result, strict=True):
        whole = stage_outputs(stack, plan, torch.tensor([sequence.tokens]), [stage])[stage][0]
        torch.testing.assert_close(h, whole[-n:], rtol=1e-10, atol=1e-10)


def act(cache: Cache, batch: list[Sequence], chance: random.Random) -> None:
    """Something that decoding may do: begin, fork, end, go back, push."""
    what = chance.random()
    if what < 0.1 and len(batch) < 6:
        batch.append(cache.new())
    elif what < 0.2 and len(batch) < 6:
        source = chance.choice(batch)
        batch.append(cache.fork(source, chance.randint(0, len(source))))
    elif what < 0.25 and len(batch) > 2:
        cache.free(batch.pop(chance.randrange(len(batch))))
    elif what < 0.45:
        some = chance.sample(batch, chance.randint(1, len(batch)))
        cache.truncate(some, [chance.randint(0, len(sequence)) for sequence in some])
    some = chance.sample(batch, chance.randint(1, len(batch)))
    most = chance.choice([1, 1, 1, 3])
    new = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, most))] for _ in some]
    cache.push(some, [row[: CONTEXT - len(sequence)] for sequence, row in zip(some, new, strict=True)])


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_any_schedule_is_the_whole_forward(case: tuple[Stack, Plan], seed: int) -> None:
    stack, plan = case
    chance, cache = random.Random(seed), Cache(stack, plan, CONTEXT)
    batch = [cache.new() for _ in range(3)]
    for _ in range(25):
        act(cache, batch, chance)
        some = [sequence for sequence in chance.sample(batch, chance.randint(1, len(batch))) if len(sequence)]
        if some:
            check(stack, plan, cache, some, chance.randrange(3), chance.randint(1, 4))
    assert len({len(sequence) for sequence in batch}) > 1, "sequences of one length would show less"


def stages_of(stack: Stack) -> list[StageCache]:
    return [StageCache(stack, planned, CONTEXT) for planned in Plan.of(CHAIN, 4).stages]


def test_what_is_kept_for_a_layer() -> None:
    varlen, each, recurrent = (stages_of(stack)[1] for stack in (gpt().for_decoding(), gpt(), gpt("mamba2")))
    assert all(slots is not None for slots in varlen.slots)
    assert varlen.position_bytes == 2 * 2 * WIDTH * 8, "keys and values of two layers"
    assert varlen.cuts_anywhere
    cache = Cache(gpt(), Plan.of(CHAIN, 4), CONTEXT)
    place = cache.new().place
    for stage, kind in ((each, KVState), (recurrent, RecurrentState)):
        assert stage.slots == [None, None]
        assert (stage.position_bytes, stage.cuts_anywhere, stage.from_start) == (0, False, False)
        stage.open(place)
        assert [type(state) for state in stage._states[place].layers] == [kind, kind]
        stage.close(place)
        assert not stage._states
    first, second, third = stages_of(stateless())
    assert [stage.from_start for stage in (first, second, third)] == [False, True, False]
    second.open(place)
    assert second._states[place].all() == [], "nothing is kept of a stage that is run from the start"


@pytest.mark.parametrize("kind", ["mamba2", "mamba3"])
@torch.inference_mode()
def test_recurrent_sequences_with_equally_many_positions_run_as_one_batch(kind: str) -> None:
    stack, plan = gpt(kind), Plan.of("4", 4)
    rows: list[int] = []
    stack.layers[0].register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    cache = Cache(stack, plan, CONTEXT)
    batch = [cache.new() for _ in range(4)]
    for tokens, expected in (
        ([[1, 2], [3, 4], [5], [6]], [2, 2]),
        ([[7], [8], [9], [1]], [4]),
        ([[2], [], [3], [4]], [1, 2]),
        ([[1], [2, 3, 4], [5], [6, 7]], [1, 1, 1, 1]),
    ):
        cache.push(batch, tokens)
        rows.clear()
        cache.run(batch, 0)
        assert rows == expected
    check(stack, plan, cache, batch, 0, 9)


@torch.inference_mode()
def test_a_recurrent_stage_goes_back_to_a_snapshot_and_runs_the_rest_again() -> None:
    stack, plan = gpt("mamba2"), Plan.of(CHAIN, 4)
    cache = Cache(stack, plan, CONTEXT)
    batch = [cache.new(), cache.new()]
    cache.push(batch, [[1, 2, 3, 4], [5, 6]])
    cache.run(batch, 2)
    cache.push(batch, [[5, 6, 7], [1]])
    cache.run(batch, 2)
    cache.truncate(batch, [6, 3])
    assert [sequence.marks for sequence in batch] == [[4, 4, 4], [3, 3, 3]]
    assert [cache.pending(sequence, 2) for sequence in batch] == [2, 0]
    twin = cache.fork(batch[0], 3)
    assert twin.marks == [0, 0, 0], "no snapshot is before it"
    cache.push([*batch, twin], [[8], [9], [1]])
    check(stack, plan, cache, [*batch, twin], 2, 4)


@torch.inference_mode()
def test_a_stage_from_the_start_runs_its_whole_prefix_and_others_what_is_new() -> None:
    stack, plan = stateless(), Plan.of(CHAIN, 4)
    widths: dict[int, list[tuple[int, int]]] = {i: [] for i in range(4)}
    for i, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(lambda _, given, i=i: widths[i].append(tuple(given[0].shape[:2])))
    cache = Cache(stack, plan, CONTEXT)
    batch = [cache.new(), cache.new(), cache.new()]
    cache.push(batch, [[1, 2, 3], [4, 5, 6], [7]])
    cache.run(batch, 2)
    for seen in widths.values():
        seen.clear()
    cache.push(batch, [[1], [2], [3]])
    cache.run(batch, 2)
    assert widths[0] == widths[3] == [(1, 1)] * 3
    assert widths[1] == widths[2] == [(2, 4), (1, 2)], "sequences of one length at a time"
    check(stack, plan, cache, batch, 2, 4)
