"""Norms, spectra and ranks of interface Jacobians, and the reach of gradients.

Statement. With J_k = ∂m_{k+1}/∂m_k and m̄_k = ∂L/∂m_k, for every sample,

    local norm        ‖J_k‖₂                                how much one region can amplify
    suffix norm       ‖P_k‖₂,  P_k = J_kᵀ J_{k+1}ᵀ ⋯ J_{K-2}ᵀ     the same of all regions from k on
    rms               ‖J_k‖_F / √n                          the root mean square of the singular values σ
    effective rank    exp(-Σ p_i log p_i),  p = σ / Σ σ     between 1 and n; 0 for a matrix of zeros
    adjoint norm      ‖m̄_k‖₂                                what reaches interface k

each averaged over the batch. The messages have an effective rank too: that of their matrix, rows (sample,
segment) and columns r, less its mean row. Their spread is the root mean square of that difference: 0 where
all rows are alike and the message tells nothing of the data, at most 1, for a row has length √r. A message is
a LayerNorm's output, so at least 2 (S-1) of the n = (S-1) r singular values of J are zero, and the messages
of one boundary have at most rank r - 1.

Where a Jacobian would take more than a thousand vector-Jacobian products, as the residual form's do, none is
built: lists of Jacobians are empty then, as they are for two regions, and the adjoints are autograd's.

Symbols and shapes. K regions, B samples, n the width of the interface. J (K-2, B, n, n) for regions 1..K-2,
m̄ (K-1, B, n) for interfaces 1..K-1. P_{K-1} = I is left out. Cost: that of a step by the scan engine, and
O(K B n³) for the singular values: ask every so many steps, not at each.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", appendix F (Figure 3 and Table 7,
which average over regions; whole spectra and ranks it leaves to future work). The effective rank is that of
Roy and Vetterli, "The effective rank: a measure of effective dimensionality".
Limits. In float32 a singular value below 1e-7 of the largest is rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from topograd.effective_rank import effective_rank
from topograd.exec.train_step import train_step
from topograd.interfaces.engines import Scan
from topograd.interfaces.jacobian import has_jacobians
from topograd.interfaces.regions import Regions
from topograd.interfaces.suffix_scan import suffix_products
from topograd.nn.stack import Stack
from topograd.topology.dag import Topology


def analyse(stack: Stack, topology: Topology, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Everything of this module for one batch, as plain numbers; every `.grad` stays as it was."""
    regions = Regions.of(stack, topology)
    scan = Scan(carried=0 if has_jacobians(regions) else regions.count - 2)
    with _gradients_kept(stack):
        losses = train_step(stack, topology, inputs, targets, gradient=scan)
    assert scan.adjoints is not None, "the scan engine shows its adjoints"
    with torch.no_grad():
        x0 = stack.embed(inputs)
        messages = regions.told(x0, stack.layer_context(x0, inputs))
        ranks = [message_rank(m).item() for m in messages]
        spreads = [message_spread(m).item() for m in messages]
    batch, n = scan.adjoints.shape[1:]
    none = scan.adjoints.new_empty(0, batch, n, n)  # two regions have no Jacobian between interfaces
    return {
        "loss": losses[-1].item(),
        **describe_jacobians(none if scan.jacobians is None else scan.jacobians),
        "adjoint_norm": adjoint_norms(scan.adjoints).tolist(),
        "message_rank": ranks,
        "message_spread": spreads,
    }


def describe_jacobians(jacobians: Tensor) -> dict[str, Any]:
    """Lists with one entry for each of the inner regions 1..K-2, from J (K-2, B, n, n); spectra have n more.

    >>> found = describe_jacobians(torch.diag(torch.tensor([3.0, 4.0])).expand(2, 1, 2, 2))
    >>> found["local_norm"], found["suffix_norm"], found["spectrum"]
    ([4.0, 4.0], [16.0, 4.0], [[4.0, 3.0], [4.0, 3.0]])
    """
    singular = singular_values(jacobians)  # (K-2, B, n)
    suffix = singular_values(suffix_products(jacobians)[:-1])
    return {
        "local_norm": singular[..., 0].mean(-1).tolist(),
        "suffix_norm": suffix[..., 0].mean(-1).tolist(),
        "rms": singular.square().mean(-1).sqrt().mean(-1).tolist(),
        "effective_rank": effective_rank(singular).mean(-1).tolist(),
        "spectrum": singular.mean(-2).tolist(),
    }


def singular_values(matrices: Tensor) -> Tensor:
    """σ, largest first, of matrices (..., n, n), in float32 or better."""
    return torch.linalg.svdvals(matrices.to(torch.promote_types(matrices.dtype, torch.float32)))


def message_rank(message: Tensor) -> Tensor:
    """The effective rank of messages (B, states, r) around their mean; 0 where there is only one."""
    rows = message.flatten(0, -2)
    return effective_rank(singular_values(rows - rows.mean(0)))


def message_spread(message: Tensor) -> Tensor:
    """The root mean square of messages (B, states, r) around their mean."""
    rows = message.flatten(0, -2)
    return (rows - rows.mean(0)).square().mean().sqrt()


def adjoint_norms(adjoints: Tensor) -> Tensor:
    """(K-1,): ‖m̄_k‖₂, averaged over the batch, from (K-1, B, n)."""
    return torch.linalg.vector_norm(adjoints, dim=-1).mean(-1)


@contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """Put every parameter's `.grad` back afterwards, the very same tensor."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
