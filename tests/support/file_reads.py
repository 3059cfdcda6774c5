"""Which files are opened, by whatever means: what Python's audit hooks tell."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_listening: list[tuple[str, list[str]]] = []
"""Folders that are watched, each with the names of the files that were opened below it."""


def _hear(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and _listening and isinstance(args[0], str | os.PathLike):
        for folder, found in _listening:
            path = os.path.abspath(args[0])
            if path.startswith(folder):
                found.append(os.path.relpath(path, folder))


sys.addaudithook(_hear)  # there is no way to remove one; it does nothing while nobody listens


@contextmanager
def opened_below(folder: Path) -> Iterator[list[str]]:
    """The files below `folder` that are opened meanwhile, in order."""
    listener: tuple[str, list[str]] = (str(folder.resolve()) + os.sep, [])
    _listening.append(listener)
    try:
        yield listener[1]
    finally:
        _listening.remove(listener)
