"""Files that are either there or not: written under a temporary name, flushed to disk, then renamed."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Make `path` hold `content`. A kill at any moment leaves the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Create `path` with `content` and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
