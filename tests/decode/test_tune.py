"""Replays against a speculation that really runs and by hand, the choice that follows, and what is timed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from raising import refused
from topograd.data.windows import Text
from topograd.decode.calibration import measure, tune
from topograd.decode.calibration.measure import PositionCosts, measure_draft, measure_positions
from topograd.decode.calibration.policy import Acceptance, ExpectedGainPolicy
from topograd.decode.calibration.tune import (
    RecordedText,
    Replay,
    acceptances,
    record,
    replay,
    select_drafters,
    tune_speedup,
)
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.drafters import AutoregressiveDrafter, LookupDrafter, PrefixDrafter
from topograd.decode.engine import Engine
from topograd.decode.lookup import NGramTable, TextLookup
from topograd.decode.retrofitted import Retrofitted
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import ConfigError
from topograd.nn.draft_stage import DraftStage, rank_tokens
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack

CHEAP = PositionCosts({1: 1.0, 2: 1.02, 16: 1.3}, draft=0.01)
DEAR = PositionCosts({1: 1.0, 2: 2.0}, draft=0.5)
PREFIX = PositionCosts({1: 4.0, 2: 4.3, 4: 4.9, 8: 6.0, 16: 9.0}, draft=0.1, keep=0.9)
"""A quarter of the stages drafts: a position costs 1 in it alone, and 0.1 together with others."""
TOKENS = 30


@pytest.fixture(scope="module")
def engine(mild: GPT, make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(mild, "1,1,1,1", context=64)


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "OWN_TOKENS", TOKENS)  # no round comes near the end of the context
        return tune.own_text(engine, [[3, 4, 5, 3, 4, 5, 3], [7, 8, 9, 7, 8, 9, 7]])


def recorded(right: Sequence[Sequence[bool]], scores: Sequence[Sequence[float]]) -> RecordedText:
    """Texts at every place of which one drafter computes a guess."""
    places = [[[pair] for pair in zip(a, b, strict=True)] for a, b in zip(right, scores, strict=True)]
    return RecordedText([len(a) for a in right], 0, {}, {"stage 1": places})


@dataclass(frozen=True)
class Margins:
    """A draft rule as a policy: while the score is above a threshold, at most `longest`."""

    threshold: float
    longest: int
    costs: PositionCosts
    steps: int = 64

    def choose(
        self, place: int, chance: float, guesses: object, computed: str | None, sequences: int
    ) -> tuple[str | None, int]:
        return (computed, 1) if computed and place < self.longest else (None, 0)

    def accept(self, name: str, score: float, *_: Any) -> float | None:
        return 1.0 if score > self.threshold else None


def by_margin(text: RecordedText, threshold: float, longest: int, costs: PositionCosts) -> Replay:
    return replay(text, Margins(threshold, longest, costs), ["stage 1"])  # type: ignore[arg-type]


Drafters = dict[str, Callable[[Engine, GPT], LookupDrafter | AutoregressiveDrafter]]
DRAFTERS: Drafters = {
    "lookup": lambda engine, _: TextLookup(),
    "stage 1": lambda engine, _: PrefixDrafter(engine),
    "stage 3": lambda engine, _: PrefixDrafter(engine, exit_=2),
    "draft": lambda engine, model: DraftStageDrafter(engine, draft_stage(model)),
}


def draft_stage(model: GPT) -> DraftStage:
    torch.manual_seed(1)
    stage = DraftStage(model, torch.arange(3, 45))
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stage


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_replay_goes_as_the_speculation_does(
    engine: Engine, mild: GPT, texts: list[list[int]], name: str
) -> None:
    """Every round drafts and accepts as many tokens; behind the text's end nothing is counted."""
    drafter = DRAFTERS[name](engine, mild)
    known = record(engine, texts, 7, [drafter])
    policy = ExpectedGainPolicy({name: Acceptance((0.0,), (0.9,))}, CHEAP, 1.1)
    drafted = accepted = rounds = 0
    for text in texts:
        strategy = Speculate(engine, drafter, policy=policy)
        (sequence,) = engine.start([text[:7]])
        while (start := len(sequence)) < len(text):
            policy._observed.clear()  # a replay does not learn while it goes
            before = sequence.tally.drafted, sequence.tally.accepted
            strategy.step([sequence])
            drafted += min(sequence.tally.drafted - before[0], len(text) - start)
            accepted += min(sequence.tally.accepted - before[1], len(text) - start)
            rounds += 1
    result = replay(known, ExpectedGainPolicy(policy.acceptance, CHEAP, 1.1), [name])
    assert rounds > 3
    exact = 0.1 if name == "draft" else 1e-12  # which has no state behind a prompt
    assert result.mean_draft == pytest.approx(drafted / rounds, rel=exact)
    assert result.acceptance == pytest.approx(accepted / drafted, rel=exact)
    assert 0 < result.acceptance < 1


def test_what_is_recorded(engine: Engine, mild: GPT, texts: list[list[int]]) -> None:
    """A guess for the token at a place is made behind the place before, and right where full depth agrees."""
    known = record(engine, texts, 7, [make(engine, mild) for make in DRAFTERS.values()])
    assert (known.lengths, known.start) == ([37, 37], 7)
    for index, text in enumerate(texts):
        for place in (7, 20, 36):
            for exit_ in (0, 2):
                ((right, margin),) = known.computed[f"stage {exit_ + 1}"][index][place]
                batch = engine.start([text[:place]])
                with torch.inference_mode():
                    engine.run(batch, 3)
                    first, second = engine.logits(batch, exit_)[0].topk(2).values.tolist()
                    guess, full = (int(engine.logits(batch, stage)[0].argmax()) for stage in (exit_, 3))
                assert margin == pytest.approx(first - second)
                assert right == (guess == full)
            assert len(known.computed["draft"][index][place]) == tune.RECORDED_STEPS
            for i, (right, _) in enumerate(known.looked_up["lookup"][index][place]):
                assert isinstance(right, bool)
                assert place + i < len(text)
    assert acceptances(known)["stage 3"].rates != acceptances(known)["stage 1"].rates


def test_sampled_guesses_are_accepted_by_what_two_distributions_share() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(4000, 5), torch.randn(4000, 5)
    share = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    accepted = torch.tensor(tune._accepted(q, p, None, torch.rand(4000))).float()
    assert accepted.mean().item() == pytest.approx(share.mean().item(), abs=0.03)
    some = torch.tensor([0, 2, 4])
    right = tune._accepted(q[:, :3], p, some, None)
    assert right == [int(some[row.argmax()]) == int(z.argmax()) for row, z in zip(q[:, :3], p, strict=True)]


def test_a_replay_by_hand() -> None:
    """At most 2 drafts with a margin above 1, seven places.

    At 0: drafts 0 and 1, both right, so tokens 0, 1 and the full model's 2; three positions, two guesses.
    At 3: its margin is 1, not above it, so a guess that is not kept and one token; one position.
    At 4: drafts 4 and 5, the first wrong, so one token, one draft wasted; three positions, two guesses.
    At 5: drafts 5 and 6, both right; the text ends.
    """
    known = recorded([[True, True, False, True, False, True, True]], [[2.0, 2.0, 9.0, 1.0, 2.0, 2.0, 2.0]])
    result = by_margin(known, 1.0, 2, PREFIX)
    seconds = 3 * (PREFIX.seconds(3) + 2 * 0.1 + 2 * 0.9) + (PREFIX.seconds(1) + 0.1)
    assert result.speedup == pytest.approx(4.0 * 8 / seconds, rel=1e-12)
    assert (result.acceptance, result.mean_draft) == (4 / 6, 6 / 4)


@pytest.mark.parametrize("longest", [1, 2, 5, 16])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_the_closed_form_on_independent_drafts(chance: float, longest: int) -> None:
    """(1 - a^{n+1}) / (1 - a) tokens a round of n drafts, within four standard errors of their mean."""
    source = random.Random(longest)
    right = [[source.random() < chance for _ in range(500)] for _ in range(40)]
    result = by_margin(recorded(right, [[1.0] * 500] * 40), 0.0, longest, PREFIX)
    tail = [chance**i for i in range(1, longest + 1)]  # the chance of keeping at least i drafts
    mean = 1 + sum(tail)
    variance = sum((2 * i - 1) * p for i, p in enumerate(tail, start=1)) - sum(tail) ** 2
    error = math.sqrt(variance / (20_000 / mean)) / mean
    assert error < 0.015
    seconds = PREFIX.seconds(longest + 1) + longest * (PREFIX.draft + PREFIX.keep)
    assert result.speedup == pytest.approx(mean * PREFIX.full / seconds, rel=4 * error + 0.02)
    assert result.acceptance == pytest.approx(sum(tail) / longest, rel=4 * error * mean / sum(tail) + 0.02)


@pytest.mark.parametrize("seed", range(4))
def test_the_policy_drafts_at_least_as_well_as_the_best_margin_rule(seed: int) -> None:
    """Margins that tell right from wrong: of all thresholds and lengths, none is faster by 1 %."""
    source = random.Random(seed)
    scores = [[source.random() for _ in range(250)] for _ in range(12)]
    right = [[source.random() < 0.3 + 0.69 * margin for margin in row] for row in scores]
    known = recorded(right, scores)
    rules = [(threshold / 10, longest) for threshold in range(10) for longest in (1, 2, 3, 4, 6, 8, 12, 16)]
    best = max(by_margin(known, *rule, PREFIX).speedup for rule in rules)
    _, reached = tune_speedup(known, ExpectedGainPolicy(acceptances(known), PREFIX, 1.0), ["stage 1"])
    assert best > by_margin(known, 0.0, 4, PREFIX).speedup + 0.02
    assert reached > 0.99 * best


@pytest.mark.parametrize(
    ("chance", "costs"), [(0.05, PREFIX), (0.9, DEAR)], ids=["drafts-are-wrong", "positions-are-dear"]
)
def test_drafts_that_lose_are_off(chance: float, costs: PositionCosts) -> None:
    source = random.Random(0)
    right = [[source.random() < chance for _ in range(200)] for _ in range(10)]
    known = recorded(right, [[float(1 + i % 7) for i in range(200)]] * 10)
    assert select_drafters(known, costs, {"stage 1": {"draft": costs.draft, "keep": costs.keep}}) is None


@pytest.mark.parametrize(("speedup", "on"), [(1.019, False), (1.021, True)], ids=["below", "above"])
def test_two_percent_are_asked_for(speedup: float, on: bool) -> None:
    """One draft, always right: two tokens for `2 / speedup`. A longer draft costs more than it gives."""
    costs = PositionCosts({1: 1.0, 2: 2 / speedup, 3: 9.0})
    known = recorded([[True] * 600], [[1.0] * 600])
    selection = select_drafters(known, costs, {"stage 1": {"draft": 0.0, "keep": 0.0}})
    assert (selection is not None) is on
    if selection is not None:
        assert selection.drafters == ("stage 1",)
        assert selection.predicted == pytest.approx(speedup, abs=0.001)


def test_steps_are_replayed(texts: list[list[int]]) -> None:
    """A drafter that is always right, and one that never is."""
    for right in (True, False):
        places = [[[(right, 0.9)] * 4 for _ in text] for text in texts]
        known = RecordedText([len(text) for text in texts], 7, {}, {"draft": places})
        assert (max(acceptances(known)["draft"].rates) > 0.9) == right
        seconds = {"start": 0.2, "draft": 0.01, "keep": 0.0}
        selection = select_drafters(known, CHEAP, {"draft": seconds})
        assert (selection is not None) == right
        if selection is not None:
            assert selection.drafters == ("draft",)
            assert 5 < selection.predicted < 17
            costs = selection.policy.costs
            assert (costs.start, costs.draft, costs.keep) == (0.2, 0.01, 0.0)
        block = select_drafters(replace(known, most={"draft": 4}), CHEAP, {"draft": seconds})
        assert (block is not None) == right
        if block is not None:
            assert block.policy.steps == 4
            assert 3 < block.predicted < 5, "five tokens a round at most, and the first guess costs more"


def test_what_does_not_pay_is_not_selected(engine: Engine, texts: list[list[int]]) -> None:
    known = record(engine, texts, 7, [TextLookup()])
    assert select_drafters(known, DEAR, {}) is None
    selection = select_drafters(known, CHEAP, {})
    assert selection is not None
    plain = replace(CHEAP, draft=0.0)
    _, reached = tune_speedup(known, ExpectedGainPolicy(acceptances(known), plain, 1.0), ["lookup"])
    first = replay(known, ExpectedGainPolicy(acceptances(known), plain, 1.0), ["lookup"])
    assert reached == selection.predicted >= first.speedup


def test_the_best_prefix_is_selected_for_each_kind_of_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was recorded of each, with the seconds that were measured of each."""
    asked: list[str] = []

    def seconds(engine: Engine, drafter: AutoregressiveDrafter) -> dict[str, float]:
        asked.append(drafter.name)
        keep = {"stage 1": 0.3, "stage 2": 0.01, "stage 3": 0.9, "stage 2 (12)": 0.005}
        return {"keep": keep.get(drafter.name, 0.9)}

    def judged(engine: Engine, texts: Any, start: int, drafters: Any, sampled: bool = False) -> RecordedText:
        places = {name: [[[(not sampled, 1.0)] for _ in t] for t in texts] for name in asked}
        return RecordedText([len(t) for t in texts], start, {}, places)

    monkeypatch.setattr(tune, "measure_draft", seconds)
    monkeypatch.setattr(tune, "measure_positions", lambda engine: CHEAP)
    monkeypatch.setattr(tune, "record", judged)
    inputs = torch.arange(5 * 64).reshape(5, 64) % 50
    found = tune.tune(engine, Text(inputs, inputs, 0))
    assert asked == ["stage 1", "stage 2", "stage 3", "stage 1 (12)", "stage 2 (12)", "stage 3 (12)"]
    assert found.costs == CHEAP
    assert found.greedy is not None
    assert found.greedy.drafters == ("stage 2 (12)",)
    assert found.greedy.vocabulary == tuple(rank_tokens(inputs[::2], 50, 12).tolist())
    assert (found.greedy.policy.costs.keep, found.greedy.policy.costs.verify) == (0.005, CHEAP.verify)
    assert found.sampled is None, "none of its guesses is accepted there"


def test_tuning_by_the_clock_and_what_is_tuned_on(
    engine: Engine, mild: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The even windows: their beginnings, which the model continues, and for sampled text themselves."""
    monkeypatch.setattr(measure, "ROUNDS", 1)
    seen: list[tuple[list[list[int]], bool]] = []
    real = tune.record

    def noted(engine: Engine, texts: Any, start: int, drafters: Any, sampled: bool = False) -> RecordedText:
        seen.append((texts, sampled))
        assert start == 16
        return real(engine, texts, start, drafters, sampled)

    monkeypatch.setattr(tune, "record", noted)
    inputs = torch.randint(50, (5, 64), generator=torch.Generator().manual_seed(0))
    stage, table = draft_stage(mild), NGramTable.of(inputs.numpy(), least=1)
    found = tune.tune(engine, Text(inputs, inputs, 0), Retrofitted(stage, table, None))  # type: ignore[arg-type]
    (own, sampled), (people, also) = seen
    assert (sampled, also) == (False, True)
    assert people == [inputs[row].tolist() for row in (0, 2, 4)]
    written = generate_batch(FixedDepth(engine), [row[:16] for row in people], 48)
    assert own == [
        row[:16] + [emitted.token for emitted in each] for row, each in zip(people, written, strict=True)
    ]
    for selection in (found.greedy, found.sampled):
        if selection is not None:
            assert selection.predicted > tune.WORTHWHILE
            assert set(selection.drafters) == selection.policy.acceptance.keys()


# Costs


@pytest.mark.parametrize(
    ("positions", "seconds"), [(1, 4.0), (2, 4.3), (3, 4.6), (6, 5.45), (16, 9.0), (18, 9.75)], ids=str
)
def test_seconds_of_positions(positions: int, seconds: float) -> None:
    assert PREFIX.seconds(positions) == pytest.approx(seconds, rel=1e-12)


def test_below_the_smallest_size() -> None:
    assert PositionCosts({4: 5.0, 2: 3.0}).full == pytest.approx(2.0, rel=1e-12)


def test_costs_that_cannot_be() -> None:
    for sizes in ((), (1,), (0, 1)):
        with refused(ConfigError, setting="verify", given=list(sizes)):
            PositionCosts(dict.fromkeys(sizes, 1.0))
    for seconds in (0.0, math.nan, math.inf, -1.0):
        with refused(ConfigError, setting="verify"):
            PositionCosts({1: 1.0, 2: seconds})
    for name in ("draft", "keep", "uneven", "start"):
        with refused(ConfigError, setting=name, given=-1.0):
            PositionCosts({1: 1.0, 2: 1.0}, **{name: -1.0})


@pytest.mark.parametrize(
    ("context", "sizes"), [(2, [1, 2]), (4, [1, 2]), (9, [1, 2, 3, 4]), (16, [1, 2, 3, 4, 6, 8])]
)
def test_costs_of_all_sizes_that_the_context_has_room_for(
    mild: GPT, make_engine: Callable[..., Engine], context: int, sizes: list[int]
) -> None:
    costs = measure_positions(make_engine(mild, context=context), rounds=1)
    assert list(costs.verify) == sizes
    assert sorted(costs.verify.values()) == list(costs.verify.values())
    assert costs.full == costs.verify[1] > 0


def test_a_context_without_room_for_drafts(mild: GPT, make_engine: Callable[..., Engine]) -> None:
    small = make_engine(mild, context=2)
    with refused(ConfigError, setting="context", given=2):
        measure_draft(small, PrefixDrafter(small))


@pytest.mark.parametrize("exit_", [0, 2])
def test_what_is_timed(
    make_gpt: Callable[..., GPT],
    make_engine: Callable[..., Engine],
    visits_of: Callable[[Stack], Any],
    monkeypatch: pytest.MonkeyPatch,
    exit_: int,
) -> None:
    """In a half-full context: one position, two and five at full depth; a guess that is not kept, and one and
    four that are, which run the first stages one by one and the others as one batch."""
    monkeypatch.setattr(measure, "ROUNDS", 2)
    engine = make_engine(make_gpt(), context=16)
    visits = visits_of(engine.stack)
    costs = measure_draft(engine, PrefixDrafter(engine, exit_=exit_))
    assert costs.keys() == {"start", "draft", "keep"}
    assert min(costs.values()) >= 0
    prompt, one, two, five = [list(range(8))], [[8]], [[8, 9]], [list(range(8, 13))]
    for layer in range(4):
        singly = [[[p]] for p in range(8, 13)]
        kinds = [[one], [one], [two], singly[:2] if layer <= exit_ else [two]]
        kinds += [[five], singly if layer <= exit_ else [five]]
        once = [visit for kind in kinds for visit in kind * 2]  # two rounds of a kind in a row
        assert visits.calls[layer] == [prompt, *once * 2], layer
