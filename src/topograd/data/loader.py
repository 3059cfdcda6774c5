"""Loaders: endless, deterministic sequences of batches that can resume anywhere.

Epoch e shuffles the rows with a generator seeded by (seed, e); of text it packs the corpus anew first. A
batch is the next `batch` rows; it may begin in one epoch and end in the next. The position is the epoch and
the index of the row: after `seek` to it, the batches are the same.

Cost. A batch copies its tokens out of the shards, some microseconds for each segment. The first batch of an
epoch also packs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from topograd.data.packing import Rows, pack
from topograd.data.shards import Shards
from topograd.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The target of a position that has none; torch's cross-entropy leaves it out by default."""
T = TypeVar("T")


class EpochLoader(Iterator[T], ABC):
    """Batches of rows; every epoch has each row once, in an order of (seed, epoch)."""

    def __init__(self, batch: int, seed: int) -> None:
        for name, given, least in (("batch", batch, 1), ("seed", seed, 0)):
            if given < least:
                raise ConfigError(setting=name, given=given, allowed=f"at least {least}")
        self.batch, self.seed = batch, seed
        self.seek({"epoch": 0, "row": 0})

    @abstractmethod
    def _draw(self, generator: np.random.Generator) -> Sized:
        """The rows of an epoch."""

    @property
    def position(self) -> dict[str, int]:
        """The start of the next batch; JSON-able."""
        return {"epoch": self._epoch, "row": self._row}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a `position`, of this loader or of one with the same rows and settings."""
        epoch: Any = position.get("epoch")
        row: Any = position.get("row")
        known = type(epoch) is int and type(row) is int and epoch >= 0 <= row
        if known:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            drawn = self._draw(generator)
            order = generator.permutation(len(drawn))
        if not known or row > len(order):
            allowed = "an epoch and a row" + (f" of {len(order)}" if known else ", as {'epoch': 0, 'row': 0}")
            raise DataError(setting="position", given=dict(position), allowed=allowed)
        self._epoch, self._row, self._drawn, self._order = epoch, row, drawn, order

    def _next_rows(self) -> Iterator[int]:
        """The rows of the next batch, one by one: an epoch may end between them."""
        for _ in range(self.batch):
            if self._row == len(self._order):
                self.seek({"epoch": self._epoch + 1, "row": 0})
            self._row += 1
            yield int(self._order[self._row - 1])


class Loader(EpochLoader["tuple[Tensor, Tensor]"]):
    """Batches (inputs, targets), int64 of shape (batch, context)."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int) -> None:
        if context < 1:
            raise ConfigError(setting="context", given=context, allowed="at least 1")
        if shards.tokens - 1 < context and shards.learned is None:  # a few conversations are padded
            problem = (
                f"the training text has {shards.tokens} tokens, too short for one sequence of {context + 1}"
            )
            remedy = "give more text or a shorter context"
            raise DataError(problem, setting="context", given=context, remedy=remedy)
        self.shards, self.context = shards, context
        super().__init__(batch, seed)

    _drawn: Rows

    def _draw(self, generator: np.random.Generator) -> Rows:
        return pack(self.shards.offsets, self.context + 1, generator)

    @property
    def rows(self) -> int:
        """The number of sequences of the current epoch."""
        return len(self._drawn)

    @property
    def padded_share(self) -> float:
        """The share of positions of the current epoch that are padding."""
        return self._drawn.padded_share

    def __next__(self) -> tuple[Tensor, Tensor]:
        inputs = np.full((self.batch, self.context), self.shards.separator, dtype=np.int64)
        targets = np.full((self.batch, self.context), IGNORED, dtype=np.int64)
        for index, row in enumerate(self._next_rows()):
            self._fill(row, inputs[index], targets[index])
        import torch

        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _fill(self, row: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        packed = self._drawn
        column = 0
        for segment in range(packed.first[row], packed.first[row + 1]):
            start, count = int(packed.starts[segment]), int(packed.counts[segment])
            tokens = self.shards.slice(start, start + count + 1)
            inputs[column : column + count] = tokens[:-1]
            targets[column : column + count] = tokens[1:]
            if self.shards.learned is not None:
                hidden = ~self.shards.learned[start + 1 : start + count + 1]
                targets[column : column + count][hidden] = IGNORED
            column += count
