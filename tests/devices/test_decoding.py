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
from topograd.decode.engine import Mode
from topograd.decode.rows import Rows
from topograd.decode.speculation import Tally
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
FEW: dict[str, Callable[[tg.Engine], Mode]] = {
    "full": tg.Prefix,
    "prefix": lambda engine: tg.Prefix(engine, 1),
    "sampled": lambda engine: tg.Prefix(engine, sampling=SAMPLED),
    "composed": lambda engine: tg.Composed(engine, {(0, 1, 2, 3): 1.0, (0, 2, 3): 0.5}),
}


def written(mode: Mode, prompts: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    each = tg.generate_tokens(mode, prompts, TOKENS)
    return [(row, emitted.token, emitted.stage) for row, emitted in each]


def both(
    make: Callable[[torch.device], Mode], prompts: Sequence[Sequence[int]]
) -> tuple[Transfers, Mode, list[tuple[int, int, int]]]:
    """Write on the CPU and on the device: what crossed while the text was written, and the text."""
    modes: list[Mode] = []

    def run(device: torch.device, begin: Begin) -> Any:
        modes.append(make(device))
        begin()
        return written(modes[-1], prompts)

    expected, found, transfers = on_both(run)
    assert found == expected
    return transfers, modes[-1], found


@pytest.mark.parametrize(
    ("mixer", "depth"),
    [*(("gpt", depth) for depth in FEW), *((mixer, "full") for mixer in MIXERS if mixer != "gpt")],
)
@pytest.mark.parametrize("rows", ROWS)
def test_a_token_is_one_read(mixer: str, depth: str, rows: str) -> None:
    """Of all rows, over the end of the context: prefill, steps, and what a full row forgets."""

    def make(device: torch.device) -> Mode:
        return FEW[depth](engine_of(random_gpt(later=0.15, **MIXERS[mixer]).to(device), context=8))

    transfers, _, _ = both(make, ROWS[rows])
    check(transfers, "full depth", TOKENS)


@pytest.mark.parametrize("mixer", ["gpt", "mamba2"])
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_wand_reads_once_at_each_exit_that_it_asks(mixer: str, sampling: tg.Sampling | None) -> None:
    def make(device: torch.device) -> Mode:
        engine = engine_of(random_gpt(later=0.15, **MIXERS[mixer]).to(device))
        return tg.Wand(engine, [0.6, 0.5, 0.5], sampling)

    transfers, _, text = both(make, ROWS["one row"])
    asked = sum(stage + 1 for _, _, stage in text)
    drawn = 0 if sampling is None else sum(stage < 3 for _, _, stage in text)  # of the exit's own logits
    check(transfers, "WAND: each exit", asked + drawn)
    assert {stage for _, _, stage in text} > {3}, "some leave early, some do not"


def test_wand_with_bounds_reads_the_survivors_too() -> None:
    def make(device: torch.device) -> Mode:
        engine = engine_of(random_gpt(later=0.15).to(device))
        return tg.Wand(engine, [50.0] * 3, bounds=[0.3] * 3)

    transfers, _, text = both(make, ROWS["one row"])
    exits, last = pinned("WAND: each exit"), pinned("WAND with bounds")
    assert all(stage == 3 for _, _, stage in text)
    assert (transfers.reads, transfers.writes) == (TOKENS * (3 * exits[0] + last[0]), 0)


def rounds_of(mode: Mode, rows: int) -> Tally:
    assert isinstance(mode, tg.Speculate)
    assert mode.tally.drafted > 0
    return mode.tally


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_reads_every_draft_and_one_verdict(mixer: str, sampling: tg.Sampling | None) -> None:
    def make(device: torch.device) -> Mode:
        engine = engine_of(random_gpt(later=0.15, **MIXERS[mixer]).to(device))
        return tg.Speculate(engine, RULE, sampling=sampling)

    transfers, mode, _ = both(make, ROWS["one row"])
    tally = rounds_of(mode, 1)
    drafts, verdicts = pinned("speculation: each drafted"), pinned("speculation: each verification")
    assert transfers.reads == tally.drafted * drafts[0] + tally.rounds * verdicts[0]
    assert transfers.writes == tally.drafted * drafts[1] + tally.rounds * verdicts[1]


@pytest.mark.parametrize("drafter", ["prefix", "stage", "model"])
def test_ragged_rows_draft_and_are_verified_together(drafter: str) -> None:
    advances: list[int] = []

    def make(device: torch.device) -> Mode:
        model = random_gpt(later=0.15).to(device)
        engine = engine_of(model)
        small = engine_of(random_gpt(later=0.15, layers=1).to(device), "1")
        drafts: Any = {
            "prefix": lambda: RULE,
            "stage": lambda: DraftStageDrafter(engine, stage_of(model), RULE),
            "model": lambda: ModelDrafter(engine, small, rule=RULE),
        }[drafter]()
        mode = tg.Speculate(engine, drafts)
        advance = mode.advance
        advances[:] = [0]

        def counted(*given: Any) -> Any:
            advances[0] += 1
            return advance(*given)

        mode.advance = counted  # type: ignore[method-assign,assignment]
        return mode

    transfers, mode, _ = both(make, ROWS["ragged rows"])
    rounds_of(mode, 3)
    vocabulary = int(drafter == "stage")  # its list of tokens, once
    assert transfers.writes == 0
    assert transfers.reads <= advances[0] * (3 + 1) + vocabulary, "three drafts and a verdict, for all rows"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", ["one row", "ragged rows"])
def test_every_family(family: Any, rows: str) -> None:
    def make(device: torch.device) -> Mode:
        torch.manual_seed(0)
        stack = transformer(family, **FAMILIES[family] | {"context": 24}).double().eval()
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return tg.Prefix(tg.Engine(stack.to(device), "2,2"))

    transfers, _, _ = both(make, ROWS[rows])
    check(transfers, "full depth", TOKENS)


@pytest.mark.parametrize("rows", ["one row", "ragged rows"])
def test_regions_joined_by_interfaces(rows: str) -> None:
    def make(device: torch.device) -> Mode:
        torch.manual_seed(0)
        topology = TopologyConfig(partition="1,1,2", interface="S=4,r=4,pool=mean").build(4)
        stack = tg.GPTConfig(layers=4, width=16, heads=2, vocab=23, context=24).build(topology).double()
        tg.prepare(stack, topology)
        for parameter in stack.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return tg.Prefix(tg.Engine(stack.eval().to(device), topology))

    transfers, _, _ = both(make, ROWS[rows])
    check(transfers, "full depth", TOKENS)


def test_an_adapted_module_is_recomputed() -> None:
    def make(device: torch.device) -> Mode:
        torch.manual_seed(0)
        stack = tg.adapt(llama().eval().double().to(device), **LLAMA)
        return tg.Prefix(tg.Engine(stack, "2,2", context=9))

    transfers, _, _ = both(make, ROWS["ragged rows"])
    own = [one for one in transfers.seen if not one.place.startswith("nn/adapted/adapt.py:_trace")]
    check(Transfers(own), "full depth", TOKENS)


def test_rows_that_come_and_go() -> None:
    """As a server has them: caches of one row each, run together."""

    def run(device: torch.device, begin: Begin) -> Any:
        engine = engine_of(random_gpt(later=0.15).to(device))
        mode = tg.Prefix(engine)
        with torch.inference_mode():
            rows = Rows([engine.start([prompt]) for prompt in ROWS["ragged rows"]])
            mode.begin(3)
            begin()
            return [[t.token for row in mode.advance(rows, [True] * 3) for t in row] for _ in range(TOKENS)]

    expected, found, transfers = on_both(run)
    assert found == expected
    check(transfers, "full depth", TOKENS)


def test_selected_rows_go_on() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        engine = engine_of(random_gpt(later=0.15, **MIXERS["hybrid"]).to(device))
        mode = tg.Prefix(engine)
        with torch.inference_mode():
            cache = engine.start(ROWS["ragged rows"])
            mode.begin(3)
            mode.advance(cache, [True] * 3)
            begin()
            cache.select([2, 0])
            mode.begin(2)
            return [[t.token for row in mode.advance(cache, [True] * 2) for t in row] for _ in range(3)]

    expected, found, transfers = on_both(run)
    assert_same(found, expected)
    check(transfers, "full depth", 3)
