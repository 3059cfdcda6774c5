"""An index that grows with the text finds what reading the text finds; a table counts what it was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.lookup import followers
from topograd.decode.lookup import NGramIndex, NGramTable

texts = st.lists(st.integers(0, 3), max_size=30)


@given(texts, texts, st.lists(st.integers(0, 3), max_size=4), st.integers(1, 4), st.integers(0, 5))
def test_the_index_finds_what_the_text_has(
    text: list[int], more: list[int], ahead: list[int], longest: int, count: int
) -> None:
    index = NGramIndex(longest)
    index.follow(text)
    index.follow(text + more)
    n, found = index.find([], count)
    assert found == followers(text + more, longest, count)
    assert n == max((m for m in range(1, longest + 1) if _stood(text + more, m)), default=0)
    _, found = index.find(ahead, count)
    whole = text + more + ahead
    assert not found or any(whole[i : i + len(found)] == found for i in range(len(whole)))


def _stood(text: list[int], n: int) -> bool:
    return n < len(text) and any(text[i : i + n] == text[-n:] for i in range(len(text) - n))


@given(texts, texts)
def test_another_text_is_indexed_from_its_start(text: list[int], other: list[int]) -> None:
    """A row that forgot its older half, or a row of another request."""
    used, fresh = NGramIndex(3), NGramIndex(3)
    used.follow(text)
    used.follow(other)
    fresh.follow(other)
    assert used.find([], 4) == fresh.find([], 4)


def test_a_table_says_what_followed_most_often() -> None:
    rows = np.array([[7, 8, 9, 1, 7, 8, 9, 2, 7, 8, 9, 1, 5, 5]])
    table = NGramTable.of(rows)
    assert table.find([0, 8, 9]) == (1, 2 / 4)  # twice of three times, and one for what was not seen
    assert table.find([7, 8, 9]) == (1, 2 / 4)
    assert table.find([7, 8]) == (9, 0.75)
    assert table.find([1, 7]) is None, "it was there once"
    assert table.find([5, 5]) is None
    assert table.find([9]) is None
    own = np.array([[0] * 4 + [1] * 10])
    assert NGramTable.of(rows, own, least=1).find([0, 8, 9])[1] == pytest.approx(1 / 3), "of two that count"  # type: ignore[index]
    again = NGramTable.from_tensors({name: t.clone() for name, t in table.tensors().items()})
    assert len(again) == len(table)
    assert again.find([7, 8, 9]) == (1, 2 / 4)
    assert all(isinstance(t, torch.Tensor) for t in table.tensors().values())
