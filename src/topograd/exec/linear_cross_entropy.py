"""Cross-entropy of a linear readout, without all logits in memory.

    ℓ = (1/N) Σ_n [ log Z_n - z_n[y_n] + c (log Z_n)² ],   z_n = cap(W x_n + b),   log Z_n = logsumexp(z_n)

N the number of targets, c the weight of the z-loss (0 by default).

x (N, d), W (V, d), b (V), y (N). The tokens go through in chunks of C. Each chunk computes its logits, its
loss and at once its part of the gradients

    g = ∂ℓ/∂(W x + b)  (C, V),    ∂ℓ/∂x = g W,    ∂ℓ/∂W += gᵀ x,    ∂ℓ/∂b += Σ_n g

so that the backward pass only multiplies them by the incoming gradient. With a low-rank delta, W + U D with
U (V, r) and D (r, d), nothing of W's size is made or gets a gradient where W is frozen:

    z_n = W x_n + U (D x_n),   ∂ℓ/∂x = g W + (g U) D,   ∂ℓ/∂U += gᵀ (x Dᵀ),   ∂ℓ/∂D += (g U)ᵀ x

Memory O(C V + N d + V d) instead of O(N V); the multiply-adds are the same as the plain version's. Within one
chunk every operation is the one that autograd would do, in the same order, so with N ≤ C the result is
bit-equal to the plain version (`tests/oracles/cross_entropy.py`).

Targets of -100 are ignored. Limits: first derivatives only. Gradients are computed whenever any input
wants one, also if backward is never called.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from topograd.exec.z_loss import z_loss
from topograd.nn.heads import cap

CHUNK_ELEMENTS = 2**19
"""Logits held at once, by default: 2 MiB in float32. From 2**18 to 2**21 the speed is the same."""
MIN_TOKENS = 128
"""However large the vocabulary: W is read from memory once a chunk, which with 16 tokens of 49,152 costs more
than the products."""


def chunk_tokens(vocab: int) -> int:
    """The number of tokens of a chunk for this vocabulary."""
    return max(CHUNK_ELEMENTS // vocab, MIN_TOKENS)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    z_weight: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Mean cross-entropy of cap(x Wᵀ + b) over the targets that are not -100. Leading shapes may be any.

    `low_rank` is (U, D), where the matrix is W + U D.
    """
    chunk = chunk or chunk_tokens(weight.shape[0])
    flat, y = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    up, down = (None, None) if low_rank is None else low_rank
    tensors = [flat, weight, bias, up, down]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    if not torch.is_grad_enabled():  # a Function cannot tell: its needs_input_grad ignores no_grad
        tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    with torch.autocast(x.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(*tensors, y, softcap, z_weight, chunk)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        up: Tensor | None,
        down: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        z_weight: float,
        chunk: int,
    ) -> Tensor:
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wanted = any(ctx.needs_input_grad)
        count = (targets != -100).sum().clamp(min=1)
        loss = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        dx = torch.empty_like(x) if wants_x else None
        dweight = torch.zeros_like(weight) if wants_weight and len(x) > chunk else None
        dbias = torch.zeros_like(bias) if wants_bias and bias is not None else None
        dup, ddown = (None if t is None else torch.zeros_like(t) for t in (up, down))
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            logits = F.linear(x[part], weight, bias)
            if up is not None and down is not None:
                reduced = F.linear(x[part], down)
                logits.addmm_(reduced, up.t())
            loss_part, g = _chunk_loss(logits, targets[part], count, softcap, z_weight, wanted)
            loss += loss_part
            if g is None:
                continue
            if dx is not None:
                torch.mm(g, weight, out=dx[part])
            if dweight is not None:
                dweight.addmm_(g.t(), x[part])
            elif wants_weight:
                dweight = g.t() @ x[part]
            if dbias is not None:
                dbias += g.sum(0)
            if up is not None and down is not None and dup is not None and ddown is not None:
                back = g @ up
                if dx is not None:
                    dx[part].addmm_(back, down)
                dup.addmm_(g.t(), reduced)
                ddown.addmm_(back.t(), x[part])
        ctx.save_for_backward(dx, dweight, dbias, dup, ddown)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


def _chunk_loss(
    logits: Tensor, targets: Tensor, count: Tensor, softcap: float | None, z_weight: float, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """This chunk's share of the mean loss, and where wanted its gradient with respect to the logits."""
    with torch.set_grad_enabled(wanted):
        leaf = logits.detach().requires_grad_(wanted)
        z = cap(leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf, softcap)
        part = F.cross_entropy(z, targets, reduction="sum")
        if z_weight:
            part = part + z_loss(z, z_weight, "sum", targets != -100)
        part = part / count
        g = torch.autograd.grad(part, leaf)[0] if wanted else None
    return part.detach(), g
