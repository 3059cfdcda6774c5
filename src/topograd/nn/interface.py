"""Bounded interfaces between regions of a network, as causal relays.

A sequence of T positions is cut into S segments of ℓ positions. Region k reads, in segment s, the state that
the regions before it made of the segments before s:

    x_t   = x0_t + Dec_k(m_k[s])                t in segment s;  nothing is added in segment 0
    h     = Φ_k(x)
    m_{k+1}[s] = LN(m_k[s] + α_k Enc_k(pool_s(h))),     s = 1..S-1;   m_0 = 0, and α_0 = 1 (LN undoes it)

with pool_s(h) one of

    tail         h at the last position of segment s - 1
    mean         the mean of h over segment s - 1
    cumulative   the mean of h over segments 0..s - 1

so that d x_t / d x_u = 0 for u > t through the interface, exactly. Information moves one segment in one
region, so the chain's nonlinear depth is at most S - 1: choose S of at least the number of regions.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", §3.1, eqs. 4-5, which pools a
whole sequence into one m ∈ R^r and adds it to every position. That lets a language model see the future; it
is kept here under `causal=False` only. The canvas x0 reaches every region; it depends on the tokens alone.

Shapes: h (batch, T, width), m (batch, S - 1, rank). LN has no gain; its ε is so small that the two directions
that it destroys (the mean, and m itself) are destroyed exactly, which `interfaces/jacobian.py` uses. Cost per
boundary: S - 1 positions of Enc and Dec, about 2 width² multiply-adds each with `mlp`, rank·width with
`linear`, 2 rank·width with `gated`, about 2 width^1.5 with `monarch`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import ConfigError, TopologyError
from topograd.nn.config import Maps, SegmentInterface
from topograd.nn.interface_config import InterfaceSettings, check_segments
from topograd.nn.relays import BoundedRelay, CausalRelay, at_positions, fit_rank
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import interface_name

EPSILON = 1e-24


class Monarch(nn.Module):
    """A square map of width d = b c as two block-diagonal ones with a transposition between them:

        y[i, j] = Σ_k weight[j, i, k] (Σ_l inner[k, j, l] x[k, l]),        x, y as b × c

    d (b + c) multiply-adds instead of d², b the divisor of d nearest to √d. After Dao et al. 2022, "Monarch:
    Expressive Structured Matrices"; where d is prime it is a plain matrix of two factors.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        b = max(k for k in range(1, math.isqrt(width) + 1) if width % k == 0)
        c = width // b
        self.inner = nn.Parameter(torch.randn(b, c, c) / math.sqrt(c))
        self.weight = nn.Parameter(torch.randn(c, b, b) / math.sqrt(b))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("...kl,kjl->...kj", x.unflatten(-1, (len(self.inner), -1)), self.inner)
        return torch.einsum("...kj,jik->...ij", mixed, self.weight).flatten(-2)


class Map(nn.Module):
    """An encoder or a decoder: two layers with a GELU, one layer, or one with a sigmoid gate; `monarch` is
    two layers of which the square one is structured."""

    def __init__(self, kind: Maps, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.kind = kind
        first, last = (hidden, hidden) if kind in ("mlp", "monarch") else (outputs, inputs)
        self.inner = _layer(kind, inputs, first) if kind != "linear" else None
        self.outer = _layer(kind, last, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is None:
            out: Tensor = self.outer(x)
        elif self.kind == "gated":
            out = self.outer(x) * torch.sigmoid(self.inner(x))
        else:
            out = self.outer(F.gelu(self.inner(x)))
        return out


def _layer(kind: Maps, inputs: int, outputs: int) -> nn.Linear | Monarch:
    square = kind == "monarch" and inputs == outputs
    return Monarch(inputs) if square else nn.Linear(inputs, outputs, bias=False)


class SegmentRelay(BoundedRelay, CausalRelay):
    """One boundary: Enc, α and LN where a region sends, Dec where the next one receives.

    Dec starts at zero, so that every region first sees the canvas alone.
    """

    def __init__(self, settings: SegmentInterface, width: int, context: int, first: bool) -> None:
        super().__init__()
        self.settings: SegmentInterface = settings
        self.segment: int = settings.segment(context)
        self.encode = Map(settings.maps, width, width, settings.rank)
        self.decode = Map(settings.maps, settings.rank, width, width)
        self.alpha = None if first else nn.Parameter(torch.tensor(1.0))
        nn.init.zeros_(self.decode.outer.weight)

    def ends(self, time: int) -> int:
        """The number of segments of `time` positions that are full and have one after them."""
        if not self.settings.causal:
            return 1
        return min(time // self.segment, self.settings.segments - 1)

    def needed(self, time: int) -> tuple[int, Tensor | None]:
        """The positions that `send` reads: nothing of the last segment, and of a tail pool only the ends.

        At least one, so that layers never get an empty input.
        """
        if not self.settings.causal:
            return time, None
        count = self.ends(time)
        tails = torch.arange(1, count + 1) * self.segment - 1
        return max(count * self.segment, 1), tails if self.settings.pool == "tail" else None

    def pool(self, h: Tensor) -> Tensor:
        """(batch, states, width): the pooled hidden state of each segment."""
        if not self.settings.causal:
            return h.mean(1, keepdim=True)
        count = self.ends(h.shape[1])
        if self.settings.pool == "tail":
            return h[:, self.segment - 1 :: self.segment][:, :count]
        means = h[:, : count * self.segment].unflatten(1, (count, self.segment)).mean(2)
        if self.settings.pool == "mean":
            return means
        return means.cumsum(1) / torch.arange(1, count + 1, device=h.device, dtype=h.dtype)[:, None]

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return self.send_pooled(self.pool(h), received)

    def send_pooled(self, pooled: Tensor, received: Tensor | None) -> Tensor:
        """LN(m + α Enc(pooled)); the first boundary received no state, only the canvas."""
        m = self.encode(pooled)
        if self.alpha is not None and received is not None:
            m = fit_rank(received[:, : m.shape[1]], m.shape[-1]) + self.alpha * m
        return F.layer_norm(m, m.shape[-1:], eps=EPSILON)

    def parameters_by_end(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        sending = [*self.encode.parameters(), *([] if self.alpha is None else [self.alpha])]
        return sending, list(self.decode.parameters())

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        time = ctx.x0.shape[1]
        if not self.settings.causal:
            return ctx.x0 + self.decode(message)
        later = -(-time // self.segment) - 1  # segments after the first
        if later >= self.settings.segments:
            raise ConfigError(
                setting="context",
                given=time,
                allowed=f"at most {self.segment * self.settings.segments} positions",
            )
        decoded = self.decode(message[:, :later]).repeat_interleave(self.segment, dim=1)
        return ctx.x0 + F.pad(decoded, (0, 0, self.segment, 0))[:, :time]

    def rows(self, context: int) -> int:
        states = self.settings.segments - 1 if self.settings.causal else 1
        return states * (self.settings.rank - 2)

    def tangent(self, m: Tensor) -> Tensor:
        """A LayerNorm's output has mean 0 and length √r: it moves orthogonally to 1 and to itself."""
        exact = m.to(torch.promote_types(m.dtype, torch.float32))  # bfloat16 has no QR
        dead = torch.stack((torch.ones_like(exact), exact), dim=-1)
        return torch.linalg.qr(dead, mode="complete").Q[..., 2:]

    def send_next(self, history: Tensor, received: Tensor, ctx: LayerContext) -> Tensor:
        """The state at each new position, as if its segment ended there; only ends are ever read."""
        self._must_be_causal()
        here = ctx.positions.expand(len(history), -1)
        if self.settings.pool == "tail":
            pooled = at_positions(history, here)
        else:
            start = (
                torch.zeros_like(here) if self.settings.pool == "cumulative" else here - here % self.segment
            )
            sums = F.pad(history.cumsum(1), (0, 0, 1, 0))
            total = at_positions(sums, here + 1) - at_positions(sums, start)
            pooled = total / (here + 1 - start)[..., None]
        return self.send_pooled(pooled, received)

    def receive_next(self, history: Tensor, ctx: LayerContext) -> Tensor:
        self._must_be_causal()
        end = ctx.positions.expand(len(history), -1) // self.segment * self.segment - 1
        decoded = self.decode(at_positions(history, end.clamp(min=0)))
        return ctx.x0 + decoded * (end >= 0)[..., None]

    def _must_be_causal(self) -> None:
        if not self.settings.causal:
            raise ConfigError(setting="causal", given=False, allowed="True for decoding token by token")


def add_interfaces(
    stack: Stack,
    settings: InterfaceSettings | tuple[InterfaceSettings, ...],
    regions: int,
    width: int,
    context: int,
) -> None:
    """Add the relays of `Topology.regions` that the stack lacks, of any form; one for each boundary, or all
    alike."""
    each = settings if isinstance(settings, tuple) else (settings,) * (regions - 1)
    check_segments(each)
    for one in each:
        one.check(context, width)
    like = next(stack.parameters())
    before: BoundedRelay | None = None
    for region in range(each[0].first_region, regions):
        name = interface_name(region)
        if name not in stack.learned_relays():
            chosen = each[max(region - 1, 0)]
            relay = chosen.build(width, context, before)
            if stack.reads_ahead and chosen.causal and isinstance(relay, CausalRelay):
                raise ConfigError(
                    "an interface's segments are cut apart, and these layers read all positions",
                    setting="interface",
                    given=chosen,
                    allowed="published, residual or S=1,pool=mean,causal=false",
                )
            stack.add_relay(name, relay.to(like.device, like.dtype))
        before = bounded_relay(stack, name)


def bounded_relay(stack: Stack, name: str) -> BoundedRelay:
    """The relay called `name`, which must be a bounded interface."""
    relay = stack.relay(name)
    if not isinstance(relay, BoundedRelay):
        raise TopologyError(
            f"a region reads through {name!r}, which is no interface",
            setting="relay",
            given=name,
            remedy="train with --interface, or call Topology.regions and add_interfaces",
        )
    return relay
