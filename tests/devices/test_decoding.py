"""Decoding on the second device: one read for each token of all rows, and the CPU's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import topograd as tg
from devices import Transfers, assert_same, on_both
from tests.decode.conftest import engine_of, random_gpt
from tests.decode.test_draft_stage import stage_of
from tests.devices.pinned import check, pinned
from tests.devices.test_training import FAMILIES
from tests.nn.conftest import LLAMA, llama, transformer
from topograd.decode.draft_model import ModelDrafter
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.sequence import Tally
from topograd.decode.strategies import DecodeStrategy, continue_tokens
from topograd.runs.topology_config import TopologyConfig

Begin = Callable[[], None]
ROWS = {"one row": [[3, 4, 5]], "even rows": [[3, 4, 5], [6, 7, 8]], "ragged rows": [[3, 4, 5], [1], [7, 8]]}
MIXERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "mamba2": {"architecture": "mamba2", "ssm_state": 8},
    "mamba3": {"architecture": "mamba3", "ssm_state": 8},
    "hybrid": {"architecture": "hybrid", "ssm_state": 8},
}
SAMPLED = tg.Sampling(temperature=0.8, top_p=0.9, seed=3)
TOKENS = 12
RULE = tg.DraftRule(0.0, 3)
"""Every draft of at most three tokens is made."""
FEW: dict[str, Callable[[tg.Engine], DecodeStrategy]] = {
    "full": tg.FixedDepth,
    "prefix": lambda engine: tg.FixedDepth(engine, 1),
    "sampled": tg.FixedDepth,
    "composed": lambda engine: tg.PathEnsemble(engine, {(0, 1, 2, 3): 1.0, (0, 2, 3): 0.5}),
}


def both(
    make: Callable[[torch.device], DecodeStrategy],
    prompts: Sequence[Sequence[int]],
    sampling: tg.Sampling | None = None,
) -> tuple[Transfers, Tally, list[tuple[int, int, int]]]:
    """Write on the CPU and on the device: what crossed while the text was written, drafts, and the text."""
    tally = Tally()

    def run(device: torch.device, begin: Begin) -> Any:
        strategy = make(device)
        begin()
        batch = strategy.engine.start(prompts, sampling)
        text = [(row, e.token, e.exit) for row, e in continue_tokens(strategy, batch, TOKENS)]
        tally.__init__()  # type: ignore[misc]
        for sequence in batch:
            tally.add(sequence.tally)
        return text

    expected, result, transfers = on_both(run)
    assert result == expected
    return transfers, tally, result


@pytest.mark.parametrize(
    ("mixer", "depth"),
    [*(("gpt", depth) for depth in FEW), *((mixer, "full") for mixer in MIXERS if mixer != "gpt")],
)
@pytest.mark.parametrize("rows", ROWS)
def test_a_token_is_one_read(mixer: str, depth: str, rows: str) -> None:
    """Of all rows, over the end of the context: prefill, steps, and what a full row forgets."""

    def make(device: torch.device) -> DecodeStrategy:
        return FEW[depth](engine_of(random_gpt(later=0.15, **MIXERS[mixer]).to(device), context=8))

    transfers, _, _ = both(make, ROWS[rows], SAMPLED if depth == "sampled" else None)
    check(transfers, "full depth", TOKENS)


@pytest.mark.parametrize("mixer", ["gpt", "mamba2"])
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_wand_reads_once_at_each_exit_that_it_asks(mixer: str, sampling: tg.Sampling | None) -> None:
    def make(device: torch.device) -> DecodeStrategy:
        engine = engine_of(random_gpt(later=0.15, **MIXERS[mixer]).to(device))
        return tg.Wand(engine, [0.6, 0.5, 0.5])

    transfers, _, text = both(make, ROWS["one row"], sampling)
    asked = sum(stage + 1 for _, _, stage in text)
    drawn = 0 if sampling is None else sum(stage < 3 for _, _, stage in text)  # of the exit's own logits
    check(transfers, "WAND: each exit", asked + drawn)
    assert {stage for _, _, stage in text} > {3}, "some leave early, some do not"


def test_wand_with_bounds_reads_the_survivors_too() -> None:
    def make(device: torch.device) -> DecodeStrategy:
        engine = engine_of(random_gpt(later=0.15).to(device))
        return tg.Wand(engine, [50.0] * 3, bounds=[0.3] * 3)

    transfers, _, text = both(make, ROWS["one row"])
    exits, last = pinned("WAND: each exit"), pinned("WAND with bounds")
    assert all(stage == 3 for _, _, stage in text)
    assert (transfers.reads, transfers.writes) == (TOKENS * (3 * exits[0] + last[0]), 0)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_reads_every_draft_and_one_verdict(mixer: str, sampling: tg.Sampling | None) -> None:
    def make(device: torch.device) -> DecodeStrategy:
        engine = engine_of(random_gpt(later=0.15, **MIXERS[mixer]).to(device))
        return tg.Speculate(engine, RULE)

    transfers, tally, _ = both(make, ROWS["one row"], sampling)
    assert tally.drafted > 0
    drafts, verdicts = pinned("speculation: each drafted"), pinned("speculation: each verification")
    assert transfers.reads == tally.drafted * drafts[0] + tally.rounds * verdicts[0]
    assert transfers.writes == tally.drafted * drafts[1] + tally.rounds * verdicts[1]


@pytest.mark.parametrize("drafter", ["prefix", "stage", "model"])
def test_ragged_rows_draft_and_are_verified_together(drafter: str) -> None:
    steps: list[int] = []

    def make(device: torch.device) -> DecodeStrategy:
        model = random_gpt(later=0.15).to(device)
        engine = engine_of(model)
        small = engine_of(random_gpt(later=0.15, layers=1).to(device), "1")
        drafts: Any = {
            "prefix": lambda: RULE,
            "stage": lambda: DraftStageDrafter(engine, stage_of(model), RULE),
            "model": lambda: ModelDrafter(engine, small, rule=RULE),
        }[drafter]()
        strategy = tg.Speculate(engine, drafts)
        step = strategy.step
        steps[:] = [0]

        def counted(*given: Any) -> Any:
            steps[0] += 1
            return step(*given)

        strategy.step = counted  # type: ignore[method-assign,assignment]
        return strategy

    transfers, tally, _ = both(make, ROWS["ragged rows"])
    assert tally.drafted > 0
    vocabulary = int(drafter == "stage")  # its list of tokens, once
    assert transfers.writes == 0
    assert transfers.reads <= steps[0] * (3 + 1) + vocabulary, "three drafts and a verdict, for all rows"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", ["one row", "ragged rows"])
def test_every_family(family: Any, rows: str) -> None:
    def make(device: torch.device) -> DecodeStrategy:
        torch.manual_seed(0)
        stack = transformer(family, **FAMILIES[family] | {"context": 24}).double().eval()
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return tg.FixedDepth(tg.Engine(stack.to(device), "2,2"))

    transfers, _, _ = both(make, ROWS[rows])
    check(transfers, "full depth", TOKENS)


@pytest.mark.parametrize("rows", ["one row", "ragged rows"])
def test_regions_joined_by_interfaces(rows: str) -> None:
    def make(device: torch.device) -> DecodeStrategy:
        torch.manual_seed(0)
        topology = TopologyConfig(partition="1,1,2", interface="S=4,r=4,pool=mean").build(4)
        stack = tg.GPTConfig(layers=4, width=16, heads=2, vocab=23, context=24).build(topology).double()
        tg.prepare(stack, topology)
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return tg.FixedDepth(tg.Engine(stack.eval().to(device), topology))

    transfers, _, _ = both(make, ROWS[rows])
    check(transfers, "full depth", TOKENS)


def test_an_adapted_module_is_recomputed() -> None:
    def make(device: torch.device) -> DecodeStrategy:
        torch.manual_seed(0)
        stack = tg.adapt(llama().eval().double().to(device), **LLAMA)
        return tg.FixedDepth(tg.Engine(stack, "2,2", context=9))

    transfers, _, _ = both(make, ROWS["ragged rows"])
    own = [one for one in transfers.seen if not one.place.startswith("nn/adapted/adapt.py:_trace")]
    check(Transfers(own), "full depth", TOKENS)


def test_rows_that_come_and_go() -> None:
    """As a server has them: sequences of one cache, run together, one of which is new and one forked."""

    def run(device: torch.device, begin: Begin) -> Any:
        engine = engine_of(random_gpt(later=0.15).to(device))
        strategy = tg.FixedDepth(engine)
        with torch.inference_mode():
            batch = engine.start(ROWS["ragged rows"])
            cache = batch[0].cache
            begin()
            text = [[t.token for row in strategy.step(batch) for t in row] for _ in range(TOKENS - 2)]
            cache.free(batch.pop(1))
            batch += [cache.new(), cache.fork(batch[0], 5)]
            engine.append(batch[2:3], [[4]])
            return [*text, *([t.token for row in strategy.step(batch) for t in row] for _ in range(2))]

    expected, result, transfers = on_both(run)
    assert result == expected
    check(transfers, "full depth", TOKENS)


def test_forked_rows_go_on() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        engine = engine_of(random_gpt(later=0.15, **MIXERS["hybrid"]).to(device))
        strategy = tg.FixedDepth(engine)
        with torch.inference_mode():
            batch = engine.start(ROWS["ragged rows"])
            strategy.step(batch)
            begin()
            some = [batch[0].cache.fork(batch[2]), batch[0]]
            return [[t.token for row in strategy.step(some) for t in row] for _ in range(3)]

    expected, result, transfers = on_both(run)
    assert_same(result, expected)
    check(transfers, "full depth", 3)
