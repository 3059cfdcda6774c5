"""The Jacobian of one region, from interface to interface: J = ∂m_{k+1}/∂m_k, for every sample.

Four ways to the same matrix:

    loop       one VJP of autograd's graph for each row; the default on a CPU
    batched    the same with all rows at once (`is_grads_batched`), attention by explicit softmax
    forward    one JVP for each column (`torch.func.jvp`)
    pullback   by hand, rows folded into matrix products (`pullback.py`); GPT blocks only

Two facts make it cheaper than n VJPs of the whole region, both exact:

  - The interface is causal: m_{k+1}[s] depends on m_k[1..s] only, and through the region's layers only on
    the positions before segment s. So the rows of segment s are pulled back through that prefix ("trimmed").
  - A form of interface may know the directions in which its message can move (`BoundedRelay.tangent`). With
    Q (r, q) their orthonormal basis, J = Q (Qᵀ J), and q rows suffice. That of segments is a LayerNorm's
    output, mean 0 and length √r: all its changes are orthogonal to 1 and to m_{k+1} itself, so q = r - 2.

Shapes: m (B, states, r); J (B, n, n), n = states r, block lower triangular. Segments have S - 1 states, the
residual form one for each position, the published form one. Cost for segments, in forwards F of the region:
n VJPs of about 1.1 F untrimmed; trimmed, Σ_s (r-2)(s/S) 1.1 F and one forward of each prefix.
Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.2 (eq. 8) and appendix D.1; the
two savings are ours. Limits: samples must be independent and a region a function of its inputs (`regions.py`
and `exactness.py` check).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from topograd.errors import ConfigError, StackError
from topograd.interfaces.pullback import Tape, pullback, record
from topograd.interfaces.regions import Regions
from topograd.nn.interface import SegmentRelay
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import LayerContext
from topograd.runs.topology_config import Jacobian

MAX_ROWS = 1024
"""Rows of one Jacobian, each a vector-Jacobian product: with more, a step takes a thousand others' time."""


def has_jacobians(regions: Regions) -> bool:
    """Whether the Jacobians of all inner regions can be built; a form that does not know its rows tries."""
    inner = regions.relays[1 : regions.count - 1]
    return all((relay.rows(regions.stack.context) or 0) <= MAX_ROWS for relay in inner)


def check_rows(regions: Regions, region: int) -> None:
    """Refuse an interface whose Jacobian behind a region would take thousands of products."""
    rows = regions.relays[region].rows(regions.stack.context)
    if rows is not None and rows > MAX_ROWS:
        raise ConfigError(
            f"a Jacobian between these interfaces takes {rows} vector-Jacobian products a step",
            setting="backward",
            given="scan",
            allowed=f"autograd, or fewer segments or a smaller rank: at most {MAX_ROWS} products",
        )


@dataclass
class Visit:
    """One region's forward, with its graph from `message_in` (a leaf) to `message_out`."""

    regions: Regions
    region: int
    ctx: LayerContext
    message_in: Tensor
    message_out: Tensor
    tape: Tape | None = None

    @property
    def relay_out(self) -> BoundedRelay:
        return self.regions.relays[self.region]


def visit(
    regions: Regions, region: int, message_in: Tensor, ctx: LayerContext, way: Jacobian = "loop"
) -> Visit:
    """Run a region so that its Jacobian can be taken in this way."""
    with recording(regions, region, way) as tape:
        message = regions.visit(region, message_in, ctx)
    return Visit(regions, region, ctx, message_in, message, tape)


@contextmanager
def recording(regions: Regions, region: int, way: Jacobian) -> Iterator[Tape | None]:
    """Within it a region runs forward so that its Jacobian can be taken in this way; yields its tape."""
    if way not in get_args(Jacobian):
        raise ConfigError(setting="jacobian", given=way, allowed=f"one of {', '.join(get_args(Jacobian))}")
    if way == "pullback":
        with record([regions.stack.layers[i] for i in regions.plan.stages[region].layers]) as tape:
            yield tape
    else:
        with sdpa_kernel(SDPBackend.MATH) if way == "batched" else nullcontext():
            yield None


def interface_jacobian(
    seen: Visit, way: Jacobian = "loop", chunk: int | None = None, trimmed: bool = True
) -> Tensor:
    """J (B, n', n) of one visit, in float32 or better; `chunk` rows or columns at a time, where a way takes
    several. n is the size of what came in, n' of what went out."""
    if chunk is not None and (chunk < 1 or way == "loop"):
        allowed = "at least 1" if chunk < 1 else "left out, since jacobian 'loop' takes one row at a time"
        raise ConfigError(setting="chunk", given=chunk, allowed=allowed)
    out = seen.message_out
    states = out.shape[1]
    dtype = torch.promote_types(out.dtype, torch.float32)  # products of bfloat16 would be off by 4e-3
    if not seen.message_in.numel():  # no segment is over
        return out.new_zeros((len(out), out[0].numel(), 0), dtype=dtype)
    if way == "forward":
        J = _forward(seen, chunk).to(dtype)
    else:
        pull = {"loop": _loop, "batched": _batched, "pullback": _by_hand}[way]
        J = torch.zeros((*out.shape, *seen.message_in.shape[1:]), dtype=dtype, device=out.device)
        for s in range(states):
            basis = _basis(seen.relay_out, out[:, s].detach())
            pulled = pull(seen, s, basis.permute(2, 0, 1).to(out.dtype), chunk, trimmed).to(dtype)
            with torch.autocast(out.device.type, enabled=False):
                J[:, s, :, : pulled.shape[2]] = torch.einsum("bri,ibtq->brtq", basis, pulled)
    return J.flatten(3).flatten(1, 2)


def _basis(relay: BoundedRelay, m: Tensor) -> Tensor:
    """(B, r, q) in float32 or better: the directions in which a state can move, all r where none is known."""
    basis = relay.tangent(m)
    if basis is not None:
        return basis
    exact = torch.promote_types(m.dtype, torch.float32)
    return torch.eye(m.shape[-1], dtype=exact, device=m.device).expand(len(m), -1, -1)


def _prefix(seen: Visit, s: int, trimmed: bool) -> tuple[Tensor, Tensor]:
    """m_{k+1}[s], and the leaf m_k of its graph: of the positions before segment s alone, if trimmed."""
    segment = seen.relay_out.segment
    whole = not trimmed or seen.regions.stack.reads_ahead
    if whole or segment is None or s == seen.message_out.shape[1] - 1:
        return seen.message_out[:, s], seen.message_in
    time = (s + 1) * segment
    inputs, x0 = seen.ctx.inputs[:, :time], seen.ctx.x0[:, :time].detach()
    leaf = seen.message_in[:, : s + 1].detach().requires_grad_()
    ctx = seen.regions.stack.layer_context(x0, inputs)
    if seen.ctx.canvas is not None:
        ctx = replace(ctx, canvas=seen.ctx.canvas[:, :time])
    return seen.regions.visit(seen.region, leaf, ctx)[:, s], leaf


def _loop(seen: Visit, s: int, rows: Tensor, chunk: int | None, trimmed: bool) -> Tensor:
    """Each of `rows` (basis, B, r), cotangents of m_{k+1}[s], pulled back to (basis, B, states, r)."""
    state, leaf = _prefix(seen, s, trimmed)
    return torch.stack([vjp(state, leaf, row) for row in rows])


def _batched(seen: Visit, s: int, rows: Tensor, chunk: int | None, trimmed: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        state, leaf = _prefix(seen, s, trimmed)
    parts = rows.split(chunk or len(rows))
    return torch.cat([vjp(state, leaf, part, batched=True).expand(len(part), *leaf.shape) for part in parts])


def vjp(out: Tensor, leaf: Tensor, cotangent: Tensor, batched: bool = False) -> Tensor:
    """The cotangent of `leaf`, zero where `out` does not depend on it; the graph stays."""
    (pulled,) = torch.autograd.grad(
        out, leaf, cotangent, retain_graph=True, is_grads_batched=batched, materialize_grads=True
    )
    return pulled


def _by_hand(seen: Visit, s: int, rows: Tensor, chunk: int | None, trimmed: bool) -> Tensor:
    """Through LN and Enc, through the blocks, through Dec: the small maps by autograd, the blocks by hand."""
    assert seen.tape is not None, "a visit for a pullback is recorded"
    relay_in, relay_out = (by_hand(seen.regions, k) for k in (seen.region - 1, seen.region))
    pooled, weights, segment = _pooled(seen.tape.output, relay_out, s)
    leaf = seen.message_in[:, : s + 1].detach().requires_grad_()
    state = relay_out.send_pooled(pooled[:, None], leaf[:, s : s + 1])[:, 0]
    to_pooled, direct = torch.autograd.grad(
        state, (pooled, leaf), rows, is_grads_batched=True, retain_graph=True
    )
    if relay_out.settings.causal and s == 0:
        return direct  # segment 0 gets no message: only the sum with m is left
    skip = int(relay_out.settings.causal)
    through = pullback(seen.tape, to_pooled, weights, segment, skip=skip, chunk=chunk)
    decoded = relay_in.decode(leaf[:, : through.shape[2]])
    (lifted,) = torch.autograd.grad(decoded, leaf, through, is_grads_batched=True)
    return direct + lifted


def by_hand(regions: Regions, region: int) -> SegmentRelay:
    """The relay behind a region, whose parts the hand-written pullback must know."""
    relay = regions.relays[region]
    if type(relay) is not SegmentRelay:
        raise ConfigError(
            setting="jacobian",
            given="pullback",
            allowed="loop, batched or forward with this form of interface: it knows segments only",
        )
    return relay


def _pooled(output: Tensor, relay: SegmentRelay, s: int) -> tuple[Tensor, Tensor, int]:
    """The pooled output of segment s as a leaf, its weights over positions, and a segment's length."""
    settings = relay.settings
    if not settings.causal:
        time = output.shape[1]
        return output.mean(1).requires_grad_(), output.new_full((time,), 1 / time), time
    length, time = relay.segment, (s + 1) * relay.segment
    if settings.pool == "tail":
        weights = output.new_zeros(time)
        weights[-1] = 1
        return output[:, s].clone().requires_grad_(), weights, length
    start = 0 if settings.pool == "cumulative" else s * length
    weights = output.new_zeros(time)
    weights[start:] = 1 / (time - start)
    return output[:, start:time].mean(1).requires_grad_(), weights, length


def _forward(seen: Visit, chunk: int | None) -> Tensor:
    """(B, states', r', states, r) by columns: a tangent at one number of m_k, in all samples at once."""
    states, rank = seen.message_in.shape[1:]
    m_k = seen.message_in.detach()

    def transition(m: Tensor) -> Tensor:
        return seen.regions.visit(seen.region, m, seen.ctx)

    def column(tangent: Tensor) -> Tensor:
        return torch.func.jvp(transition, (m_k,), (tangent.expand_as(m_k),))[1]

    basis = torch.eye(states * rank, device=m_k.device, dtype=m_k.dtype).view(-1, states, rank)
    columns = [_checked(column, part) for part in basis.split(chunk or 1)]
    return torch.cat(columns).unflatten(0, (states, rank)).permute(2, 3, 4, 0, 1)


def _checked(column: Callable[[Tensor], Tensor], tangents: Tensor) -> Tensor:
    """Columns for some tangents. The region has run before, so what fails now is forward mode (or memory)."""
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            return torch.func.vmap(column)(tangents) if len(tangents) > 1 else column(tangents[0])[None]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a NotImplementedError is one
        raise StackError(
            f"a layer has no forward-mode derivative ({str(error).splitlines()[0][:80]})",
            setting="jacobian",
            given="forward",
            remedy="use jacobian='loop', which needs none",
        ) from None
