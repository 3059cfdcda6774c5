"""Pooling of the logits of several stages.

    last        z_K                                  the deepest stage that was run
    sum         Σ z_k                           Log-OP, the product of experts; "Product of Experts" eq. 2
    mean        (1/K) Σ z_k                          its geometric mean
    weights     Σ w_k z_k                            given weights
    shrinkage   Σ w_k z_k,  w_k = 1 - H(softmax z_k) / log C          eq. 5, per token

Shrinkage is for inference only: as a training loss it hurts (Principle 2.7).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.errors import ConfigError

POOLINGS = ("last", "sum", "mean", "shrinkage")


def pool(logits: Sequence[Tensor], how: str | Sequence[float]) -> Tensor:
    """Pooled logits of the stages, each (..., vocab); not normalised."""
    if not isinstance(how, str):
        if len(how) != len(logits):
            raise ConfigError(setting="how", given=how, allowed=f"{len(logits)} weights, one for each stage")
        return torch.stack([w * z for w, z in zip(how, logits, strict=True)]).sum(0)
    if how == "last":
        return logits[-1]
    if how == "sum":
        return torch.stack(list(logits)).sum(0)
    if how == "mean":
        return torch.stack(list(logits)).mean(0)
    if how == "shrinkage":
        return torch.stack([shrinkage_weight(z) * z for z in logits]).sum(0)
    raise ConfigError(setting="how", given=how, allowed=f"one of {POOLINGS} or give weights")


def shrinkage_weight(logits: Tensor) -> Tensor:
    """1 - H(softmax z) / log C, in [0, 1], with the vocabulary's dimension kept as 1."""
    log_p = torch.log_softmax(logits, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    return 1 - entropy / math.log(logits.shape[-1])
