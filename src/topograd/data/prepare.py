"""Preparation of a corpus: its tokenizer and two folders of shards, in a cache.

    CACHE/tokenizers/KEY.json           KEY of the corpus and the tokenizer's settings
    CACHE/shards/KEY/train, heldout     KEY of the corpus and the tokenizer itself

Keys are digests, so changed text or settings lead to another entry and never to a wrong one. An entry that is
damaged, be it by one bit, is built again. The corpus is read each time, which is how its digest is known.
Where the cache cannot be written, a warning is logged and everything stays in memory; `cache.py` keeps it
within bounds.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topograd.data.bpe import BPETokenizer
from topograd.data.cache import InUse, default_cache, prune, warn_unusable
from topograd.data.corpus import Corpus, Document, read_corpus
from topograd.data.shards import Shards, shards_in_memory, write_shards
from topograd.data.tokenizer import Tokenizer
from topograd.data.tokenizer_file import load_tokenizer
from topograd.errors import ConfigError, DataError

_VERSION = 1
"""Part of every key. Raise it when the same corpus and settings shall give other files."""
_BATCH_CHARACTERS = 2**23


@dataclass(frozen=True, eq=False)
class Prepared:
    """The prepared data of a training run. `digest` is that of the corpus."""

    tokenizer: Tokenizer
    train: Shards
    heldout: Shards
    corpus_name: str
    digest: str
    skipped: tuple[str, ...]
    """Files of the corpus that were not read, each with the reason."""
    in_use: InUse | None
    """Keeps the cache from pruning the shards while this lives; None where they are in memory alone."""


def prepare(
    path: Path | str | None,
    tokenizer_kind: str,
    vocab: int,
    cache: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Prepared:
    """Build, or find in the cache, tokenizer and shards of the corpus at `path` (None: the embedded one).

    `tokenizer_kind` is "bytes" (then `vocab` is not used) or "bpe" with `vocab` ids, separator included. A
    `tokenizer` that is given is used instead. `cache` is by default $XDG_CACHE_HOME/topograd or
    ~/.cache/topograd.
    """
    if tokenizer is None and tokenizer_kind not in ("bytes", "bpe"):
        problem = f"tokenizer {tokenizer_kind!r} does not exist: choose 'bytes' or 'bpe'"
        raise ConfigError(problem, setting="tokenizer_kind", given=tokenizer_kind)
    cache = default_cache() if cache is None else cache
    corpus = read_corpus(path)
    problems: list[OSError] = []
    if tokenizer is None:
        tokenizer = _tokenizer(corpus, tokenizer_kind, vocab, cache / "tokenizers", problems)
    folder = cache / "shards" / _key(corpus.digest, tokenizer.digest)
    in_use = InUse(folder)
    train = _shards(corpus, "train", corpus.train, tokenizer, folder, problems)
    heldout = _shards(corpus, "heldout", corpus.heldout, tokenizer, folder, problems)
    if problems:
        warn_unusable(cache, problems[0])
    else:
        prune(cache)
    return Prepared(tokenizer, train, heldout, corpus.name, corpus.digest, corpus.skipped, in_use)


def _tokenizer(corpus: Corpus, kind: str, vocab: int, folder: Path, problems: list[OSError]) -> Tokenizer:
    if kind == "bytes":
        return BPETokenizer.bytes()
    path = folder / f"{_key(corpus.digest, kind, vocab)}.json"
    try:
        tokenizer = load_tokenizer(path)
        with contextlib.suppress(OSError):  # a cache that is read-only keeps its times
            os.utime(path)
    except DataError:
        tokenizer = BPETokenizer.train((document.text for document in corpus.train), vocab)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer.save(path)
        except OSError as problem:
            problems.append(problem)
    return tokenizer


def _shards(
    corpus: Corpus,
    side: str,
    documents: list[Document],
    tokenizer: Tokenizer,
    folder: Path,
    problems: list[OSError],
) -> Shards:
    """One side of the corpus: from the cache, or written there, or in memory where that fails."""
    meta: dict[str, Any] = {"corpus": corpus.digest, "tokenizer": tokenizer.digest, "side": side}
    try:
        shards = Shards.open(folder / side)
        if shards.meta == meta and shards.vocab == tokenizer.vocab and shards.documents == len(documents):
            return shards
    except DataError:
        pass  # nothing there yet, or damaged: written below
    settings: dict[str, Any] = {"vocab": tokenizer.vocab, "separator": tokenizer.separator, **meta}
    try:
        return write_shards(folder / side, _encoded(documents, tokenizer), **settings)
    except OSError as problem:
        problems.append(problem)
        return shards_in_memory(_encoded(documents, tokenizer), **settings)


def _encoded(documents: list[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens of each document, encoded some megabytes at a time."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield from tokenizer.encode_batch(batch)
            batch, size = [], 0
    yield from tokenizer.encode_batch(batch)


def _key(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:24]
