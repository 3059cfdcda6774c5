"""Muon, one matrix at a time, as the formulas are written; any dtype.

    B ← μ B + (1 − μ) g
    U ← μ B + (1 − μ) g  (nesterov),  or B
    O ← U / max(‖U‖_F, ε), then K times  X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X
    θ ← (1 − η w) θ − η s O

Source: "Muon: An optimizer for hidden layers in neural networks" (K. Jordan et al.). The fast version, with
the meaning of the symbols, is `topograd.training.muon`. Cost: 6 m² n flops for each step of Newton-Schulz
on a matrix of shape (m, n), whichever side is smaller.
"""

import math

import torch
from torch import Tensor


def newton_schulz(U: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """K steps of Newton-Schulz on one matrix; the polynomial is the same for U and Uᵀ."""
    a, b, c = coefficients
    X = U / max(torch.linalg.matrix_norm(U).item(), eps)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + b * (A @ X) + c * (A @ (A @ X))
    return X


def muon_step(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    eps: float,
    ns_steps: int,
    adjust_lr_fn: str,
) -> tuple[Tensor, Tensor]:
    """The parameter and the momentum after one step; nothing is changed in place."""
    B = momentum * momentum_buffer + (1 - momentum) * gradient
    U = momentum * B + (1 - momentum) * gradient if nesterov else B
    rows, cols = parameter.shape
    scales = {"original": math.sqrt(max(1, rows / cols)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols))}
    step = scales[adjust_lr_fn] * newton_schulz(U, ns_coefficients, ns_steps, eps)
    return (1 - lr * weight_decay) * parameter - lr * step, B
