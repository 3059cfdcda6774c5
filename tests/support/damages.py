"""Faults of files, and how a use of what is damaged may end."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from topograd.errors import TopogradError


def outcome(use: Callable[[], Any], expected: Any) -> str:
    """How a use of something damaged ended: "refused" or "unchanged"; anything else fails."""
    try:
        result = use()
    except (TopogradError, OSError) as error:
        message = str(error)
    else:
        assert result == expected, "silently different"
        return "unchanged"
    assert message
    assert "\n" not in message, message
    return "refused"


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder, by its relative path, in a fixed order."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return [path.relative_to(folder) for path in found]


Fault = tuple[str, Callable[[Path], object]]


def faults(content: bytes, chance: random.Random, flips: int) -> Iterator[Fault]:
    """Ways to damage a file of this content: a name, and what is done to the file."""
    yield "gone", Path.unlink
    yield "endless", _endless
    yield "pipe", _pipe
    yield "empty", _written(b"")
    yield "garbage", _written(chance.randbytes(max(1, min(len(content), 4096))))
    yield "cut", _written(content[: chance.randrange(len(content))] if content else b"")
    yield "longer", _written(content + chance.randbytes(8))
    for _ in range(flips if content else 0):
        place = chance.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << chance.randrange(8))])
        yield "flip", _written(content[:place] + flipped + content[place + 1 :])


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)
