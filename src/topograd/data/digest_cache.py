"""A cache of SHA-256 digests of large files.

    CACHE/hashes/KEY.json     KEY of the file's path: device, inode, size, times of content and inode, SHA-256

A file counts as unchanged while all of these are what they were when it was hashed. A write changes the time
of the content; setting that back changes the time of the inode, which no call sets (on Windows it is the time
of creation, so only the first is checked there). Clocks are coarse: a file that changed within the last
SETTLED seconds is hashed, and not cached yet. Bits that a disk loses are not seen: `forget` or an empty cache
forces the full check.

Cost: a stat and a small file instead of reading everything; SHA-256 takes about a second for a gigabyte.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from topograd.data.cache import default_cache, prune_files
from topograd.errors import DataError
from topograd.files import read_json, sha256, write_json

MAX_ENTRIES = 256
"""Cached digests; the oldest are dropped first."""
SETTLED = 2.0


def remembered_sha256(path: Path) -> str:
    """The SHA-256 of a file, read from the cache where the file has not changed since."""
    before = _identity(path)
    entry = _entry(path)
    if entry is not None and (known := _known(entry, before)) is not None:
        return known
    digest = sha256(path)
    settled = time.time() - max(before["content"], before["inode_time"]) / 1e9 > SETTLED
    if entry is not None and settled and _identity(path) == before:
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_json(entry, {**before, "sha256": digest})
            prune_files(entry.parent, MAX_ENTRIES)
    return digest


def forget(path: Path) -> None:
    """Hash a file anew the next time."""
    entry = _entry(path)
    if entry is not None:
        with contextlib.suppress(OSError):
            entry.unlink()


def _identity(path: Path) -> dict[str, Any]:
    status = os.stat(path)
    return {
        "path": str(path.absolute()),
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "content": status.st_mtime_ns,
        "inode_time": status.st_ctime_ns,
    }


def _entry(path: Path) -> Path | None:
    try:
        folder = default_cache() / "hashes"
    except DataError:  # there is no home directory
        return None
    return folder / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:24]}.json"


def _known(entry: Path, identity: dict[str, Any]) -> str | None:
    with contextlib.suppress(DataError):  # a cache that cannot be read only costs time
        cached = read_json(entry, DataError)
        digest = cached.pop("sha256", None) if isinstance(cached, dict) else None
        if cached == identity and isinstance(digest, str):
            return digest
    return None
