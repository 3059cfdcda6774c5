"""Drafting with the first stages changes nothing but the work: greedy text is that of full depth, token for
token, and sampled text has its distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import tokens_of, written
from raising import refused
from tests.oracles.decoding import greedy, moved, next_logits
from topograd.decode import speculation
from topograd.decode.calibration.measure import PositionCosts
from topograd.decode.calibration.policy import ExpectedGainPolicy
from topograd.decode.calibration.tune import acceptances, record
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.drafters import DraftRule, PrefixDrafter
from topograd.decode.engine import Emitted, Engine
from topograd.decode.lookup import TextLookup
from topograd.decode.sampling import Sampling, probabilities
from topograd.decode.sequence import Tally
from topograd.decode.speculation import Drafter, Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, generate_batch, generate_tokens
from topograd.errors import ConfigError, DivergenceError
from topograd.nn.draft_stage import DraftStage
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack

CONTEXT, LAST = 24, 3


@pytest.fixture(scope="module")
def expected(mild: GPT, mild_engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Full depth, the slow way; every row passes the context."""
    return [greedy(mild, mild_engine.plan, prompt, 30, LAST, CONTEXT) for prompt in prompts]


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize(
    ("threshold", "longest"), [(0.0, 1), (0.0, 2), (0.0, 5), (0.5, 3), (0.5, 8), (100.0, 4)]
)
def test_a_batch_writes_what_full_depth_writes(
    mild_engine: Engine,
    prompts: list[list[int]],
    expected: list[list[int]],
    threshold: float,
    longest: int,
    stage: int,
) -> None:
    mode = Speculate(mild_engine, DraftRule(threshold, longest), stage)
    rows, tally = written(mode, prompts, 30)
    assert [[e.token for e in row] for row in rows] == expected
    if threshold == 100:
        assert tally.drafted == 0
        assert math.isnan(tally.acceptance)
        assert tally.rounds == 30 * len(prompts)
    else:
        assert 0 < tally.accepted < tally.drafted <= longest * tally.rounds
        assert tally.acceptance == tally.accepted / tally.drafted


@pytest.mark.parametrize("longest", range(1, 9))
def test_a_single_row_writes_what_full_depth_writes(
    mild_engine: Engine, prompts: list[list[int]], expected: list[list[int]], longest: int
) -> None:
    for row in (longest % 3, 4):
        assert (
            tokens_of(Speculate(mild_engine, DraftRule(0.0, longest)), [prompts[row]], 30)[0] == expected[row]
        )


@pytest.mark.parametrize("exit_", range(3))
def test_calibrated_drafters_write_what_full_depth_writes(
    mild_engine: Engine, prompts: list[list[int]], expected: list[list[int]], exit_: int
) -> None:
    """A lookup and a prefix together, by their measured acceptances: in a ragged batch and one by one."""
    costs = PositionCosts({1: 1.0, 64: 1.5}, draft=0.01, keep=0.02)
    drafters: list[Drafter] = [TextLookup(), PrefixDrafter(mild_engine, exit_=exit_)]
    known = record(mild_engine, [tokens[:CONTEXT] for tokens in expected], 4, drafters)
    policy = ExpectedGainPolicy(acceptances(known), costs, 1.1)
    together, tally = written(Speculate(mild_engine, drafters, policy=policy), prompts, 30)
    assert [[e.token for e in row] for row in together] == expected
    assert tally.by.keys() >= {f"stage {exit_ + 1}"}
    assert 0 < tally.accepted < tally.drafted
    for prompt, tokens in zip(prompts, expected, strict=True):
        strategy = Speculate(mild_engine, drafters, policy=ExpectedGainPolicy(policy.acceptance, costs, 1.1))
        assert tokens_of(strategy, [prompt], 30) == [tokens]


def test_stages_that_hardly_agree(gpt: GPT, engine: Engine, prompts: list[list[int]]) -> None:
    mode = Speculate(engine, DraftRule(0.0, 4), 1)
    rows, tally = written(mode, prompts, 14)
    assert [[e.token for e in row] for row in rows] == tokens_of(FixedDepth(engine), prompts, 14)
    assert tally.acceptance < 0.2


@pytest.mark.parametrize("context", [1, 2, 3, 7])
def test_small_contexts(mild: GPT, make_engine: Callable[..., Engine], context: int) -> None:
    engine = make_engine(mild, context=context)
    found = tokens_of(Speculate(engine, DraftRule(0.0, 3)), [[1], [2, 3, 4]], 20)
    assert found == [greedy(mild, engine.plan, prompt, 20, LAST, context) for prompt in ([1], [2, 3, 4])]


@pytest.mark.parametrize("rule", [DraftRule(0.0, 3), DraftRule(0.6, 6)], ids=["all", "sure"])
def test_rounds_are_those_of_the_slow_loop(mild: GPT, mild_engine: Engine, rule: DraftRule) -> None:
    """Who wrote each token, how many were drafted and how many of them kept."""
    plan, window = mild_engine.plan, [3, 1, 4]
    emitted: list[Emitted] = []
    rounds = drafted = accepted = 0
    while len(emitted) < 30:
        drafts: list[int] = []
        while len(window) + len(drafts) < CONTEXT and len(drafts) < rule.longest:
            best = next_logits(mild, plan, [*window, *drafts], 0).topk(2)
            if best.values[0] - best.values[1] <= rule.threshold:
                break
            drafts.append(int(best.indices[0]))
        rounds, drafted = rounds + 1, drafted + len(drafts)
        for draft in [*drafts, None]:
            token = int(next_logits(mild, plan, window, LAST).argmax())
            emitted.append(Emitted(token, 0 if token == draft else LAST))
            window = moved(window, token, CONTEXT)
            accepted += token == draft
            if token != draft:
                break
    (text,), tally = written(Speculate(mild_engine, rule), [[3, 1, 4]], 30)
    assert text == emitted[:30]
    assert (tally.rounds, tally.drafted, tally.accepted) == (rounds, drafted, accepted)
    assert {e.exit for e in emitted} == {0, LAST}


@pytest.mark.parametrize("stage", [0, 1])
@torch.inference_mode()
def test_nothing_is_computed_twice_in_a_round(
    mild_engine: Engine, visits_of: Callable[[Stack], Any], stage: int
) -> None:
    visits, mode = visits_of(mild_engine.stack), Speculate(mild_engine, DraftRule(0.0, 4), stage)
    (sequence,) = batch = mild_engine.start([[3, 1, 4]])
    tally = sequence.tally
    for _ in range(4):
        visits.clear()
        start, drafted = len(sequence), tally.drafted
        unread = start - 1 if tally.rounds else 0
        emitted = mode.step(batch)[0]
        drafted = tally.drafted - drafted
        pending = list(range(unread, start + drafted))
        for layer in range(stage + 1):
            assert [p for call in visits.calls[layer] for p in call[0]] == pending
            assert len(visits.calls[layer]) == drafted + 1
        for layer in range(stage + 1, 4):
            assert visits.calls[layer] == [[pending]], "the deep stages run their queue as one batch"
        assert len(sequence) == start + len(emitted)
    assert 0 < tally.accepted < tally.drafted, "some drafts were taken back"


def test_a_row_that_is_finished_stops_in_the_middle_of_a_draft(
    mild_engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    rows: list[list[int]] = [[] for _ in prompts]

    def finished(row: int, emitted: Emitted) -> bool:
        return row % 2 == 0 and len(rows[row]) == row + 3

    for row, emitted in generate_tokens(Speculate(mild_engine, DraftRule(0.0, 5)), prompts, 20, finished):
        rows[row].append(emitted.token)
    kept = [row + 3 if row % 2 == 0 else 20 for row in range(len(prompts))]
    assert rows == [row[:n] for row, n in zip(expected, kept, strict=True)]


def test_drafting_with_a_stage_that_cannot_is_refused(mild_engine: Engine) -> None:
    rule = DraftRule(0.0, 1)
    with refused(ConfigError, setting="exit", given=4):
        Speculate(mild_engine, rule, LAST)
    with refused(ConfigError, setting="exit", given=5):
        Speculate(mild_engine, rule, 4)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_logits_that_are_not_finite_at_a_drafted_position_are_found(
    mild: GPT,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    place: int,
    sampling: Sampling | None,
) -> None:
    """Behind two drafts the full model speaks three times; its last word alone may be sound."""
    engine = make_engine(mild)
    readout = engine.stack.readout

    def spoilt(h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        logits = readout(h, stage, rows)
        if stage == LAST:
            assert len(logits) == 3
            logits[place, 5] = math.nan
        return logits

    monkeypatch.setattr(engine.runtime, "readout", spoilt)
    with refused(DivergenceError, setting="logits"):
        generate_batch(Speculate(engine, DraftRule(0.0, 2)), [[1, 2]], 1, sampling)


ROWS, PROMPT = 1500, [2, 0]
FARTHEST = 0.1
"""Allowed total variation between ROWS draws and their distribution over 25 pairs. Its mean is at most
sqrt(25 / (2 π ROWS)) = 0.052, and it exceeds that by t with probability at most exp(-2 ROWS t²): 1e-3."""


def pairs(model: GPT, engine: Engine, stage: int, sampling: Sampling) -> Tensor:
    """The exact distribution (5, 5) of the first two tokens that a stage writes."""
    first = probabilities(next_logits(model, engine.plan, PROMPT, stage), sampling)
    second = [probabilities(next_logits(model, engine.plan, [*PROMPT, t], stage), sampling) for t in range(5)]
    return first[:, None] * torch.stack(second)


def distance(p: Tensor, q: Tensor) -> float:
    """Total variation."""
    return (p - q).abs().sum().item() / 2


@pytest.fixture(scope="module")
def small(make_gpt: Callable[..., GPT]) -> GPT:
    return make_gpt(layers=2, width=8, heads=1, vocab=5, context=6)


def shares(strategy: DecodeStrategy, rows: int, sampling: Sampling) -> tuple[Tensor, Tally]:
    """How often each pair of tokens is written. Row r has the stream of seed + r: a batch is many seeds."""
    found = torch.zeros(5, 5, dtype=torch.float64)
    texts, tally = written(strategy, [PROMPT] * rows, 2, sampling)
    for a, b in texts:
        found[a.token, b.token] += 1 / rows
    return found, tally


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        (DraftRule(0.0, 3), Sampling(temperature=1.0, seed=1)),
        (DraftRule(0.6, 1), Sampling(temperature=0.8, top_k=4, seed=2)),
    ],
    ids=["three drafts", "one if sure"],
)
def test_sampled_text_has_the_full_models_distribution(
    small: GPT, make_engine: Callable[..., Engine], rule: DraftRule, sampling: Sampling
) -> None:
    engine = make_engine(small, "1,1", context=6)
    exact, draft = (pairs(small, engine, stage, sampling) for stage in (1, 0))
    assert distance(exact, draft) > 3 * FARTHEST
    found, tally = shares(Speculate(engine, rule), ROWS, sampling)
    assert distance(found, exact) < FARTHEST
    assert 0.2 * ROWS < tally.accepted < 0.95 * tally.drafted


@pytest.mark.parametrize("kind", ["prefix", "block", "depths"])
def test_sampled_text_of_drafters_that_know_few_tokens(
    small: GPT, make_engine: Callable[..., Engine], kind: str
) -> None:
    """What they never say is written as often as the full model says it."""
    engine, sampling = make_engine(small, "1,1", context=6), Sampling(temperature=1.0, seed=1)
    some, rule = torch.tensor([0, 2, 3]), DraftRule(0.0, 3)
    if kind == "prefix":
        drafter: Drafter = PrefixDrafter(engine, rule, 0, some)
    else:
        torch.manual_seed(1)
        stage = DraftStage(small, some, (0, 1) if kind == "depths" else None, 3 if kind == "block" else 1)
        drafter = DraftStageDrafter(engine, stage, rule)
    exact = pairs(small, engine, 1, sampling)
    found, tally = shares(Speculate(engine, drafter), ROWS, sampling)
    assert distance(found, exact) < FARTHEST
    assert 0.1 * ROWS < tally.accepted < 0.95 * tally.drafted


def test_to_accept_every_draft_would_be_seen(
    small: GPT, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "verify", lambda token, q, p, generator: (True, token))
    engine, sampling = make_engine(small, "1,1", context=6), Sampling(temperature=1.0, seed=1)
    found, _ = shares(Speculate(engine, DraftRule(0.0, 3)), 400, sampling)
    assert distance(found, pairs(small, engine, 1, sampling)) > 2 * FARTHEST


def test_sampled_rows_do_not_depend_on_one_another(mild_engine: Engine, prompts: list[list[int]]) -> None:
    rule = DraftRule(0.2, 3)

    def drawn(rows: list[list[int]], seed: int) -> list[list[int]]:
        return tokens_of(Speculate(mild_engine, rule), rows, 20, Sampling(temperature=0.7, seed=seed))

    together = drawn(prompts[2:], 5)
    assert together == [drawn([prompt], 5 + row)[0] for row, prompt in enumerate(prompts[2:])]
    assert together != drawn(prompts[2:], 6)


@torch.inference_mode()
def test_drafts_of_unlike_lengths_are_verified_in_one_pass(
    mild_engine: Engine, visits_of: Callable[[Stack], Any]
) -> None:
    """Whoever drafts: each text its own lookups, none of them padded."""
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [1, 2, 3], [4, 5, 4, 5, 4], [6]]
    batch, mode = mild_engine.start(prompts), Speculate(mild_engine, TextLookup())
    visits = visits_of(mild_engine.stack)
    lengths = set()
    for _ in range(6):
        visits.clear()
        before = [(s.marks[LAST], len(s), s.tally.drafted) for s in batch]
        mode.step(batch)
        drafted = [s.tally.drafted - b[2] for s, b in zip(batch, before, strict=True)]
        due = [n - mark + d for (mark, n, _), d in zip(before, drafted, strict=True)]
        assert [[len(row) for row in call] for call in visits.calls[LAST]] == [[sum(due)]]
        lengths |= set(drafted)
    assert len(lengths) > 1


def test_greedy_and_sampled_texts_are_verified_together(
    mild_engine: Engine, prompts: list[list[int]]
) -> None:
    """Each as alone: the sampling is the sequence's own."""
    mode = Speculate(mild_engine, DraftRule(0.2, 3))
    samplings = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(), Sampling(temperature=1.2, seed=9)]
    cache = mild_engine.new_cache()
    batch = [cache.new(sampling) for sampling in samplings]
    with torch.inference_mode():
        cache.push(batch, prompts[:4])
        while min(len(s) for s in batch) < 20:
            mode.step([s for s in batch if len(s) < 20])
    for sequence, prompt, sampling in zip(batch, prompts, samplings, strict=False):
        if len(prompt) < 10:
            alone = tokens_of(mode, [prompt], 20 - len(prompt), sampling)[0]
            assert sequence.tokens[len(prompt) : 20] == alone
