"""What calibration reads from the logits of every stage, token by token.

    z_k                (n, vocab) logits of predicting stage k = 0..K-1, on teacher-forced tokens
    top_k              argmax_j z_{k,j}
    margin_k           z_{k,top_k} - max_{j ≠ top_k} z_{k,j}
    shift_k            max_j |z_{k+1,j} - z_{k,j}|                  "Product of Experts" §5.3
    gain_k             max_j D_j - D_{top_k},  D = z_{K-1} - z_k    the rival gain

The rival gain decides: for j ≠ top_k,

    z_{K-1,top_k} - z_{K-1,j} = (z_{k,top_k} - z_{k,j}) + D_{top_k} - D_j >= margin_k - gain_k,

so margin_k > gain_k means that the last stage has the same argmax. This is a fact about a token whose last
logits are known. A rule that must decide before has only a bound on the gain: see `depth.wand`.

Cost: O(K n vocab), with two tensors of (n, vocab) at a time; the caller chunks. Arithmetic is that of the
logits' dtype. Stored numbers are float32, on the CPU; rounding keeps order, so margin > gain stays sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from topograd.errors import ConfigError

_COLUMNS = ("top", "margin", "shift", "gain", "sequence")


@dataclass(frozen=True, eq=False)
class Readings:
    """Per-token CPU tensors of n tokens and K predicting stages."""

    top: Tensor
    """(K, n) long: each stage's most likely token."""
    margin: Tensor
    """(K, n): largest logit minus the second largest."""
    shift: Tensor
    """(K-1, n): the largest change of a logit from stage k to k+1."""
    gain: Tensor
    """(K-1, n): by how much the last stage moves some rival closer to stage k's top token; never negative."""
    sequence: Tensor
    """(n,) long: the row of text that a token came from, tokens in order."""

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def stages(self) -> int:
        """K, the number of predicting stages."""
        return len(self.top)

    def split(self) -> tuple[Readings, Readings]:
        """The even and the odd sequences: to calibrate on one half and to measure on the other."""
        even = self.sequence % 2 == 0
        return self.take(even), self.take(~even)

    def take(self, tokens: Tensor) -> Readings:
        """Some tokens, chosen by a mask (n,) or by indices."""
        return Readings(*(getattr(self, name)[..., tokens] for name in _COLUMNS))


@torch.no_grad()
def read(logits: Sequence[Tensor], sequence: Tensor) -> Readings:
    """The readings of K logits (n, vocab); `sequence` (n,) says which row of text each token is of."""
    last = logits[-1]
    if last.shape[-1] < 2:
        raise ConfigError(
            f"a vocabulary of {last.shape[-1]} has no rival to read", remedy="give at least 2 tokens"
        )
    tops = [z.argmax(-1) for z in logits]
    margins = [(best := z.topk(2).values)[:, 0] - best[:, 1] for z in logits]
    shifts = [(b - a).abs().amax(-1) for a, b in pairwise(logits)]
    gains = [_rival_gain(last - z, top) for z, top in zip(logits[:-1], tops[:-1], strict=True)]
    return Readings(
        torch.stack(tops).cpu(),
        torch.stack(margins).float().cpu(),
        _rows(shifts, len(last)),
        _rows(gains, len(last)),
        sequence.long().cpu(),
    )


def join(parts: Sequence[Readings]) -> Readings:
    """The readings of all chunks as one, in the order given."""
    stages = sorted({part.stages for part in parts})
    if len(stages) != 1:
        raise ConfigError(
            f"readings of {stages or 'no'} stages cannot be joined", remedy="give chunks of one model"
        )
    return Readings(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in _COLUMNS))


def _rival_gain(change: Tensor, top: Tensor) -> Tensor:
    return change.amax(-1) - change.gather(-1, top[:, None]).squeeze(-1)


def _rows(rows: list[Tensor], tokens: int) -> Tensor:
    """(K-1, n) float32 on the CPU, also where K = 1 leaves no row."""
    return torch.stack(rows).float().cpu() if rows else torch.empty(0, tokens)
