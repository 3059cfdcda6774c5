"""Gradients in few bits: stochastic rounding with one scale a position, and its bytes.

Statement. A gradient g (..., d) that crosses an edge in b bits becomes

    L = 2^(b-1) - 1,   s = max |g| / L over the last dimension, in float32,   q = floor(g / s + u),   ĝ = s q

with u uniform in [0, 1): E ĝ = g, and |g - ĝ| < s. q is one of the 2L + 1 whole numbers from -L to L.

Symbols: b one of 16, 8, 4, 3. u comes from a generator that is seeded by the run's seed, the step of the
batch, its number within the step, the receiving stage and the number of its source: nothing is kept, so a
run that was resumed, or that has its stages on several ranks, draws the same.

Shapes: g (..., d); bytes (positions, 4 + ⌈d b / 8⌉), the scale first. Cost: one draw and two passes over g.
Limits: a position with a number that is not finite is not finite as a whole. E ĝ = g holds to the rounding of
s, one part in 10^7; for gradients in bfloat16 to that of the product, one in 256.
"""

import hashlib
import math

import torch
from torch import Tensor

Key = tuple[int, ...]
"""What seeds the draws: (run's seed, step, number of the batch in it, stage, number of its source)."""
SCALE_BYTES = 4
TINY = 1e-38
"""The smallest scale, so that a position of zeros is divided by something."""


def rounded(gradient: Tensor, bits: int, key: Key) -> Tensor:
    """ĝ; with 32 bits the gradient itself."""
    if bits == 32:
        return gradient
    numbers, scale = quantized(gradient, bits, key)
    return numbers.to(gradient.dtype) * scale.to(gradient.dtype)


def quantized(gradient: Tensor, bits: int, key: Key) -> tuple[Tensor, Tensor]:
    """q (..., d) as int32 and s (..., 1) as float32."""
    levels = 2 ** (bits - 1) - 1
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # bf16 has no 32,767
    scale = (gradient.abs().amax(-1, keepdim=True) / levels).float().clamp(min=TINY)
    noise = torch.rand(gradient.shape, generator=_generator(key)).to(gradient.device, gradient.dtype)
    numbers = (gradient / scale.to(gradient.dtype) + noise).floor().clamp(-levels, levels)
    return numbers.nan_to_num(0.0).to(torch.int32), scale


def packed(gradient: Tensor, bits: int, key: Key) -> Tensor:
    """The bytes of ĝ."""
    numbers, scale = quantized(gradient, bits, key)
    count, whole = _words(gradient.shape[-1], bits)
    unsigned = (numbers + (2 ** (bits - 1) - 1)).flatten(0, -2)
    grouped = torch.nn.functional.pad(unsigned, (0, count * whole - unsigned.shape[1]))
    places = torch.arange(whole, dtype=torch.int32, device=gradient.device) * bits
    words = (grouped.view(-1, count, whole) << places).sum(-1, dtype=torch.int32)
    shifts = torch.arange(0, whole * bits, 8, dtype=torch.int32, device=gradient.device)
    stored = ((words[..., None] >> shifts) & 255).to(torch.uint8).flatten(1)
    return torch.cat((scale.flatten(0, -2).view(torch.uint8), stored), dim=1)


def unpacked(stored: Tensor, shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> Tensor:
    """ĝ again, bit for bit as `rounded` has it."""
    count, whole = _words(shape[-1], bits)
    scale = stored[:, :SCALE_BYTES].contiguous().view(torch.float32)
    parts = stored[:, SCALE_BYTES:].view(len(stored), count, whole * bits // 8).to(torch.int32)
    shifts = torch.arange(0, whole * bits, 8, dtype=torch.int32, device=stored.device)
    words = (parts << shifts).sum(-1, dtype=torch.int32)
    places = torch.arange(whole, dtype=torch.int32, device=stored.device) * bits
    unsigned = ((words[..., None] >> places) & (2**bits - 1)).flatten(1)[:, : shape[-1]]
    return ((unsigned - (2 ** (bits - 1) - 1)).to(dtype) * scale.to(dtype)).view(shape)


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """(positions, bytes of each)."""
    count, whole = _words(shape[-1], bits)
    return math.prod(shape[:-1]), SCALE_BYTES + count * whole * bits // 8


def _words(width: int, bits: int) -> tuple[int, int]:
    """How many words a position has, and how many numbers each: the fewest that fill whole bytes."""
    whole = math.lcm(bits, 8) // bits
    return -(-width // whole), whole


def _generator(key: Key) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
