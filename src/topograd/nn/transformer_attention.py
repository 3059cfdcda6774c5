"""What a transformer and its decoding form share: rotary frequencies, masks, capped attention.

The frequencies of a head of width d are θ^(-2i/d), "RoFormer" (Su et al. 2021), or, stretched for a longer
context: divided by a factor ("linear"), or only where a wavelength 2π/ω is long against the context that the
model first learned with, in between by interpolation ("llama3"). They are rounded to float32, as they were
when the model learned, whatever the precision of the stack.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.attention import attention_mask
from topograd.nn.stack import Bus
from topograd.nn.transformer_config import TransformerConfig


def rope_frequencies(config: TransformerConfig, local: bool = False) -> Tensor:
    """ω (head width / 2,) in float32, on the CPU; `local` for the layers with a window."""
    width = config.head_width
    base = config.rope_base
    if local and config.local_rope_base is not None:
        base = config.local_rope_base
    plain = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))
    if config.rope_scaling == "none" or (local and config.local_rope_base is not None):
        return plain
    if config.rope_scaling == "linear":
        return plain / config.rope_factor
    low, high, context = config.rope_low_factor, config.rope_high_factor, config.rope_original_context
    length = 2 * math.pi / plain
    stretched = torch.where(length > context / low, plain / config.rope_factor, plain)
    share = (context / length - low) / (high - low)
    between = (1 - share) * stretched / config.rope_factor + share * stretched
    return torch.where((length >= context / high) & (length <= context / low), between, stretched)


def rotary_tables(frequencies: Tensor, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (time, head width) of every position, or (batch, 1, time, head width) for ragged rows."""
    wide = torch.promote_types(like.dtype, torch.float32)
    angles = positions[..., None].to(wide) * frequencies.to(like.device, wide)
    angles = torch.cat((angles, angles), dim=-1)
    if angles.dim() == 3:
        angles = angles[:, None]  # one for all heads
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads with their pairs (x_i, x_{i + half}) rotated; the memory keeps x's order, which fused attention's
    last bits depend on."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def seen(bus: Bus, total: int, window: int) -> Tensor | None:
    """Which of `total` slots each query may see, made once for all layers; None is plain causality.

    A window as long as the text masks nothing more, but makes a mask, as in transformers.
    """
    if "mask" in bus.extras:  # whoever made the bus says it all
        given: Tensor = bus.extras["mask"]
        return given
    masks: dict[tuple[int, int], Tensor | None] = bus.extras["seen"]
    if (total, window) not in masks:
        mask = attention_mask(bus.positions, total, window)
        if mask is None and window == total > 1:
            mask = bus.positions[:, None] >= torch.arange(total, device=bus.positions.device)
        masks[total, window] = mask
    return masks[total, window]


def repeated(x: Tensor, share: int) -> Tensor:
    """Keys or values (batch, kv heads, ...) once for each head that hears them."""
    if share == 1:
        return x
    batch, heads, *rest = x.shape
    return x[:, :, None].expand(batch, heads, share, *rest).reshape(batch, heads * share, *rest)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(c tanh(q kᵀ s / c)) v, (batch, heads, time, head width), where `mask` or causality allows."""
    share = q.shape[1] // k.shape[1]
    k, v = repeated(k, share), repeated(v, share)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=wide).to(q.dtype), v)


def check_reach(config: TransformerConfig, inputs: Tensor, offset: int | Tensor) -> None:
    """Refuse positions that a table of learned positions does not have.

    Ragged rows put their padding behind the longest row, which may fill the table (`depth/cache.py`).
    """
    ragged = isinstance(offset, Tensor)
    stop = int(offset.max()) + 1 if isinstance(offset, Tensor) else offset + inputs.shape[1]
    if stop > config.context + ragged:
        raise StackError(
            f"{stop} positions are more than the {config.context} that this {config.family} has learned; "
            "give it a shorter text"
        )
