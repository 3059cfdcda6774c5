"""Which sequence a prompt gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from topograd.decode.sampling import Sampling
from topograd.serve.pool import MIN_SHARED, Pool, Slot

STAGES = [0, 1, 2, 3]


GREEDY = Sampling()


def used(pool: Pool, prompt: list[int]) -> Slot:
    """A slot in which a prompt was read by all stages."""
    slot, have = pool.take(prompt, STAGES, GREEDY)
    with torch.inference_mode():
        pool.cache.push([slot.sequence], [prompt[have:]])
        pool.cache.run([slot.sequence], 3)
    return slot


def test_the_free_row_that_begins_most_like_it(make_desk: Callable[..., Any]) -> None:
    pool = Pool(make_desk().model.engine)
    rows = [used(pool, [first, *range(100, 112)]) for first in (1, 2, 3)]
    for row in rows:
        row.busy = False
    row, have = pool.take([2, *range(100, 110), 7, 7], STAGES, GREEDY)
    assert row is rows[1]
    assert have == 11
    assert row.sequence.tokens == [2, *range(100, 110)]


def test_one_token_is_always_read_again(make_desk: Callable[..., Any]) -> None:
    pool = Pool(make_desk().model.engine)
    row = used(pool, [1, 2, 3, 4])
    row.busy = False
    assert pool.take([1, 2, 3, 4], STAGES, GREEDY, grow=False) == (row, 3)


def test_a_busy_row_is_copied_from(make_desk: Callable[..., Any]) -> None:
    pool = Pool(make_desk().model.engine)
    busy = used(pool, list(range(100, 112)))
    row, have = pool.take([*range(100, 110), 1], STAGES, GREEDY)
    assert row is not busy
    assert have == 10 > MIN_SHARED
    assert row.sequence.tokens == list(range(100, 110))
    assert busy.sequence.tokens == list(range(100, 112))


def test_only_what_the_stages_have_run_counts(make_desk: Callable[..., Any]) -> None:
    pool = Pool(make_desk().model.engine)
    row, _ = pool.take([1, 2, 3, 4, 5], [0], GREEDY)
    with torch.inference_mode():
        pool.cache.push([row.sequence], [[1, 2, 3, 4, 5]])
        pool.cache.run([row.sequence], 0)
    row.busy = False
    assert pool.take([1, 2, 3, 4, 5], [0], GREEDY, grow=False)[1] == 4
    row.busy = False
    assert pool.take([1, 2, 3, 4, 5], STAGES, GREEDY, grow=False)[1] == 0


def test_the_oldest_row_goes_when_nothing_fits(make_desk: Callable[..., Any]) -> None:
    pool = Pool(make_desk().model.engine)
    rows = [used(pool, [k, k, k]) for k in (1, 2)]
    for row in rows:
        row.busy = False
    assert pool.take([9, 9], STAGES, GREEDY, grow=False)[0] is rows[0]
    pool.drop(rows[0])
    assert pool.slots == rows[1:]
