"""What watches a model only while it is entered: hooks go in at the door and out again, come what may."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from torch.utils.hooks import RemovableHandle


class Watching(ABC):
    """A context manager around hooks."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _attach(self) -> list[RemovableHandle]:
        """Put the hooks in."""

    def __enter__(self) -> Self:
        self._handles += self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
