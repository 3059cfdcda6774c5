"""The loader: the same batches for the same seed, from any position, each token once in an epoch."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data.loader import IGNORED, Loader
from topograd.data.shards import Shards, write_shards
from topograd.errors import ConfigError, DataError

small = settings(deadline=None, max_examples=60)

SIZES = [3, 40, 0, 7, 18, 25]
FIRST = 10  # tokens are FIRST, FIRST + 1, ... so that each is its own name
VOCAB = FIRST + sum(SIZES)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    names = iter(range(FIRST, VOCAB))
    documents = [list(islice(names, size)) for size in SIZES]
    return write_shards(
        tmp_path_factory.mktemp("loader") / "s", documents, VOCAB, separator=0, shard_tokens=13
    )


def test_batches_are_inputs_and_their_successors(shards: Shards) -> None:
    loader = Loader(shards, context=8, batch=4, seed=1)
    starts = {int(shards[i][0]) for i in range(shards.documents) if SIZES[i]}
    for inputs, targets in islice(loader, 10):
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        for x, y in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True):
            if x >= FIRST and y >= FIRST:
                assert y == x + 1
                assert y not in starts
            elif y >= FIRST:
                assert y in starts
            else:
                assert y in (0, IGNORED)


def test_an_epoch_holds_each_target_once_and_epochs_differ(shards: Shards) -> None:
    loader = Loader(shards, context=8, batch=1, seed=1)
    seen = []
    for _ in range(3):
        epoch = [next(loader) for _ in range(loader.rows)]
        targets = torch.cat([y for _, y in epoch]).flatten()
        counts = Counter(targets.tolist())
        assert all(counts[token] == 1 for token in range(FIRST, VOCAB))
        assert counts[0] == len(SIZES)
        assert counts[IGNORED] == pytest.approx(loader.padded_share * loader.rows * 8)
        seen.append([x.tolist() for x, _ in epoch])
    assert seen[0] != seen[1] != seen[2]
    assert sorted(map(str, seen[0])) != sorted(map(str, seen[1]))  # cut at other places, not only reordered


@small
@given(st.integers(0, 60), st.integers(1, 9))
def test_seek_continues_the_same_sequence(shards: Shards, steps: int, batch: int) -> None:
    loader = Loader(shards, context=8, batch=batch, seed=7)
    for _ in range(steps):
        next(loader)
    position = json.loads(json.dumps(loader.position))
    expected = [next(loader) for _ in range(4)]
    other = Loader(shards, context=8, batch=batch, seed=7)
    other.seek(position)
    assert other.position == position
    for (x, y), (u, v) in zip(expected, islice(other, 4), strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert other.position == loader.position


def test_batches_are_the_rows_in_order_whatever_their_number(shards: Shards) -> None:
    one, five = Loader(shards, 8, 1, seed=3), Loader(shards, 8, 5, seed=3)
    rows = torch.cat([next(one)[0] for _ in range(50)])
    assert torch.equal(rows, torch.cat([next(five)[0] for _ in range(10)]))
    assert one.position == five.position
    assert one.position["epoch"] >= 2


def test_sequence_is_pinned(shards: Shards) -> None:
    """The first row of seed 0: fixed numbers, so that nothing of this process can have a part in it."""
    inputs, _ = next(Loader(shards, 8, 1, seed=0))
    assert inputs.tolist() == [[33, 34, 35, 36, 37, 38, 39, 40]]
    different = {tuple(next(Loader(shards, 8, 1, seed=seed))[0].flatten().tolist()) for seed in range(8)}
    assert len(different) > 4


@pytest.mark.parametrize(
    "position",
    [{}, {"epoch": 0}, {"epoch": -1, "row": 0}, {"epoch": 0, "row": 10**6}, {"epoch": "0", "row": 1}],
)
def test_bad_position_is_refused_and_changes_nothing(shards: Shards, position: dict) -> None:
    loader = Loader(shards, 8, 2, seed=0)
    next(loader)
    before = loader.position
    with refused(DataError, setting="position"):
        loader.seek(position)
    assert loader.position == before


def test_too_short_corpus_is_refused(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "s", [[1, 2, 3]], 4, separator=0)
    x, y = next(Loader(shards, context=4, batch=1, seed=0))
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2, 3]], [[1, 2, 3, 0]])
    with refused(DataError, setting="context", given=5):
        Loader(shards, context=5, batch=1, seed=0)


@pytest.mark.parametrize(("setting", "given"), [("context", 0), ("batch", 0), ("seed", -1)])
def test_settings_out_of_range_are_refused(shards: Shards, setting: str, given: int) -> None:
    with refused(ConfigError, setting=setting, given=given):
        Loader(shards, **{"context": 1, "batch": 1, "seed": 0, setting: given})
