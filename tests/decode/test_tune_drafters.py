"""Replays against a speculation that really runs, and the choice that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from topograd.decode.autotune import RowCosts
from topograd.decode.engine import Engine
from topograd.decode.lookup import TextLookup
from topograd.decode.policy import ExpectedGainPolicy
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.decode.tune_drafters import (
    Choice,
    acceptances,
    choose_drafters,
    known_texts,
    measure_rows,
    replay,
    tune_speedup,
)
from topograd.nn.gpt import GPT

CHEAP = RowCosts(0.01, {1: 1.0, 2: 1.02, 16: 1.3}, 1.0)
DEAR = RowCosts(0.5, {1: 1.0, 2: 2.0}, 1.0)
TOKENS = 30


@pytest.fixture(scope="module")
def engine(mild: GPT, make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(mild, "4", context=64)


@pytest.fixture(scope="module")
def rows(engine: Engine) -> list[list[int]]:
    prompts = [[3, 4, 5, 3, 4, 5, 3], [7, 8, 9, 7, 8, 9, 7]]
    written = generate_batch(FixedDepth(engine), prompts, TOKENS)
    return [p + [e.token for e in row] for p, row in zip(prompts, written, strict=True)]


def test_a_replay_goes_as_the_speculation_does(engine: Engine, rows: list[list[int]]) -> None:
    known = known_texts(rows, 7, [TextLookup()])
    policy = ExpectedGainPolicy(acceptances(known), CHEAP, 1.1)
    seconds = 0.0
    for row in rows:
        mode = Speculate(engine, TextLookup(), policy=policy)
        (sequence,) = engine.start([row[:7]])
        while len(sequence) < len(row):
            drafted = sequence.tally.drafted
            mode.step([sequence])
            seconds += CHEAP.deep_seconds(sequence.tally.drafted - drafted + 1)
    found = replay(known, policy, ["lookup"])
    assert found == pytest.approx(TOKENS * len(rows) / seconds, rel=0.1), "but for drafts behind the end"
    assert found > 1


def test_steps_are_replayed(rows: list[list[int]]) -> None:
    """A drafter that is always right, and one that never is."""

    class Steps:
        name = "draft"

    targets = torch.tensor(rows).roll(-1, dims=1)
    right = torch.stack([targets] * 4), torch.full((4, *targets.shape), 0.9)
    wrong = right[0] + 1, right[1]
    for recorded, better in ((right, True), (wrong, False)):
        known = known_texts(rows, 7, [], Steps(), recorded)  # type: ignore[arg-type]
        assert (acceptances(known)["draft"].mean > 0.9) == better
        choice = choose_drafters(known, CHEAP, [], "draft")
        assert (choice is not None) == better
        if choice is not None:
            assert choice.drafters == ("draft",)
            assert 2 < choice.predicted < 9
            assert Choice.from_dict(choice.as_dict()) == choice


def test_what_does_not_pay_is_not_chosen(engine: Engine, rows: list[list[int]]) -> None:
    known = known_texts(rows, 7, [TextLookup()])
    assert choose_drafters(known, DEAR, ["lookup"], None) is None
    chosen = choose_drafters(known, CHEAP, ["lookup"], None)
    assert chosen is not None
    _, found = tune_speedup(known, ExpectedGainPolicy(acceptances(known), CHEAP, 1.0), ["lookup"])
    assert (
        found
        == chosen.predicted
        >= replay(known, ExpectedGainPolicy(acceptances(known), CHEAP, 1.0), ["lookup"])
    )


def test_rows_are_timed(engine: Engine) -> None:
    costs = measure_rows(engine)
    assert sorted(costs.deep.values()) == list(costs.deep.values())
    assert costs.full == costs.deep[1] > 0
