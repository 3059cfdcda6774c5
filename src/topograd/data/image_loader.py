"""The image loader: an endless, deterministic sequence of batches that can resume anywhere.

Epoch e is a permutation drawn with a generator seeded by (seed, e). A batch may begin in one epoch and end in
the next. Its position is the epoch and the index within it, as in `data/loader.py`.
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

    def __init__(self, images: ImageSet, batch: int, seed: int) -> None:
        if batch < 1 or seed < 0:
            name, given, least = ("batch", batch, 1) if batch < 1 else ("seed", seed, 0)
            raise ConfigError(setting=name, given=given, allowed=f"at least {least}")
        if not len(images):
            raise DataError("there is no image to train on", setting="images", remedy="give at least one")
        self.images, self.batch, self.seed = images, batch, seed
        self.seek({"epoch": 0, "row": 0})

    @property
    def position(self) -> dict[str, int]:
        """The start of the next batch; JSON-able."""
        return {"epoch": self._epoch, "row": self._row}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from a `position` of a loader with the same images and settings."""
        epoch, row = position.get("epoch"), position.get("row")
        if type(epoch) is not int or type(row) is not int or epoch < 0 or not 0 <= row <= len(self.images):
            raise DataError(
                f"loader position {position!r} is not of the form {{'epoch': 0, 'row': 0}} with at most "
                f"{len(self.images)} rows",
                setting="position",
                given=position,
            )
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        self._order = torch.from_numpy(generator.permutation(len(self.images)))
        self._epoch, self._row = epoch, row

    def __next__(self) -> tuple[Tensor, Tensor]:
        indices: list[Tensor] = []
        missing = self.batch
        while missing:
            if self._row == len(self.images):
                self.seek({"epoch": self._epoch + 1, "row": 0})
            some = self._order[self._row : self._row + missing]
            indices.append(some)
            self._row += len(some)
            missing -= len(some)
        chosen = self.images.chosen(torch.cat(indices))
        return chosen.images, chosen.labels
