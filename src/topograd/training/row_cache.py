"""Rows of tensors that are computed once: safetensors shards in a folder, keyed, resumable, verified.

    cache.json                format, version, what is kept, of what (key), rows of a shard, SHA-256 of each
    shard-00000.safetensors   tensors by name; their first dimension are rows

A shard is written whole and then noted, so a kill loses the one that is being computed, and the next call
continues after the last that is intact. Rows of another key raise RunError, and so does a complete cache with
one changed bit. What is read is memory-mapped. Cost: opening hashes the shards, about a second a gigabyte.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from topograd.errors import RunError
from topograd.files import hold_lock, read_json, sha256, write_atomic, write_json

FORMAT, VERSION, NAME = "topograd-rows", 1, "cache.json"


@dataclass(frozen=True, eq=False)
class RowCache:
    """A complete cache."""

    folder: Path
    key: Mapping[str, Any]
    """What the rows are of; `rows` in it is how many there are."""
    shard_rows: int
    shards: Sequence[Mapping[str, Tensor]]

    def __len__(self) -> int:
        return int(self.key["rows"])

    def take(self, rows: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Some rows of every tensor."""
        picked = [divmod(int(row), self.shard_rows) for row in rows]
        return {name: torch.stack([self.shards[i][name][k] for i, k in picked]) for name in self.shards[0]}


def cached_rows(
    folder: Path,
    what: str,
    key: Mapping[str, Any],
    shard_rows: int,
    make: Callable[[range], dict[str, Tensor]],
) -> RowCache:
    """The cache in `folder`: opened if complete, continued if begun, else made, `make(rows)` by shard."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).is_file() and _complete(_table(folder, what, key)):
        return open_rows(folder, what, key)
    with hold_lock(folder / "lock"):
        table = _begun(folder, what, key, shard_rows)
        size, digests, rows = table["shard_rows"], table["sha256"], key["rows"]
        for number in range(len(digests), math.ceil(rows / size)):
            content = save(make(range(number * size, min((number + 1) * size, rows))))
            write_atomic(folder / _file(number), content)
            digests.append(hashlib.sha256(content).hexdigest())
            write_json(folder / NAME, table)
    return open_rows(folder, what, key)


def open_rows(folder: Path, what: str, key: Mapping[str, Any] | None = None) -> RowCache:
    """What `cached_rows` made, verified; RunError where its key is not `key`."""
    table = _table(folder, what, key)
    digests = table["sha256"]
    if not _complete(table):
        raise RunError(f"{folder} is not complete", remedy="compute it again: it goes on where it was")
    for number, digest in enumerate(digests):
        if not _intact(folder / _file(number), digest):
            raise RunError(
                f"{folder / _file(number)} is damaged or missing",
                remedy=f"delete {folder}, and it is made again",
            )
    shards = [load_file(folder / _file(number)) for number in range(len(digests))]
    return RowCache(folder, table["key"], table["shard_rows"], shards)


def _begun(folder: Path, what: str, key: Mapping[str, Any], shard_rows: int) -> dict[str, Any]:
    """What is there already, up to the first shard that is damaged."""
    if not (folder / NAME).is_file():
        foreign = [path.name for path in folder.iterdir() if not _own(path)]
        if foreign:
            raise RunError(
                f"{folder} holds {min(foreign)!r} and no {what}", remedy="give another folder, or delete it"
            )
        about = {"format": FORMAT, "version": VERSION, "what": what, "key": dict(key)}
        return {**about, "shard_rows": shard_rows, "sha256": []}
    table = _table(folder, what, key)
    noted = enumerate(table["sha256"])
    intact = takewhile(lambda each: _intact(folder / _file(each[0]), each[1]), noted)
    return table | {"sha256": [digest for _, digest in intact]}


def _complete(table: Mapping[str, Any]) -> bool:
    return bool(len(table["sha256"]) * table["shard_rows"] >= table["key"]["rows"])


def _table(folder: Path, what: str, key: Mapping[str, Any] | None) -> dict[str, Any]:
    table = read_json(folder / NAME, RunError)
    about = {"format": FORMAT, "version": VERSION, "what": what}
    if not isinstance(table, dict) or any(table.get(name) != value for name, value in about.items()):
        raise RunError(
            f"{folder / NAME} does not describe {what} of this version", remedy="delete the folder"
        )
    for name, wanted in (key or {}).items():
        if (saved := table["key"].get(name)) != wanted:
            raise RunError(
                f"{folder} holds {what} of another {name} ({saved}, wanted {wanted})",
                setting=name,
                given=wanted,
                remedy="give another folder, or delete it",
            )
    return table


def _intact(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


def _own(path: Path) -> bool:
    return path.name == "lock" or path.suffix == ".tmp" or path.match("shard-*.safetensors")


def _file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
