"""Byte-level and BPE tokenizers.

One class, two kinds. Both are byte-level: ids 0..255 are the bytes, and the last id is the separator
`<|doc|>`, which stands before each document and is never made from text, even from text that spells it.

- "bytes": 256 bytes and the separator, 257 ids.
- "bpe": byte pair encoding. Merge j joins two earlier tokens into a token; what may be joined is bounded by
  GPT-2's split into words, numbers, punctuation and runs of space (`ByteLevel` of the `tokenizers` library,
  which also trains the merges and applies them).

A tokenizer is therefore its list of merges, and that is all that its file holds.

Cost. Training reads about 4 million characters at most, in blocks spaced evenly over all the text: with 1024
ids on the embedded corpus that gives 0.1% more tokens than training on all of it, in a third of the time.
Encoding runs in one thread per core. They are our own threads: once the library's pool has run, every later
fork of the process prints a warning.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from topograd.data.tokenizer import FILE, TextKind, Tokenizer, check_kind, utf8, without_pool
from topograd.errors import ConfigError, DataError
from topograd.files import dump_json

SEPARATOR = "<|doc|>"
_FORMAT = "topograd-tokenizer"
_VERSION = 1
_SAMPLE_CHARACTERS = 2**22
_BLOCK_CHARACTERS = 2**14
_PIECE_CHARACTERS = 2**18
# A line break alone between two visible characters is a token boundary on both of its sides: GPT-2's split
# joins nothing but a blank to what follows. A text cut behind it is encoded as if it had not been cut.
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")


class BPETokenizer(Tokenizer):
    """A byte-level tokenizer given by its merges, pairs of ids. Make one with `bytes` or `train`.

    The token that a merge makes gets the next free id, unless an earlier merge made the same bytes.
    """

    def __init__(self, merges: tuple[tuple[int, int], ...]) -> None:
        self.merges = merges
        self.kind = "bpe" if merges else "bytes"
        self.pieces = (*_pieces(merges), b"")
        self.separator = len(self.pieces) - 1
        self.start_tokens = [self.separator]
        self.stop_tokens = frozenset()
        self.special_ids = {}
        self.special_tokens = {}
        self.chat_template = None

    @classmethod
    def bytes(cls) -> "BPETokenizer":
        """The tokenizer without merges: one token for each byte."""
        return cls(())

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> "BPETokenizer":
        """Learn merges until there are `vocab` ids, separator included; fewer, if no pair is seen twice."""
        if vocab < 257:
            problem = f"a vocabulary of {vocab} is too small: 256 bytes and the separator need at least 257"
            raise ConfigError(problem, setting="vocab", given=vocab)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - 1,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        learner = _byte_level(models.BPE())
        with without_pool():
            learner.train_from_iterator(_sample([_checked(text) for text in texts]), trainer)
        return cls(_renumber(json.loads(learner.to_str())["model"]["merges"]))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 (hex) of the merges: equal exactly for tokenizers that encode alike."""
        return hashlib.sha256(json.dumps(self.merges).encode()).hexdigest()

    def encode(self, text: str, kind: TextKind = "document") -> list[int]:
        """The ids of `text`, the same for every kind."""
        check_kind(kind)
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text as a uint32 array. Long texts are encoded in parts, with the same result."""
        if not self.merges:
            return [np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint32) for text in texts]
        parts = [(index, part) for index, text in enumerate(texts) for part in _parts(_checked(text))]
        with without_pool():
            if len(parts) <= 1:
                arrays = [self._encode_part(part) for _, part in parts]
            else:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    arrays = list(pool.map(self._encode_part, [part for _, part in parts]))
        encoded: list[list[np.ndarray]] = [[] for _ in texts]
        for (index, _), array in zip(parts, arrays, strict=True):
            encoded[index].append(array)
        return [np.concatenate(pieces) if len(pieces) > 1 else pieces[0] for pieces in encoded]

    def files(self) -> dict[str, str]:
        """One file; equal for equal tokenizers."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "vocab": self.vocab,
            "digest": self.digest,
            "merges": self.merges,
        }
        return {FILE: dump_json(content) + "\n"}

    def to_hf(self) -> NoReturn:
        """Raises ConfigError: other programs do not know it."""
        problem = "the tokenizer is one of this package, which no other program reads"
        remedy = "only imported models are exported: keep the run's folder"
        raise ConfigError(problem, setting="tokenizer", given=self.kind, remedy=remedy)

    @classmethod
    def from_file(cls, path: Path, content: Any) -> "BPETokenizer":
        """The tokenizer that `save` wrote to `path`, given the file's content."""
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise _damaged(path, "is not a tokenizer of this package")
        if content.get("version") != _VERSION:
            raise _damaged(path, f"has format version {content.get('version')!r}, not {_VERSION}")
        try:
            tokenizer = cls(tuple((int(left), int(right)) for left, right in content["merges"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _damaged(path, "is damaged (bad merges)") from error
        if tokenizer.digest != content.get("digest"):
            raise _damaged(path, "is damaged (its digest does not fit its merges)")
        return tokenizer

    @cached_property
    def _encoder(self) -> tokenizers.Tokenizer:
        names = [_printable(piece) for piece in self.pieces[:-1]]
        pairs = [(names[left], names[right]) for left, right in self.merges]
        return _byte_level(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=pairs))

    def _encode_part(self, part: str) -> np.ndarray:
        [encoding] = self._encoder.encode_batch_fast([part], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)


def _pieces(merges: Iterable[tuple[int, int]]) -> list[bytes]:
    pieces = [bytes([value]) for value in range(256)]
    known = set(pieces)
    for left, right in merges:
        if not (0 <= left < len(pieces) and 0 <= right < len(pieces)):
            problem = f"merge ({left}, {right}) joins a token that does not exist yet"
            raise DataError(problem, setting="merges", given=(left, right))
        joined = pieces[left] + pieces[right]
        if joined not in known:
            known.add(joined)
            pieces.append(joined)
    return pieces


def _renumber(pairs: Iterable[Sequence[str]]) -> tuple[tuple[int, int], ...]:
    """The library's merges, pairs of printable names, as pairs of our ids."""
    ids = {_printable(bytes([value])): value for value in range(256)}
    merges = []
    for left, right in pairs:
        merges.append((ids[left], ids[right]))
        ids.setdefault(left + right, len(ids))
    return tuple(merges)


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _byte_alphabet() -> tuple[str, ...]:
    """The visible character by which the library names each byte: itself, or the next from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return tuple(chr(value) if value in visible else chr(next(others)) for value in range(256))


_ALPHABET = _byte_alphabet()
_LATIN = dict.fromkeys(range(256), "\uffff") | {ord(name): chr(v) for v, name in enumerate(_ALPHABET)}


def bytes_of(token: str) -> bytes | None:
    """The bytes that the characters of a byte-level token stand for; None if one stands for none."""
    try:
        return token.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _printable(piece: bytes) -> str:
    return "".join(_ALPHABET[value] for value in piece)


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Blocks of the texts, spaced evenly, about `_SAMPLE_CHARACTERS` in all (everything, if that is less)."""
    total = sum(len(text) for text in texts)
    seen = sampled = 0
    for text in texts:
        for start in range(0, len(text), _BLOCK_CHARACTERS):
            block = text[start : start + _BLOCK_CHARACTERS]
            if sampled * total <= seen * _SAMPLE_CHARACTERS:
                sampled += len(block)
                yield block
            seen += len(block)


def _parts(text: str) -> Iterator[str]:
    start = 0
    while cut := _SAFE_CUT.search(text, start + _PIECE_CHARACTERS):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _checked(text: str) -> str:
    utf8(text)
    return text


def _damaged(path: Path, reason: str) -> DataError:
    remedy = "remove it, or give one that `save` wrote"
    return DataError(f"tokenizer file {str(path)!r} {reason}", setting="path", given=path, remedy=remedy)
