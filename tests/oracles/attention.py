"""Attention written out: every score, the mask, the softmax and the sum. The slow, obvious version.

    s_tj = q_t · k_j / √d  for the keys j that t may see, -∞ for the others
    y_t  = Σ_j exp(s_tj) v_j / Σ_j exp(s_tj)

q (batch, heads, T, d); k, v (batch, kv heads, S, d), S ≥ T: the queries are the last T of the S positions.
Key j is seen from t if j ≤ t and, with a window w > 0, t - j < w. Consecutive query heads share a kv head.
Memory and cost O(heads · T · S). `attention_output` is the whole of `nn/gpt.py`'s Attention with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Causal softmax attention (batch, heads, T, d), one query at a time."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    first = k.shape[2] - q.shape[2]
    answers = []
    for row in range(q.shape[2]):
        t = first + row
        start = max(t - window + 1, 0) if window else 0
        scores = (q[:, :, row, None] * k[:, :, start : t + 1]).sum(-1) / q.shape[-1] ** 0.5
        weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        answers.append((weights[..., None] * v[:, :, start : t + 1]).sum(2))
    return torch.stack(answers, dim=2)


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions: the complex numbers x_i + √-1 x_{i + d/2} turned by the angles -p base^(-2i/d)."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions[:, None].to(x.dtype) * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), -angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def root_mean_square_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + ε), ε the precision of x."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def attention_output(attention: Any, x: Tensor, inputs: Tensor, base: float) -> Tensor:
    """What `nn/gpt.py`'s Attention should answer for x (batch, time, width) of the tokens `inputs`."""
    width = attention.head_width
    q = (x @ attention.query.weight.T).unflatten(-1, (-1, width)).transpose(1, 2)
    k = (x @ attention.key.weight.T).unflatten(-1, (-1, width)).transpose(1, 2)
    v = x @ attention.value.weight.T
    if attention.value_embedding is not None:
        v = v + attention.value_gate * attention.value_embedding.weight[inputs]
    positions = torch.arange(x.shape[1])
    q, k = (root_mean_square_norm(rotated(part, positions, base)) for part in (q, k))
    y = plain_attention(q, k, v.unflatten(-1, (-1, width)).transpose(1, 2), attention.window)
    return y.transpose(1, 2).flatten(2) @ attention.output.weight.T
