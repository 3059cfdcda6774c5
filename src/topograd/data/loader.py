"""The text loader: an endless, deterministic sequence of batches that can resume anywhere.

Epoch e packs the corpus anew and shuffles the sequences, both with a generator seeded by (seed, e). A batch
is the next `batch` sequences; it may begin in one epoch and end in the next. The position is the epoch and
the index of the sequence: after `seek` to it, the batches are the same.

Cost. A batch copies its tokens out of the shards, some microseconds for each segment. The first batch of an
epoch also packs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from topograd.data.packing import Rows, pack
from topograd.data.shards import Shards
from topograd.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The target of a position that has none; torch's cross-entropy leaves it out by default."""


class Loader(Iterator["tuple[Tensor, Tensor]"]):
    """Batches (inputs, targets), int64 of shape (batch, context)."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int) -> None:
        if context < 1 or batch < 1 or seed < 0:
            bounds = (("context", context, 1), ("batch", batch, 1), ("seed", seed, 0))
            name, given, least = next(bound for bound in bounds if bound[1] < bound[2])
            raise ConfigError(setting=name, given=given, allowed=f"at least {least}")
        if shards.tokens - 1 < context and shards.learned is None:  # a few conversations are padded
            problem = (
                f"the training text has {shards.tokens} tokens, too short for one sequence of {context + 1}"
            )
            remedy = "give more text or a shorter context"
            raise DataError(problem, setting="context", given=context, remedy=remedy)
        self.shards, self.context, self.batch, self.seed = shards, context, batch, seed
        self._start_epoch(0)

    @property
    def position(self) -> dict[str, int]:
        """The start of the next batch; JSON-able."""
        return {"epoch": self._epoch, "row": self._row}

    @property
    def rows(self) -> int:
        """The number of sequences of the current epoch."""
        return len(self._packed)

    @property
    def padded_share(self) -> float:
        """The share of positions of the current epoch that are padding."""
        return self._packed.padded_share

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a `position`, of this loader or of one with the same shards and settings."""
        epoch, row = position.get("epoch"), position.get("row")
        if type(epoch) is not int or type(row) is not int or epoch < 0 or row < 0:
            problem = f"loader position {position!r} is not of the form {{'epoch': 0, 'row': 0}}"
            raise DataError(problem, setting="position", given=position)
        packed, order = _shuffled_epoch(self.shards, self.context, self.seed, epoch)
        if row > len(packed):
            problem = f"loader position {position!r} lies behind the last of {len(packed)} sequences"
            raise DataError(problem, setting="position", given=position)
        self._epoch, self._row, self._packed, self._order = epoch, row, packed, order

    def __next__(self) -> tuple[Tensor, Tensor]:
        inputs = np.full((self.batch, self.context), self.shards.separator, dtype=np.int64)
        targets = np.full((self.batch, self.context), IGNORED, dtype=np.int64)
        for index in range(self.batch):
            if self._row == self.rows:
                self._start_epoch(self._epoch + 1)
            self._fill(self._order[self._row], inputs[index], targets[index])
            self._row += 1
        import torch

        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _start_epoch(self, epoch: int) -> None:
        self._packed, self._order = _shuffled_epoch(self.shards, self.context, self.seed, epoch)
        self._epoch, self._row = epoch, 0

    def _fill(self, row: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        packed = self._packed
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


def _shuffled_epoch(shards: Shards, context: int, seed: int, epoch: int) -> tuple[Rows, np.ndarray]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    packed = pack(shards.offsets, context + 1, generator)
    return packed, generator.permutation(len(packed))
