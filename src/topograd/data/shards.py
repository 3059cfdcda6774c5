"""Shards: the tokens of a corpus in memory-mapped files.

A folder holds one sequence of tokens

    s D_0 s D_1 s ... s D_{n-1} s          s the separator, D_i the tokens of document i

cut into files of equal size, so that any stretch of text, with the separator before it and the one after
it, is one slice. `offsets` (n + 1,) holds the positions of the separators: document i is the slice from
offsets[i] + 1 to offsets[i + 1].

    manifest.json       format, version, dtype, counts, the names of the files, meta, and a SHA-256 of both
    offsets.bin         int64, little-endian
    tokens-00000.bin    uint16 (uint32 above 65536 ids), little-endian; tokens-00001.bin, ...

The folder is written under another name beside its place and then renamed, so a kill leaves nothing or all
of it there. Of two processes that write the same folder at once, the second keeps the first one's if it is
the same, and replaces it otherwise.

Cost. Opening checks names, sizes and offsets, and reads all tokens once for their SHA-256: about a second for
a gigabyte, less than reading the corpus takes.
"""

import glob
import hashlib
import os
import re
import secrets
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from topograd.errors import DataError
from topograd.files import dump_json, lock_file, naming, read_table, sync

_FORMAT = "topograd-shards"
_VERSION = 1
_MANIFEST = "manifest.json"
_OFFSETS = "offsets.bin"
_OUR_FILES = re.compile(r"manifest\.json|offsets\.bin|tokens-\d{5,}\.bin")
_ABANDONED_SECONDS = 24 * 3600
_PREPARE_AGAIN = "remove its folder and prepare the data again"


@dataclass(frozen=True, eq=False)
class Shards:
    """A stream of tokens, open for reading. Item i is the tokens of document i; iterating gives all."""

    folder: Path | None
    """Where its files are; None if it is in memory alone."""
    vocab: int
    separator: int
    shard_tokens: int
    meta: dict[str, Any]
    offsets: np.ndarray
    """(documents + 1,) int64: the positions of the separators."""
    files: tuple[np.ndarray, ...]
    """A read-only map for each file, or one array in memory; all but the last hold `shard_tokens` tokens."""
    learned: np.ndarray | None = None
    """(tokens,) bool: the tokens that have a loss; None is all of them."""

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @cached_property
    def tokens(self) -> int:
        """The length of the stream, separators included."""
        return int(self.offsets[-1]) + 1

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Positions start..stop-1 of the stream: a view where one file holds them all, else a copy."""
        if not 0 <= start <= stop <= self.tokens:
            raise DataError(f"slice {start}:{stop} is not within {self.tokens} tokens", setting="slice")
        first, last = start // self.shard_tokens, max(start, stop - 1) // self.shard_tokens
        if first == last < len(self.files):
            base = first * self.shard_tokens
            return self.files[first][start - base : stop - base]
        parts = [np.empty(0, dtype=_dtype(self.vocab))]
        for index in range(first, min(last + 1, len(self.files))):
            base = index * self.shard_tokens
            parts.append(self.files[index][max(start - base, 0) : stop - base])
        return np.concatenate(parts)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(self.documents))

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self.documents:
            raise IndexError(index)
        return self.slice(int(self.offsets[index]) + 1, int(self.offsets[index + 1]))

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Open a folder of `write_shards`; a missing, truncated or foreign file raises DataError."""
        manifest = read_table(folder / _MANIFEST, _FORMAT, _VERSION, (), DataError, _PREPARE_AGAIN)
        vocab, separator, tokens, documents, shard_tokens = _checked_counts(folder, manifest)
        offsets = _map_file(folder / _OFFSETS, np.dtype("<i8"), documents + 1)
        if offsets[0] != 0 or offsets[-1] != tokens - 1 or (np.diff(offsets) < 1).any():
            raise _damaged(folder / _OFFSETS, "is damaged (its positions do not rise from 0 to the end)")
        files = []
        for index, name in enumerate(manifest["files"]):
            count = min(shard_tokens, tokens - index * shard_tokens)
            files.append(_map_file(folder / name, _dtype(vocab), count))
        digest = hashlib.sha256()
        for content in (*files, offsets):
            digest.update(content.data)
        if digest.hexdigest() != manifest.get("sha256"):
            raise _damaged(folder / _MANIFEST, "has the SHA-256 of other tokens than those beside it")
        return cls(folder, vocab, separator, shard_tokens, manifest["meta"], offsets, tuple(files))


def write_shards(
    folder: Path,
    documents_tokens: Iterable[Sequence[int] | np.ndarray],
    vocab: int,
    *,
    separator: int,
    shard_tokens: int = 2**24,
    **meta: Any,
) -> Shards:
    """Write the documents, given without separators, to `folder` and open it. `meta` must be JSON-able.

    Shards that are already there are kept if they are whole and have the same manifest (which has a digest
    of tokens and offsets), and are replaced if not. A folder with anything else in it is an error.
    """
    if not 0 <= separator < vocab or shard_tokens < 1:
        name, given = ("shard_tokens", shard_tokens) if shard_tokens < 1 else ("separator", separator)
        allowed = "at least 1" if shard_tokens < 1 else f"in 0..{vocab - 1}"
        raise DataError(setting=name, given=given, allowed=allowed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(folder)
    temporary.mkdir()
    try:
        with _StreamWriter(temporary, _dtype(vocab), shard_tokens) as writer:
            separators = np.array([separator])
            writer.add(separators)
            positions = array("q", [0])
            for tokens in _checked(documents_tokens, vocab):
                writer.add(tokens)
                writer.add(separators)
                positions.append(writer.written - 1)
        offsets = np.array(positions, dtype="<i8").tobytes()
        _write(temporary / _OFFSETS, offsets)
        writer.digest.update(offsets)
        counts = {"tokens": writer.written, "documents": len(positions) - 1, "shard_tokens": shard_tokens}
        header = {"format": _FORMAT, "version": _VERSION, "dtype": _dtype(vocab).name}
        content = {"vocab": vocab, "separator": separator, "files": writer.names, "meta": meta}
        manifest = header | counts | content | {"sha256": writer.digest.hexdigest()}
        _write(temporary / _MANIFEST, (dump_json(manifest, indent=2, error=DataError) + "\n").encode())
        sync(temporary)
        return _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def shards_in_memory(
    documents_tokens: Iterable[Sequence[int] | np.ndarray], vocab: int, *, separator: int, **meta: Any
) -> Shards:
    """The same tokens in memory alone, where no folder can be written."""
    dtype = _dtype(vocab)
    separators = np.array([separator], dtype=dtype)
    parts, positions = [separators], [0]
    for tokens in _checked(documents_tokens, vocab):
        parts += [tokens.astype(dtype), separators]
        positions.append(positions[-1] + len(tokens) + 1)
    stream = np.concatenate(parts)
    stream.flags.writeable = False
    offsets = np.array(positions, dtype="<i8")
    return Shards(None, vocab, separator, len(stream), meta, offsets, (stream,))


def _checked(documents_tokens: Iterable[Sequence[int] | np.ndarray], vocab: int) -> Iterator[np.ndarray]:
    """Every document as an array; one at least, and no token beyond the vocabulary."""
    empty = True
    for document in documents_tokens:
        tokens = np.asarray(document)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab):
            problem = f"tokens {tokens.min()} to {tokens.max()} are not within 0..{vocab - 1}"
            raise DataError(problem, setting="documents_tokens")
        empty = False
        yield tokens
    if empty:
        problem = "there are no documents to write"
        raise DataError(problem, setting="documents_tokens", remedy="give at least one")


class _StreamWriter:
    """Appends tokens to one file after another; leaving the `with` block puts the last one on disk."""

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.names: list[str] = []
        self.written = 0
        self.digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    def add(self, tokens: np.ndarray) -> None:
        while len(tokens):
            room = -self.written % self.shard_tokens
            if room == 0:
                self._close()
                self.names.append(_file_name(len(self.names)))
                self._file = (self.folder / self.names[-1]).open("xb")
                room = self.shard_tokens
            assert self._file is not None
            part, tokens = tokens[:room], tokens[room:]
            content = part.astype(self.dtype).tobytes()
            with naming(self.folder / self.names[-1]):
                self._file.write(content)
            self.digest.update(content)
            self.written += len(part)

    def __enter__(self) -> "_StreamWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with naming(self.folder / self.names[-1]):
                self._file.close()
                sync(self.folder / self.names[-1])
            self._file = None


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def _move_into_place(temporary: Path, folder: Path) -> Shards:
    """Give `temporary` the name `folder`, unless the same shards have it. Writers take turns."""
    with folder.with_name(f".{folder.name}.lock").open("wb") as lock:
        lock_file(lock.fileno(), wait=True)  # the system frees it when its holder ends, however it ends
        if _same(temporary, folder):
            return Shards.open(folder)
        if folder.exists():
            if not folder.is_dir() or not all(_OUR_FILES.fullmatch(file.name) for file in folder.iterdir()):
                problem, remedy = f"{str(folder)!r} exists and is no folder of shards", "give another folder"
                raise DataError(problem, setting="folder", given=folder, remedy=remedy)
            aside = beside(folder)
            os.rename(folder, aside)
            os.rename(temporary, folder)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(temporary, folder)
        sync(folder.parent)
        remove_abandoned(folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"))
        return Shards.open(folder)


def _same(new: Path, old: Path) -> bool:
    """Whether `old` is a whole folder of shards with the manifest of `new`."""
    try:
        Shards.open(old)
        return (new / _MANIFEST).read_bytes() == (old / _MANIFEST).read_bytes()
    except (DataError, OSError):
        return False


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove the folders of killed processes that are older than a day."""
    for left in folders:
        try:
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left)
        except OSError:
            continue  # another process removes it at the same time, or it is not ours to remove


def beside(folder: Path) -> Path:
    """A new hidden name beside a folder, for temporary content."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")


def _file_name(index: int) -> str:
    return f"tokens-{index:05d}.bin"


def _dtype(vocab: int) -> np.dtype:
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def _checked_counts(folder: Path, manifest: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """(vocab, separator, tokens, documents, shard_tokens), once they and the file names fit together."""
    keys = ("vocab", "separator", "tokens", "documents", "shard_tokens")
    values: list[Any] = [manifest.get(key) for key in keys]
    files: Any = manifest.get("files")
    if all(type(value) is int and value >= 0 for value in values):
        vocab, separator, tokens, documents, shard_tokens = values
        fits = separator < vocab and 1 <= documents < tokens and shard_tokens >= 1
        fits = fits and manifest.get("dtype") == _dtype(vocab).name and isinstance(manifest.get("meta"), dict)
        fits = fits and isinstance(files, list) and len(files) == -(-tokens // shard_tokens)
        if fits and files == [_file_name(index) for index in range(len(files))]:
            return vocab, separator, tokens, documents, shard_tokens
    raise _damaged(folder / _MANIFEST, "is damaged (entries that do not fit together)")


def _map_file(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise _damaged(path, f"has {size} bytes instead of {count * dtype.itemsize}")
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
    except OSError as error:
        raise _damaged(
            path, "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        ) from error


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"shard file {str(path)!r} {reason}", setting="path", given=path, remedy=_PREPARE_AGAIN)
