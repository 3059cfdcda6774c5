"""A context manager for module hooks: registered on entry, removed on exit."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from torch.utils.hooks import RemovableHandle


class ModelHooks(ABC):
    """Hooks on a model for as long as the context is entered."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _attach(self) -> list[RemovableHandle]:
        """Register the hooks."""

    def __enter__(self) -> Self:
        self._handles += self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
