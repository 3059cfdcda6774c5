"""Cross-entropy of a linear readout with all the logits in memory: two lines of torch, and autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Mean cross-entropy of cap(x Wᵀ + b) over the targets that are not -100."""
    logits = F.linear(x, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
