"""The cache of prepared corpora: locks of entries in use, and pruning.

An entry is a folder CACHE/shards/KEY, KEY 24 hexadecimal digits. The time of an entry's folder is when it was
last used. A process that uses it holds a shared lock on the folder; pruning takes an exclusive one first,
and skips the entry if it cannot. So entries in use stay, however old, and a lock never outlives its process.

    most        MAX_ENTRIES entries of MAX_BYTES together, MAX_TOKENIZERS tokenizers

Every preparation prunes, the least recently used entries first. Nothing but entries is ever removed. On
Windows there are no shared locks, but files that are mapped cannot be removed there.
"""

import contextlib
import logging
import os
import re
import shutil
import weakref
from pathlib import Path

from topograd.data.shards import beside, remove_abandoned
from topograd.errors import DataError
from topograd.files import lock_file

MAX_ENTRIES = 32
MAX_BYTES = 2**33
MAX_TOKENIZERS = 128
_KEY = re.compile(r"[0-9a-f]{24}")


def default_cache() -> Path:
    """$XDG_CACHE_HOME/topograd, or ~/.cache/topograd if that variable is not an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "topograd"
    try:
        return Path.home() / ".cache" / "topograd"
    except RuntimeError as error:
        problem = "there is no home directory for the cache"
        raise DataError(problem, setting="XDG_CACHE_HOME", remedy="set XDG_CACHE_HOME") from error


def warn_unusable(cache: Path, problem: OSError) -> None:
    """One line on stderr: the work continues without a cache."""
    reason = problem.strerror or problem
    logging.getLogger("topograd").warning(
        "topograd: the cache %s cannot be written (%s); continuing without it", cache, reason
    )


class InUse:
    """Keeps an entry from being pruned while this object lives, and notes that it was used now.

    The folder is made if it is not there. Where that cannot be, nothing is held: there is nothing to prune.
    """

    def __init__(self, entry: Path) -> None:
        with contextlib.suppress(OSError):
            descriptor = _hold(entry)
            weakref.finalize(self, os.close, descriptor)
        with contextlib.suppress(OSError):  # a cache that is read-only keeps its times
            os.utime(entry)


def _hold(entry: Path) -> int:
    """A descriptor of the entry's folder with a shared lock; it is still the folder of that name."""
    while True:
        entry.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            lock_file(descriptor, shared=True, wait=True)
            if os.path.samestat(os.fstat(descriptor), os.stat(entry)):
                return descriptor
        except FileNotFoundError:
            pass  # pruned while this process waited: once more
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def prune(cache: Path) -> None:
    """Remove prepared corpora and tokenizers until the rest is within the limits."""
    prune_entries(cache / "shards", MAX_ENTRIES, MAX_BYTES)
    prune_files(cache / "tokenizers", MAX_TOKENIZERS)
    remove_abandoned((cache / "shards").glob(".*.tmp"))


def prune_files(folder: Path, most: int) -> None:
    """Remove the files of entries that were not used lately, but for the newest."""
    for file in _newest_first(folder)[most:]:
        with contextlib.suppress(OSError):
            file.unlink()


def prune_entries(folder: Path, max_entries: int, max_bytes: int) -> None:
    """Remove entries that are not in use, the least recently used first, until the rest is within limits."""
    count = total = 0
    for entry in _newest_first(folder):
        size = _size(entry)
        too_many = count + 1 > max_entries or total + size > max_bytes
        if too_many and _remove(entry):
            continue
        count, total = count + 1, total + size


def cache_size(cache: Path) -> tuple[int, int]:
    """(entries, bytes) of the cache; (0, 0) where there is none."""
    entries = _newest_first(cache / "shards")
    return len(entries), sum(map(_size, (*entries, *_newest_first(cache / "tokenizers"))))


def _newest_first(folder: Path) -> list[Path]:
    entries = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _KEY.fullmatch(path.stem):
                with contextlib.suppress(OSError):  # another process has just removed it
                    entries.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(entries, reverse=True)]


def _size(path: Path) -> int:
    """The bytes of a file, or of all files below a folder; what vanishes meanwhile does not count."""
    files = (
        [path] if path.is_file() else [Path(folder, n) for folder, _, names in os.walk(path) for n in names]
    )
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return total


def _remove(entry: Path) -> bool:
    """Remove an entry that is not in use; False if it is."""
    try:
        descriptor = os.open(entry, os.O_RDONLY) if os.name == "posix" else None
    except OSError:
        return False
    try:
        if descriptor is not None and not lock_file(descriptor):
            return False
        aside = beside(entry)
        os.rename(entry, aside)
        shutil.rmtree(aside, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
