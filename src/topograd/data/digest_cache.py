"""The SHA-256 of large files, computed once and remembered as long as the file is the same.

    CACHE/hashes/KEY.json     KEY of the file's path: device, inode, size, times of content and inode, SHA-256

A file counts as the same while all of these are what they were when it was hashed. Whoever changes a byte
changes the time of the content, and whoever sets that back changes the time of the inode, which no call sets
(on Windows it is the time of creation, so that there only the first is watched). A clock ticks coarsely: a
file that was touched within the last SETTLED seconds is hashed, and not remembered yet. What this cannot see
is a disk that loses bits by itself: `forget` or an empty cache brings the full check back.

Cost: a stat and a small file instead of reading everything; SHA-256 takes about a second for a gigabyte.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from topograd.data.cache import default_cache
from topograd.errors import DataError
from topograd.files import read_json, sha256, write_json

MOST = 256
"""Files that are remembered; those that were hashed longest ago are forgotten first."""
SETTLED = 2.0


def remembered_sha256(path: Path) -> str:
    """The SHA-256 of a file, read from the cache where the file has not changed since."""
    before = _identity(path)
    entry = _entry(path)
    if entry is not None and (found := _known(entry, before)) is not None:
        return found
    digest = sha256(path)
    settled = time.time() - max(before["content"], before["inode_time"]) / 1e9 > SETTLED
    if entry is not None and settled and _identity(path) == before:
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_json(entry, {**before, "sha256": digest})
            _prune(entry.parent)
    return digest


def forget(path: Path) -> None:
    """Hash a file anew the next time."""
    entry = _entry(path)
    if entry is not None:
        with contextlib.suppress(OSError):
            entry.unlink()


def _identity(path: Path) -> dict[str, Any]:
    found = os.stat(path)
    return {
        "path": str(path.absolute()),
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "content": found.st_mtime_ns,
        "inode_time": found.st_ctime_ns,
    }


def _entry(path: Path) -> Path | None:
    try:
        folder = default_cache() / "hashes"
    except DataError:  # there is no home directory
        return None
    return folder / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:24]}.json"


def _known(entry: Path, identity: dict[str, Any]) -> str | None:
    with contextlib.suppress(DataError):  # a cache that cannot be read only costs time
        kept = read_json(entry, DataError)
        digest = kept.pop("sha256", None) if isinstance(kept, dict) else None
        if kept == identity and isinstance(digest, str):
            return digest
    return None


def _prune(folder: Path) -> None:
    entries = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime)
    for entry in entries[:-MOST]:
        with contextlib.suppress(OSError):
            entry.unlink()
