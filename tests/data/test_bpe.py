"""Our own tokenizers: exact round trips and byte counts, and files that are refused when not whole."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data import bpe as module
from topograd.data.bpe import SEPARATOR, BPETokenizer, _byte_alphabet, bytes_of
from topograd.data.tokenizer_file import load_tokenizer
from topograd.errors import ConfigError, DataError

small = settings(deadline=None, max_examples=60)

TEXTS = [
    "def encode(self, text):\n    return self.encode_batch([text])\n" * 3,
    "class Tokenizer:\n\n\n    pass  # naïve café, 東京, 12345 <|doc|>\n" * 3,
]
BYTES = BPETokenizer.bytes()
BPE = BPETokenizer.train(TEXTS, 300)
KINDS = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
CODE = st.lists(
    st.sampled_from(["def ", "self", "\n", "    ", "\r\n", "\t", " ", "x", "é", "京", "'s", "\x1c"])
)


@KINDS
@small
@given(text=UNICODE | CODE.map("".join))
def test_round_trip_and_byte_lengths(tokenizer: BPETokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert tokenizer.separator not in ids


@KINDS
def test_text_that_spells_the_separator_stays_text(tokenizer: BPETokenizer) -> None:
    ids = tokenizer.encode(f"a{SEPARATOR}b")
    assert tokenizer.separator not in ids
    assert tokenizer.decode([*ids, tokenizer.separator, *ids]) == f"a{SEPARATOR}b" * 2
    assert tokenizer.byte_lengths[tokenizer.separator] == 0


def test_sizes() -> None:
    assert (BYTES.kind, BYTES.vocab, BYTES.separator) == ("bytes", 257, 256)
    assert (BPE.kind, BPE.vocab, BPE.separator) == ("bpe", 300, 299)
    assert BPETokenizer.train(TEXTS, 257).digest == BYTES.digest
    assert 257 < BPETokenizer.train(["ab" * 9], 5000).vocab < 300
    assert sum(len(BPE.encode(text)) for text in TEXTS) < 0.6 * sum(len(BYTES.encode(text)) for text in TEXTS)


def test_encoding_applies_the_merges_in_order() -> None:
    """Against plain byte pair encoding, on words that the split into words leaves whole."""
    for word in ["encode", "Tokenizer", "selftext", "passreturn", "é"]:
        ids = list(word.encode())
        for left, right in BPE.merges:
            joined = BPE.pieces.index(BPE.pieces[left] + BPE.pieces[right])
            place = 0
            while place + 1 < len(ids):
                if (ids[place], ids[place + 1]) == (left, right):
                    ids[place : place + 2] = [joined]
                place += 1
        assert BPE.encode(word) == ids


@small
@given(st.lists(st.sampled_from(["a", "\n", " ", "b\nc", "\n\n", "\x1c", "\u2028", "'s", "7"]), max_size=80))
def test_long_texts_are_cut_without_a_trace(parts: list[str]) -> None:
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARACTERS", 5)
        assert "".join(module._parts(text)) == text
        cut = BPE.encode(text)
    assert cut == BPE.encode(text)


def test_long_texts_are_cut_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 5)
    assert list(module._parts("one two\nthree\n\nfour\n five\nsix")) == [
        "one two\n",
        "three\n\nfour\n five\n",
        "six",
    ]


def test_batch_is_each_text_alone() -> None:
    texts = [*TEXTS, "", "x"]
    batch = BPE.encode_batch(texts)
    assert [array.tolist() for array in batch] == [BPE.encode(text) for text in texts]
    assert {array.dtype for array in batch} == {np.dtype(np.uint32)}
    assert BPE.encode_batch([]) == BYTES.encode_batch([]) == []


def test_training_is_deterministic_and_samples_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BPETokenizer.train(iter(TEXTS), 300).digest == BPE.digest
    assert BPETokenizer.train(TEXTS[:1], 300).digest != BPE.digest
    monkeypatch.setattr(module, "_SAMPLE_CHARACTERS", 200)
    monkeypatch.setattr(module, "_BLOCK_CHARACTERS", 10)
    texts = ["".join(chr(0x4E00 + 100 * i + j) for j in range(95)) for i in range(10)]
    blocks = list(module._sample(texts))
    assert all(block in text for block, text in zip(blocks[::2], texts, strict=True))
    assert len(blocks) == 20


def test_decode_replaces_broken_characters() -> None:
    assert BYTES.decode([0xE6, 0x9D]) == "\ufffd"
    assert BYTES.decode(np.array([104, 256, 105])) == "hi"


def test_what_cannot_be_trained_is_refused() -> None:
    with refused(ConfigError, setting="vocab", given=256):
        BPETokenizer.train(TEXTS, 256)
    with refused(DataError, setting="text", given=1):
        BPETokenizer.train(["a\udc80"], 300)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"merges": [[97, 98]]},
        {"merges": [[97, 400]]},
        {"merges": [[-1, 97]]},
        {"merges": [97]},
        {"merges": None},
        {"merges": [[float("inf"), 1]]},
    ],
)
def test_foreign_or_damaged_file_is_refused(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "tokenizer.json"
    BPE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(DataError, setting="path") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"format": "topograd-tok', b"\xff\xfe", b"[" * 100_000])
def test_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with refused(DataError, setting="path"):
        load_tokenizer(path)
    with refused(DataError, setting="path"):
        load_tokenizer(tmp_path / "missing.json")


def test_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    BPE.encode_batch(TEXTS)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    BPE.encode("x")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_after_use_prints_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    BPE.encode_batch(TEXTS * 4)
    BPETokenizer.train(TEXTS, 280)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert "parallelism" not in capfd.readouterr().err


def test_the_bytes_of_a_byte_level_token() -> None:
    assert [bytes_of(name) for name in _byte_alphabet()] == [bytes([value]) for value in range(256)]
    assert bytes_of("a\u0120b") == b"a b"
    for token in ("a b", "\n", "\xad", "\u0144", "\uffff", "\u4e2d"):
        assert bytes_of(token) is None
