"""Faults of files, and how a use of what is damaged may end."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

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


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """One hash of all tensors, in the order of their names."""
    content = b"".join(tensors[name].detach().contiguous().numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(content).hexdigest()


def damage(
    folder: Path,
    use: Callable[[Path], Any],
    kind: str,
    count: Callable[[str, str], None],
    flips: int,
    place: Path,
    files: Sequence[Path] | None = None,
) -> None:
    """Every fault of every file of a folder, or of some, each on a fresh copy."""
    chance, copy = random.Random(kind), place / "copy"

    def fresh() -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(folder, copy, symlinks=True))

    expected = use(fresh())
    for file in files_of(folder) if files is None else files:
        for name, harm in faults((folder / file).read_bytes(), chance, flips):
            harm(fresh() / file)
            try:
                count(f"{kind}, {name}", outcome(lambda: use(copy), expected))
            except BaseException as error:
                raise AssertionError(f"{file}, {name}: {type(error).__name__}: {error}") from error
