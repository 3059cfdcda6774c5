"""Packing: a partition of the targets into full rows, with little padding, cut anew in each epoch."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data.packing import Rows, best_fit, pack
from topograd.errors import DataError

small = settings(deadline=None, max_examples=60)

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def offsets_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(sizes) + 1)])


def packed(sizes: list[int], length: int, seed: int) -> Rows:
    return pack(offsets_of(sizes), length, np.random.default_rng(seed))


@small
@given(SIZES, st.integers(2, 25), st.integers(0, 5))
def test_every_token_is_a_target_once_in_its_own_document(sizes: list[int], length: int, seed: int) -> None:
    offsets = offsets_of(sizes)
    rows = packed(sizes, length, seed)
    spans = list(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True))
    targets = sorted(start + 1 + i for start, count in spans for i in range(count))
    assert targets == list(range(1, offsets[-1] + 1))
    for start, count in spans:
        document = np.searchsorted(offsets, start, side="right") - 1
        assert start + count <= offsets[document + 1]


@small
@given(SIZES, st.integers(2, 25), st.integers(0, 5))
def test_rows_are_never_over_full_and_no_two_could_be_one(sizes: list[int], length: int, seed: int) -> None:
    rows = packed(sizes, length, seed)
    assert rows.first[0] == 0
    assert rows.first[-1] == len(rows.starts)
    fills = np.add.reduceat(rows.counts, rows.first[:-1])
    assert fills.max() <= length - 1
    assert fills.min() >= 1
    smallest = np.sort(fills)[:2]
    assert len(rows) == 1 or smallest.sum() > length - 1
    assert rows.padded_share == pytest.approx(1 - sum(fills) / (len(rows) * (length - 1)))


@small
@given(SIZES, st.integers(2, 25))
def test_documents_that_fit_are_whole(sizes: list[int], length: int) -> None:
    offsets, rows = offsets_of(sizes), packed(sizes, length, 0)
    spans = set(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True))
    for begin, size in zip(offsets.tolist(), sizes, strict=False):
        assert size + 1 > length - 1 or (begin, size + 1) in spans


def test_long_document_is_cut_elsewhere_in_each_epoch() -> None:
    cuts = {tuple(packed([1000], 11, seed).starts.tolist()) for seed in range(200)}
    assert len(cuts) == 10  # one for each head of 0..9 targets
    assert packed([1000], 11, 3).starts.tolist() == packed([1000], 11, 3).starts.tolist()


def plain_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """The rooms left by best fit, said plainly."""
    rooms: list[int] = []
    for size in sizes:
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(capacity - size)
    return rooms


@small
@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_is_the_plain_one(sizes: list[int]) -> None:
    bin_of, bins = best_fit(np.array(sizes, dtype=np.int64), 20)
    rooms = 20 - np.bincount(bin_of, weights=sizes, minlength=bins)
    assert sorted(rooms.tolist()) == sorted(plain_best_fit(sizes, 20))


def fewest_bins(sizes: tuple[int, ...], capacity: int) -> int:
    """The optimum, by dynamic programming over subsets: (full bins, fill of the last one), least first."""

    @cache
    def best(left: int) -> tuple[int, int]:
        if left == 0:
            return 1, 0
        result = []
        for index, size in enumerate(sizes):
            if left >> index & 1:
                bins, fill = best(left & ~(1 << index))
                result.append((bins, fill + size) if fill + size <= capacity else (bins + 1, size))
        return min(result)

    return best((1 << len(sizes)) - 1)[0]


@small
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_best_fit_decreasing_keeps_its_bound(sizes: list[int]) -> None:
    decreasing = sorted(sizes, reverse=True)
    _, bins = best_fit(np.array(decreasing), 12)
    optimum = fewest_bins(tuple(decreasing), 12)
    assert optimum <= bins <= 1.5 * optimum


def test_padding_is_small_where_documents_vary() -> None:
    sizes = np.random.default_rng(0).lognormal(5.5, 1.5, size=400).astype(int).tolist()
    assert packed(sizes, 129, 0).padded_share < 0.01
    assert packed([76] * 100, 129, 0).padded_share == pytest.approx(51 / 128)  # the documented bad case


def test_row_without_a_target_is_refused() -> None:
    with refused(DataError, setting="length", given=1):
        packed([3], 1, 0)
