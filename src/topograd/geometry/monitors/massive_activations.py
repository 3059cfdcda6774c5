"""Massive activations: the few positions of a residual stream that are hundreds of times the others.

Statement. A row h of a layer's output is massive if

    max_i |h_i| > `TIMES` · median over rows of rms(h).

In trained language models these are the first position and some delimiters, from some layer on, in the same
few channels. They are a constant that attention uses as a sink, independent of the text, and they hide
everything else: the second moment is theirs, the effective rank falls to theirs, and after a norm such a row
is one fixed vector. So every reading is made twice, with them and without.

Symbols and shapes. h (..., d): rows of all positions. Cost: one pass over the activations.
Source: Sun, Chen, Kolter and Liu, "Massive Activations in Large Language Models"; the threshold is ours,
relative to the rows of the batch, so that it needs no scale of the model's.
Limits. Where more than half of the rows are massive, none is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TIMES = 100.0
"""Of the median row's rms. Gaussian rows have maxima of 3 to 5, trained channels with outliers 20 to 60."""


@dataclass(frozen=True)
class MassiveLayer:
    """The massive rows of one layer's output."""

    layer: str
    rows: int
    largest: float
    """The largest number in absolute value."""
    channel: int
    """Where it is."""


def massive_rows(hidden: Tensor) -> Tensor:
    """Which rows of (..., d) are massive: booleans, one for each row of the flattened tensor.

    >>> rows = torch.ones(5, 4)
    >>> rows[0, 2] = 1000.0
    >>> massive_rows(rows).tolist()
    [True, False, False, False, False]
    """
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    typical = rows.square().mean(-1).sqrt().median()
    return rows.abs().amax(-1) > TIMES * typical


def massive_layer(name: str, hidden: Tensor, mask: Tensor) -> MassiveLayer | None:
    """The massive rows of one batch at a layer; None where there are none."""
    if not mask.any():
        return None
    most = hidden.detach().reshape(-1, hidden.shape[-1])[mask].abs().amax(0)
    return MassiveLayer(name, int(mask.sum()), float(most.max()), int(most.argmax()))


def together(one: MassiveLayer | None, other: MassiveLayer | None) -> MassiveLayer | None:
    """Both batches as one."""
    if one is None or other is None:
        return one or other
    more = max(one, other, key=lambda layer: layer.largest)
    return MassiveLayer(one.layer, one.rows + other.rows, more.largest, more.channel)
