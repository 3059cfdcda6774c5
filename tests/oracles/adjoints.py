"""Adjoints of an interface chain by explicit matrix products, one sample and one boundary at a time.

    P_k = J_kᵀ J_{k+1}ᵀ ⋯ J_{K-1}ᵀ,   P_K = I,   ḡ_k = P_k g

Each product is built from nothing, so the cost is O(K²) products of n × n matrices; any dtype.
Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Theorem 2.7, eq. 3. The fast
version, with the meaning of the symbols, is `topograd.interfaces.suffix_scan`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def explicit_products(jacobians: Tensor) -> Tensor:
    """P_0 ... P_K, shape (K + 1, B, n, n), from Jacobians (K, B, n, n)."""
    K, B, n, _ = jacobians.shape
    identity = torch.eye(n, dtype=jacobians.dtype, device=jacobians.device)
    rows = []
    for k in range(K + 1):
        row = []
        for b in range(B):
            P = identity
            for j in range(k, K):
                P = P @ jacobians[j, b].T
            row.append(P)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def explicit_adjoints(jacobians: Tensor, terminal: Tensor) -> Tensor:
    """ḡ_0 ... ḡ_K, shape (K + 1, B, n), from Jacobians (K, B, n, n) and the terminal adjoint (B, n)."""
    return torch.stack(
        [
            torch.stack([P @ g for P, g in zip(row, terminal, strict=True)])
            for row in explicit_products(jacobians)
        ]
    )
