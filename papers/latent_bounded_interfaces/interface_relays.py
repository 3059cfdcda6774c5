"""Interfaces that differ from `nn/interface.py` in one thing each, for the study of hypotheses.

    own        m_{k+1}[t] = LN(m_k[t] + α Enc(h_t)), x_t = x0_t + Dec(m_k[t]): no segments and no shift. A
               position hears what the region before made of itself, which is still causal
    steady     `own` with m standardised by running means and deviations, which count as constants, in the
               place of LN: what all messages have in common is taken out, so that they cannot collapse
    phase      Dec(m[s] + P[t mod ℓ]): what a message says may depend on the place in the segment
    authors    LN with gain and shift, tanh α, biases, SiLU, Dec not zero at first, m_0 from the tokens

Shapes are those of `nn/interface.py`. Source: "LBI: Parallel Scan Backpropagation via Latent Bounded
Interfaces" §3.1 for the authors' parameterisation. Limits: for whole sequences; none of them decodes.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.config import SegmentInterface
from topograd.nn.interface import EPSILON, Map, SegmentRelay
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import interface_name

Kind = Literal["segments", "own", "steady", "phase", "authors"]
FOLLOWED, VARIANCE_FLOOR = 0.1, 1e-6
"""How fast running means follow, and what a variance is at least."""


class OwnPosition(BoundedRelay):
    """A relay of rank r at every position, over the canvas."""

    def __init__(self, settings: SegmentInterface, width: int, context: int, first: bool) -> None:
        super().__init__()
        self.settings = settings
        self.encode = Map(settings.maps, width, width, settings.rank)
        self.decode = Map(settings.maps, settings.rank, width, width)
        self.alpha = None if first else nn.Parameter(torch.tensor(1.0))
        nn.init.zeros_(self.decode.outer.weight)

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        m = self.encode(h)
        if self.alpha is not None and received is not None:
            m = received + self.alpha * m
        return F.layer_norm(m, m.shape[-1:], eps=EPSILON)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return ctx.x0 + self.decode(message)


class SteadyPosition(OwnPosition):
    """A relay at every position whose messages keep a mean of 0 and a variance of 1 over the data."""

    mean: Tensor
    variance: Tensor

    def __init__(self, settings: SegmentInterface, width: int, context: int, first: bool) -> None:
        super().__init__(settings, width, context, first)
        self.register_buffer("mean", torch.zeros(settings.rank))
        self.register_buffer("variance", torch.ones(settings.rank))
        self.newest: tuple[Tensor, Tensor] | None = None
        self.steps = 0

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        m = self.encode(h)
        if self.alpha is not None and received is not None:
            m = received + self.alpha * m
        if torch.is_grad_enabled():
            seen = m.detach().flatten(0, -2)
            self.newest = seen.mean(0), seen.var(0)
        return (m - self.mean) / (self.variance + VARIANCE_FLOOR).sqrt()

    def after_step(self, stack: Stack) -> None:
        """The running values follow the newest batch's: only between steps, so that no batch reads itself."""
        assert self.newest is not None
        self.steps += 1
        share = max(FOLLOWED, 1 / self.steps)
        self.mean.lerp_(self.newest[0], share)
        self.variance.lerp_(self.newest[1], share)


class Phase(SegmentRelay):
    """Segments whose messages are read together with the place in the segment."""

    def __init__(self, settings: SegmentInterface, width: int, context: int, first: bool) -> None:
        super().__init__(settings, width, context, first)
        self.phase = nn.Embedding(self.segment, settings.rank)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return _spread(self, message, ctx, self.phase.weight)


class Authors(SegmentRelay):
    """The published parameterisation, over causal segments."""

    def __init__(self, settings: SegmentInterface, width: int, context: int, first: bool) -> None:
        super().__init__(settings, width, context, first)
        rank = settings.rank
        self.encode = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, rank))  # type: ignore[assignment]
        self.decode = nn.Sequential(nn.Linear(rank, width), nn.SiLU(), nn.Linear(width, width))  # type: ignore[assignment]
        self.alpha = nn.Parameter(torch.tensor(1.0))
        self.start = nn.Linear(width, rank) if first else None
        self.norm = nn.LayerNorm(rank)

    def send_pooled(self, pooled: Tensor, received: Tensor | None) -> Tensor:
        assert received is not None
        assert self.alpha is not None
        m = self.encode(pooled)
        before = received[:, : m.shape[1]] if self.start is None else self.start(self.pool(received))
        return self.norm(before[:, : m.shape[1]] + torch.tanh(self.alpha) * m)

    def tangent(self, m: Tensor) -> None:  # type: ignore[override]
        """A LayerNorm with gain and shift is not confined as one without."""


def _spread(relay: SegmentRelay, message: Tensor, ctx: LayerContext, phase: Tensor) -> Tensor:
    """x0 and Dec(m[s] + P[t mod ℓ]); nothing in segment 0."""
    time, length = ctx.x0.shape[1], relay.segment
    later = -(-time // length) - 1
    if later < 1:
        return ctx.x0
    read = message[:, :later, None] + phase
    decoded = relay.decode(read.flatten(1, 2))
    return ctx.x0 + F.pad(decoded, (0, 0, length, 0))[:, :time]


KINDS: dict[str, type[nn.Module]] = {
    "segments": SegmentRelay,
    "own": OwnPosition,
    "steady": SteadyPosition,
    "phase": Phase,
    "authors": Authors,
}


def join_regions(stack: Stack, kind: str, interface: str, regions: int, width: int, context: int) -> None:
    """Give a stack the relays of `Topology.regions`."""
    settings = SegmentInterface.parse(interface)
    for region in range(1, regions):
        relay = KINDS[kind](settings, width, context, region == 1)
        stack.add_relay(interface_name(region), relay)
