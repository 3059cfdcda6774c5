"""Batches of pictures: an endless, deterministic sequence that can be continued from any place.

Epoch e is a permutation drawn with a generator seeded by (seed, e). A batch may begin in one epoch and end in
the next. The position, epoch and row, says all, as `data/loader.py`'s does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topograd.data.images import ImageSet
from topograd.errors import ConfigError, DataError


class ImageLoader(Iterator[tuple[Tensor, Tensor]]):
    """Batches (images, labels): uint8 (batch, channels, height, width) and int64 (batch,)."""

    def __init__(self, pictures: ImageSet, batch: int, seed: int) -> None:
        if batch < 1 or seed < 0:
            raise ConfigError(f"batch {batch} must be at least 1, seed {seed} at least 0")
        if not len(pictures):
            raise DataError("there is no picture to learn from", remedy="give at least one")
        self.pictures, self.batch, self.seed = pictures, batch, seed
        self.seek({"epoch": 0, "row": 0})

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch starts; JSON-able."""
        return {"epoch": self._epoch, "row": self._row}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a `position` of a loader with the same pictures and settings."""
        epoch, row = position.get("epoch"), position.get("row")
        if type(epoch) is not int or type(row) is not int or epoch < 0 or not 0 <= row <= len(self.pictures):
            raise DataError(
                f"loader position {position!r} is not of the form {{'epoch': 0, 'row': 0}} with at most "
                f"{len(self.pictures)} rows"
            )
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        self._order = torch.from_numpy(generator.permutation(len(self.pictures)))
        self._epoch, self._row = epoch, row

    def __next__(self) -> tuple[Tensor, Tensor]:
        rows: list[Tensor] = []
        wanted = self.batch
        while wanted:
            if self._row == len(self.pictures):
                self.seek({"epoch": self._epoch + 1, "row": 0})
            some = self._order[self._row : self._row + wanted]
            rows.append(some)
            self._row += len(some)
            wanted -= len(some)
        chosen = self.pictures.chosen(torch.cat(rows))
        return chosen.images, chosen.labels
