"""What attention layers share: rotary positions, and who may see whom.

Positions have shape (time,) where all rows of a batch are equally long, and (batch, time) where they are not.
A query at position p sees the slots 0..p of its row, or the last `window` of them. Slots beyond a row's own
length may hold anything: no query of that row sees them, and whoever comes to such a position overwrites it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (x_i, x_{i + half}) of each head by their position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def attention_mask(positions: Tensor, total: int, window: int = 0) -> Tensor | None:
    """Which of `total` slots each query may see; None where plain causality, or nothing, says it all.

    (time, total) for equally long rows, whose queries are the last slots; else (batch, 1, time, total).
    """
    time = positions.shape[-1]
    windowed = 0 < window < total
    if positions.dim() == 1 and not windowed and time in (1, total):
        return None
    if positions.dim() == 1:
        positions = torch.arange(total - time, total, device=positions.device)
    else:
        positions = positions[:, None]
    behind = positions[..., None] - torch.arange(total, device=positions.device)
    allowed = behind >= 0
    return allowed & (behind < window) if windowed else allowed
