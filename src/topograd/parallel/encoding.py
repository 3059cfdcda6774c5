"""What an activation is on the wire: its own numbers, bf16, or int8 with a scale for each position.

    int8:  s = max |x| / 127 over the last dimension,   q = round(x / s),   x̂ = s q

The receiver computes on x̂, so the stages behind a boundary train on rounded activations; the stages before
it do not notice. |x - x̂| ≤ s / 2. Bytes for each number: 4 or 8 exact, 2 as bf16, 1 and 4/width as int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topograd.parallel.settings import WireKind


def encode(value: Tensor, kind: WireKind) -> Tensor:
    """The tensor that travels, contiguous."""
    if kind == "exact" or not value.is_floating_point():
        return value.contiguous()
    if kind == "bf16":
        return value.to(torch.bfloat16).contiguous()
    rows = value.float().flatten(0, -2)
    scale = rows.abs().amax(-1, keepdim=True) / 127
    numbers = (rows / scale.clamp(min=1e-30)).round().to(torch.int8)
    return torch.cat((scale.view(torch.uint8), numbers.view(torch.uint8)), dim=1)


def room(shape: tuple[int, ...], dtype: torch.dtype, kind: WireKind, device: torch.device) -> Tensor:
    """An empty tensor for what `encode` makes of such a value."""
    if kind == "exact" or not dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device)
    if kind == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return torch.empty((rows, 4 + shape[-1]), dtype=torch.uint8, device=device)


def decode(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kind: WireKind) -> Tensor:
    """The value again, rounded as `kind` says."""
    if kind == "exact" or not dtype.is_floating_point:
        return buffer
    if kind == "bf16":
        return buffer.to(dtype)
    scale = buffer[:, :4].contiguous().view(torch.float32)
    numbers = buffer[:, 4:].view(torch.int8)
    return (numbers.to(dtype) * scale.to(dtype)).view(shape)
