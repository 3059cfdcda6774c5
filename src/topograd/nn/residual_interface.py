"""Bounded interfaces in a subspace of the hidden state: at full rank, the dense model.

Statement. With U (width, r) of orthonormal columns, x0 the canvas and h what a region computes from x,

    m_{k+1} = m_k + Uᵀ (h - x),     x = x0 + U m_k,     m_0 = 0

at every position by itself. Since UᵀU = I, that is m_{k+1} = Uᵀ (h - x0): only the part of h - x0 in the span
of U crosses. What is sent here is m + Uᵀ x0 = Uᵀ h, and the canvas's share is taken off where it is read:

    send      Uᵀ h
    receive   x0 + U (Uᵀ h - Uᵀ x0)

The same x, the same Jacobians, the same adjoints; and `send` needs no canvas. At r = width, U Uᵀ = I and
x = h: the model is the dense one up to rounding. So this form is the positive control of every other: it
tells "carries too little" from "was not learned".

With a bypass β the other directions cross too, less loudly, and the message is h itself, width numbers:

    x = x0 + β (h - x0) + (1 - β) U Uᵀ (h - x0)

which is the bounded form at β = 0 and the dense model at β = 1: a way from one to the other.

Shapes: h (batch, T, width), message (batch, T, r). A fixed U does not learn and is one for all boundaries, as
the statement has it. One from data (`training/interface_directions.py`) does not learn either. A learned U is
the Q of the QR of a matrix of each boundary's own, and only its span matters: x = x0 + U Uᵀ (h - x0). Cost
per position and end: r·width multiply-adds; a learned U adds width·r² once at each end. Limits: a message has
T·r numbers, so a Jacobian between two interfaces has T·r rows: a scan is for short contexts. Source: ours,
after the subspace of "Protocol Models" (arXiv 2506.01260).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from topograd.nn.interface_config import ResidualInterface
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import LayerContext


class ResidualRelay(BoundedRelay):
    """One boundary: h in r directions where a region sends, the canvas and these where the next receives."""

    segment = 1  # a state for every position

    def __init__(self, settings: ResidualInterface, width: int) -> None:
        super().__init__()
        self.settings: ResidualInterface = settings
        generator = torch.Generator().manual_seed(settings.seed)
        start = torch.randn(width, settings.rank, generator=generator, dtype=torch.float64)
        U = torch.linalg.qr(start).Q.to(torch.get_default_dtype())
        self.basis = nn.Parameter(U, requires_grad=settings.basis == "learned")

    def rows(self, context: int) -> int:
        return context * (len(self.basis) if self.settings.bypass else self.settings.rank)

    def directions(self) -> Tensor:
        """U (width, r)."""
        if self.settings.basis != "learned":
            return self.basis
        exact = self.basis.to(torch.promote_types(self.basis.dtype, torch.float32))  # bfloat16 has no QR
        return torch.linalg.qr(exact).Q.to(self.basis.dtype)

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h if self.settings.bypass else h @ self.directions()

    def empty(self, ctx: LayerContext) -> Tensor:
        return self.send(ctx.x0, None)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        U, bypass = self.directions(), self.settings.bypass
        if not bypass:
            return ctx.x0 + (message - ctx.x0 @ U) @ U.T
        change = message - ctx.x0
        return ctx.x0 + bypass * change + (1 - bypass) * (change @ U) @ U.T
