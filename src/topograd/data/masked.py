"""Text with hidden tokens: a share of them is replaced by the mask, and they are what is predicted.

Shapes: inputs and targets (rows, time), targets `IGNORED` where nothing is hidden. A batch's hidden places
follow from the seed and its place in the text alone, so that a run can be continued exactly, on any ranks.
Source: "BERT" (Devlin et al. 2018) §3.1 with its 15 %; every hidden token becomes the mask.
"""

import numpy as np
import torch
from torch import Tensor

from topograd.data.loader import IGNORED, Loader
from topograd.data.shards import Shards

HIDDEN = 0.15
"""The share of the tokens that is hidden."""


def hide(
    inputs: Tensor, token: int, generator: torch.Generator, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs with a share of `HIDDEN` replaced by `token`, and what stood there; at least one in a row.

    Where `allowed` is False nothing is hidden, as in padding; a row without any that is has nothing hidden.
    """
    drawn = torch.rand(inputs.shape, generator=generator)
    if allowed is not None:
        drawn = drawn.masked_fill(~allowed, 2.0)
    least = drawn.min(dim=1, keepdim=True).values
    hidden = (drawn < HIDDEN) | ((drawn == least) & (drawn < 2.0))
    return inputs.masked_fill(hidden, token), inputs.masked_fill(~hidden, IGNORED)


class MaskedLoader(Loader):
    """The batches of a loader with hidden tokens."""

    def __init__(self, shards: Shards, context: int, batch: int, seed: int, mask: int) -> None:
        super().__init__(shards, context, batch, seed)
        self.mask = mask

    def __next__(self) -> tuple[Tensor, Tensor]:
        place = np.random.SeedSequence([self.seed, *self.position.values()])
        inputs, targets = super().__next__()
        generator = torch.Generator().manual_seed(int(place.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        return hide(inputs, self.mask, generator, targets != IGNORED)
