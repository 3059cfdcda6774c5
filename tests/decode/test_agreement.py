"""Ties and mismatches, told apart on models whose best two tokens are made equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.oracles.decoding import next_logits
from topograd.decode.agreement import differences, distinct, full_logits, identical, is_tie, mean_exit
from topograd.decode.engine import Emitted, Engine
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.nn.gpt import GPT

PROMPT, TOKENS = [3, 1, 4], 6


def text(tokens: Sequence[int], stage: int = 0) -> list[Emitted]:
    return [Emitted(token, stage) for token in tokens]


@pytest.mark.parametrize(
    ("logits", "a", "b", "tied"),
    [
        ([1.0, 4.0, 4.0], 1, 2, True),
        ([1.0, 4.0, 4.0], 2, 1, True),
        ([-9.0, 4.0, 4.0 + 8e-5], 1, 2, True),
        ([-9.0, 4.0, 4.0 + 1e-4], 1, 2, False),
        ([1.0, 4.0, 4.0 + 8e-5], 1, 2, False),
        ([1.0, 4.0, 3.0], 1, 2, False),
        ([5.0, 4.0, 4.0], 1, 2, False),
        ([4.0, 4.0, 4.0], 0, 2, True),
        ([-2.0, -1.0, -1.0], 1, 2, True),
    ],
    ids=[
        *("equal", "the other way round", "close to the largest", "not so close", "close to nothing large"),
        *("not close", "not the best", "three", "below zero"),
    ],
)
def test_a_tie_is_of_the_two_best(logits: list[float], a: int, b: int, tied: bool) -> None:
    assert is_tie(torch.tensor(logits, dtype=torch.float64), a, b) is tied


def test_logits_of_full_depth(gpt: GPT, engine: Engine) -> None:
    found = full_logits(engine, PROMPT)
    torch.testing.assert_close(found, next_logits(gpt, engine.plan, PROMPT, 3), rtol=0, atol=1e-9)


def twins(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], share: float
) -> tuple[Engine, list[list[Emitted]], int, int]:
    """An engine in which one token has `share` of another's logit, full depth's text, where, and the other.

    The text has the one token or the other at `where`, with tokens of neither kind before it.
    """
    model = make_gpt()
    first = [e.token for e in generate_batch(FixedDepth(make_engine(model)), [PROMPT], TOKENS)[0]]
    best = first[2]
    rival = next(token for token in range(50) if token not in first)
    with torch.no_grad():
        model.head.weight[rival] = share * model.head.weight[best]
    engine = make_engine(model)
    full = generate_batch(FixedDepth(engine), [PROMPT], TOKENS)
    where = next(i for i, e in enumerate(full[0]) if e.token in (best, rival))
    return engine, full, where, rival if full[0][where].token == best else best


def instead(full: Sequence[Emitted], where: int, token: int) -> list[Emitted]:
    """A text that is another from one token on."""
    return [*full[:where], *text([token]), *text([0] * (len(full) - where - 1))]


def test_a_text_that_leaves_at_a_tie(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine]
) -> None:
    engine, full, where, other = twins(make_gpt, make_engine, 1.0)
    logits = full_logits(engine, [*PROMPT, *(e.token for e in full[0][:where])])
    assert is_tie(logits, full[0][where].token, other)
    tie = instead(full[0], where, other)
    assert differences(engine, [PROMPT], [tie], full) == {"mismatches": 0, "ties": 1}
    worst = int(logits.argmin())
    wrong = instead(full[0], where, worst)
    assert differences(engine, [PROMPT], [wrong], full) == {"mismatches": 1, "ties": 0}
    found = differences(engine, [PROMPT] * 4, [tie, full[0], wrong, tie], full * 4)
    assert found == {"mismatches": 1, "ties": 2}


def test_a_text_that_leaves_where_the_second_is_close_is_a_mismatch(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine]
) -> None:
    engine, full, where, other = twins(make_gpt, make_engine, 0.999)
    logits = full_logits(engine, [*PROMPT, *(e.token for e in full[0][:where])])
    assert set(logits.topk(2).indices.tolist()) == {full[0][where].token, other}
    found = differences(engine, [PROMPT], [instead(full[0], where, other)], full)
    assert found == {"mismatches": 1, "ties": 0}


def test_what_is_the_same_is_no_difference(engine: Engine) -> None:
    full = generate_batch(FixedDepth(engine), [PROMPT], TOKENS)
    drafted = [Emitted(e.token, 0) for e in full[0]]
    assert differences(engine, [PROMPT], [drafted], full) == {"mismatches": 0, "ties": 0}


def test_the_share_of_identical_texts() -> None:
    full = [text([1, 2]), text([3, 4]), text([5, 6]), text([7, 8])]
    some = [text([1, 2], stage=1), text([3, 5]), text([5, 6]), text([8, 7])]
    assert identical(some, full) == 0.5
    assert identical(full, full) == 1


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ([[1, 2, 3, 4, 5]], 1.0),
        ([[7] * 9], 1 / 6),
        ([[1, 2] * 4], 2 / 5),
        ([[1, 2, 3, 4], [7] * 5], 0.75),
        ([[1, 2, 3], [7] * 5], 0.5),
        ([[1, 2, 3], []], None),
        ([], None),
    ],
    ids=["none twice", "one token", "two tokens", "the mean of texts", "a short text", "only short", "none"],
)
def test_the_share_of_distinct_four_grams(texts: list[list[int]], share: float | None) -> None:
    assert distinct([text(tokens) for tokens in texts]) == share


def test_the_mean_stage_counts_from_one() -> None:
    assert mean_exit([text([1, 2, 3], stage=0), text([4], stage=3)]) == 7 / 4
