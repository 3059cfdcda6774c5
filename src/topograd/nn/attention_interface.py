"""Bounded interfaces by segments that are pooled by attention and read by cross-attention.

As `nn/interface.py`, with segments 0..S-1 of ℓ positions and the states m_k[s] of the segments before s, but

    pooled_s = Σ_t softmax_t(w·h_t / √width) h_t                  t in segment s - 1
    x_t      = x0_t + Σ_j softmax_j(Q x0_t · K m_k[j] / √r) Dec_k(m_k[j])        j = 1..s, t in segment s

so a position chooses among all states that lie before it, and a segment what it sends. w is zero at first,
which is the mean, and so is Dec.

Shapes: h (batch, T, width), m (batch, S - 1, r); w (width), Q (r, width), K (r, r). Cost per boundary over
`segments`: T S (r + width) multiply-adds. Source: "LBI: Parallel Scan Backpropagation via Latent Bounded
Interfaces" §3.1, which names cross-attention as a choice of Enc and Dec; this one is ours. Limits: formulas
by hand (jacobian "pullback") do not know it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from topograd.nn.config import Pool, SegmentInterface
from topograd.nn.interface import SegmentRelay
from topograd.nn.relays import BoundedRelay, at_positions
from topograd.nn.stack import LayerContext


@dataclass(frozen=True, kw_only=True)
class AttentionInterface(SegmentInterface):
    """The shape of interfaces that are read by attention."""

    pool: Pool = "mean"
    keys: ClassVar = {key: field for key, field in SegmentInterface.keys.items() if key in ("S", "r", "maps")}

    def build(self, width: int, context: int, before: BoundedRelay | None) -> BoundedRelay:
        return AttentionRelay(self, width, context, first=before is None)


class AttentionRelay(SegmentRelay):
    """One boundary: attention over a segment where a region sends, over states where the next receives."""

    def __init__(self, settings: AttentionInterface, width: int, context: int, first: bool) -> None:
        super().__init__(settings, width, context, first)
        self.focus = nn.Parameter(torch.zeros(width))
        self.query = nn.Linear(width, settings.rank, bias=False)
        self.key = nn.Linear(settings.rank, settings.rank, bias=False)

    def parameters_by_end(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        sending, receiving = super().parameters_by_end()
        return [*sending, self.focus], [*receiving, *self.query.parameters(), *self.key.parameters()]

    def pool(self, h: Tensor) -> Tensor:
        count = self.ends(h.shape[1])
        return self._focused(h[:, : count * self.segment].unflatten(1, (count, self.segment)), None)

    def _focused(self, h: Tensor, allowed: Tensor | None) -> Tensor:
        """The mean of h (..., ℓ, width) over the positions that are allowed (..., ℓ), by attention."""
        scores = h @ self.focus / math.sqrt(h.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1)[..., None] * h).sum(-2)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        segments = torch.arange(ctx.x0.shape[1], device=ctx.x0.device) // self.segment
        return self._read(message, ctx.x0, segments.expand(len(ctx.x0), -1))

    def _read(self, states: Tensor, x0: Tensor, segments: Tensor) -> Tensor:
        """x0 and what each position, by its segment (batch, time), reads of states (batch, count, r)."""
        scores = self.query(x0) @ self.key(states).mT / math.sqrt(states.shape[-1])
        later = torch.arange(states.shape[1], device=x0.device) >= segments[..., None]
        scores = scores.masked_fill(later, -torch.inf).masked_fill((segments == 0)[..., None], 0.0)
        read = scores.softmax(-1) @ self.decode(states)
        return x0 + read * (segments > 0)[..., None]

    def send_next(self, history: Tensor, received: Tensor, ctx: LayerContext) -> Tensor:
        here = ctx.positions.expand(len(history), -1)
        places = (here - here % self.segment)[..., None] + torch.arange(self.segment, device=here.device)
        allowed = places <= here[..., None]
        flat = places.clamp(max=history.shape[1] - 1).flatten(1)
        window = at_positions(history, flat).unflatten(1, places.shape[1:])
        return self.send_pooled(self._focused(window, allowed), received)

    def receive_next(self, history: Tensor, ctx: LayerContext) -> Tensor:
        here = ctx.positions.expand(len(history), -1)
        return self._read(history[:, self.segment - 1 :: self.segment], ctx.x0, here // self.segment)
