"""Evaluation windows: each token a target once, with its predecessor as input, and exact bytes."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data.bpe import BPETokenizer
from topograd.data.loader import IGNORED
from topograd.data.shards import write_shards
from topograd.data.windows import windows
from topograd.errors import ConfigError, DataError

small = settings(deadline=None, max_examples=60)

BYTES = BPETokenizer.bytes()
BPE = BPETokenizer.train(["evaluation windows, each token a target once; naïve café\n" * 4], 300)
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=6
).filter(any)


@small
@given(TEXTS, st.integers(1, 12))
def test_every_token_is_a_target_once(texts: list[str], context: int) -> None:
    documents = BPE.encode_batch(texts)
    inputs, targets, nbytes = windows(documents, BPE, context)
    assert inputs.shape == targets.shape
    assert targets.shape[1] == context
    assert nbytes == sum(len(text.encode()) for text in texts)
    expected_inputs = [i for d in documents if len(d) for i in [BPE.separator, *d[:-1].tolist()]]
    used = targets != IGNORED
    assert targets[used].tolist() == np.concatenate(documents).tolist()
    assert inputs[used].tolist() == expected_inputs
    assert (inputs[~used] == BPE.separator).all()


def test_shards_and_lists_give_the_same(tmp_path: Path) -> None:
    documents = [BPE.encode(text) for text in ["token a target", "", "once; each naïve window" * 3]]
    shards = write_shards(tmp_path / "s", documents, BPE.vocab, separator=BPE.separator, shard_tokens=7)
    for a, b in zip(windows(documents, BPE, 5), windows(shards, BPE, 5), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@small
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(8, 400))
def test_limited_windows_are_some_of_all_in_order(sizes: list[int], limit: int) -> None:
    documents = [list(range(size)) for size in sizes]
    inputs, targets, nbytes = windows(documents, BYTES, 8, limit_bytes=limit)
    assert nbytes == (targets != IGNORED).sum()
    assert nbytes <= limit
    everything = zip(*(tensor.tolist() for tensor in windows(documents, BYTES, 8)[:2]), strict=True)
    assert all(window in everything for window in zip(inputs.tolist(), targets.tolist(), strict=True))


def test_sample_is_spread_over_the_whole_text() -> None:
    documents = [[number] * 16 for number in range(100)]
    _, targets, nbytes = windows(documents, BYTES, 16, limit_bytes=16 * 10)
    assert nbytes == 160
    assert targets[:, 0].tolist() == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]


def test_large_limit_changes_nothing() -> None:
    documents = [[1, 2, 3], [4, 5]]
    for a, b in zip(windows(documents, BYTES, 2), windows(documents, BYTES, 2, limit_bytes=5), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_bad_arguments_are_refused() -> None:
    with refused(ConfigError, setting="context", given=0):
        windows([[1]], BYTES, 0)
    with refused(DataError, setting="documents"):
        windows([[]], BYTES, 4)
    with refused(DataError, setting="documents"):
        windows([[1, 257]], BYTES, 4)
    with refused(DataError, setting="limit_bytes", given=3):
        windows([[1, 2, 3, 4]], BYTES, 4, limit_bytes=3)
