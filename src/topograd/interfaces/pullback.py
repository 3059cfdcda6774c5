"""Cotangents through a region of GPT blocks, for a whole basis at once, without autograd.

A region is a few consecutive blocks. Its pooled output is p = Σ_t w_t h_out[t]. For each cotangent g of p
this gives the cotangent of the region's input, summed over segments of ℓ positions:

    out[i, b, s] = Σ_{t in segment s} (∂p_b / ∂h_in[b, t])ᵀ g[i, b]

A message is added to all positions of a segment, so only these sums are wanted. Every step is exact:

  - All but g is shared by the basis, so the basis is folded into the rows of matrix products. Arrays are
    (batch, position, basis, width), and a position's own factors broadcast over the basis.
  - Norm, y = h / ρ:  ḣ = (ẏ - y (y·ẏ) / d) / ρ.
  - Softmax, o = P V:  Ṡ = P ⊙ (ȯ Vᵀ - ȯ·o). Keys go block by block, each with only the queries that see it.
  - In the last block W_downᵀ g is the same at all positions, and positions before the first weight are left
    out: with one weight, at the last position, that block runs there alone.
  - In the first block W_qᵀ, W_kᵀ, W_vᵀ act on sums over segments. The norm needs y_t · Wᵀ ẋ_t = x_t · ẋ_t,
    and x_t = W y_t is on the tape.
  - Blocks are causal: a pool of the first T' positions uses a part of the tape, and all that comes before the
    first wanted segment is constant.

Symbols: ẋ is the cotangent of x; B batch, r basis, d width, m inner width of the MLP, H heads.
Shapes: cotangent (r, B, d), weights (T'), result (r, B, segments, d).
Cost in multiply-adds, for each cotangent and sample: T'(4d² + 2md) and about 2T'²d for attention in a middle
block (ReLU²); the last block saves T'md, the first 3T'd². Memory: about 10 r B T' d numbers, which the
tape keeps.
Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", §3.2 and Appendix D.1, where the
Jacobians are built by automatic differentiation.
Limits: blocks of `nn/gpt.py` with attention; see `topograd.interfaces.tape`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.interfaces.tape import Desk, Factors, Tape, dots, record
from topograd.nn.host_numbers import send

__all__ = ["Tape", "pullback", "record"]

KEYS = 64
"""Keys in one block of attention: fewer skip more masked keys, more make larger products."""
ROWS = 1024
"""Rows of the MLP's inner part that live at a time."""


@dataclass(frozen=True)
class _Span:
    """The part of a block that is wanted: a range of positions, and a range of the block's rows."""

    positions: slice
    rows: slice
    at: slice | list[int]
    """Where the rows lie among the positions."""


@torch.no_grad()
def pullback(
    tape: Tape, cotangent: Tensor, weights: Tensor, segment: int, skip: int = 0, chunk: int | None = None
) -> Tensor:
    """Cotangents (basis, batch, segments - skip, width) of the input, summed over each segment of positions.

    `cotangent` (basis, batch, width) is that of Σ_t weights[t] h_out[t], t < len(weights).
    The first `skip` segments get no message: their sums are left out. `chunk` cotangents run at a time.
    """
    blocks = tape.factors()
    first = _first_weight(blocks, cotangent, weights, segment, skip)
    start, stop = skip * segment, len(weights)
    spans = [_span(block, start, stop, start) for block in blocks[:-1]]
    spans.append(_span(blocks[-1], start, stop, max(start, first)))
    rows = send(list(blocks[-1].rows[spans[-1].rows]), weights.device)
    pooled = weights[rows].to(cotangent)
    chunks = cotangent.transpose(0, 1).split(chunk or len(cotangent), dim=1)
    parts = [_pull(tape.desk, blocks, spans, g, pooled, segment) for g in chunks]
    return torch.cat(parts, dim=2).movedim(2, 0)


def _first_weight(blocks: list[Factors], cotangent: Tensor, weights: Tensor, segment: int, skip: int) -> int:
    """The first position with a weight, once all that the caller gave is found to fit."""
    batch, time, _, width = blocks[0].entry.y.shape
    if cotangent.dim() != 3 or cotangent.shape[1:] != (batch, width) or not len(cotangent):
        raise ConfigError(
            setting="cotangent",
            given=tuple(cotangent.shape),
            allowed=f"of shape (basis, {batch}, {width}), with the tape's batch and width",
        )
    if weights.dim() != 1 or not 1 <= len(weights) <= time:
        raise ConfigError(
            setting="weights",
            given=tuple(weights.shape),
            allowed=f"one for each of the first positions, at most the {time} that were taped",
        )
    if segment < 1 or len(weights) % segment or not 0 <= skip < len(weights) // segment:
        raise ConfigError(
            f"{len(weights)} positions do not make whole segments of {segment} of which {skip} are skipped",
            setting="segment",
            given=segment,
            remedy="choose a divisor, and skip fewer than all",
        )
    weighted = [place for place, weight in enumerate(weights.tolist()) if weight != 0]
    if not set(weighted) <= set(blocks[-1].rows):
        raise ConfigError(
            f"the pool reads positions {weighted}, but the last block ran at {list(blocks[-1].rows)} only",
            setting="weights",
            given=weighted,
            remedy="record it at all that the pool reads",
        )
    return weighted[0] if weighted else len(weights) - 1


def _span(block: Factors, start: int, stop: int, asked: int) -> _Span:
    first, last = bisect_left(block.rows, asked), bisect_left(block.rows, stop)
    at = [row - start for row in block.rows[first:last]]
    solid = bool(at) and at[-1] - at[0] == len(at) - 1
    return _Span(slice(start, stop), slice(first, last), slice(at[0], at[-1] + 1) if solid else at)


def _pull(
    desk: Desk, blocks: list[Factors], spans: list[_Span], g: Tensor, weights: Tensor, segment: int
) -> Tensor:
    """One chunk, with the batch first: g (batch, basis, width) to (batch, segments, basis, width)."""
    batch, basis, width = g.shape
    c = desk.take(f"cotangent {len(blocks) % 2}", batch, len(weights), basis, width).copy_(g[:, None])
    _mlp(desk, blocks[-1], spans[-1], c, g[:, None] @ blocks[-1].layer.mlp.down.weight)
    c *= weights[:, None, None]
    for i in range(len(blocks) - 1, 0, -1):
        parts = _attention(desk, blocks[i], spans[i], c)
        out = desk.take(f"cotangent {i % 2}", batch, parts[1].shape[1], basis, width)
        c = _entry(blocks[i], spans[i], c, parts, out)
        _mlp(desk, blocks[i - 1], spans[i - 1], c)
    return _segments(blocks[0], spans[0], c, _attention(desk, blocks[0], spans[0], c), segment)


def _mlp(desk: Desk, block: Factors, span: _Span, c: Tensor, shared: Tensor | None = None) -> None:
    """Add to c what comes back through the MLP; `shared` is c W_down where all positions have the same c."""
    batch, time, basis, width = c.shape
    down = block.layer.mlp.down.weight
    step = max(1, ROWS // (batch * basis))
    for t in range(0, time, step):
        part = c[:, t : t + step]
        here = slice(span.rows.start + t, span.rows.start + t + part.shape[1])
        flat, inner = (part.numel() // width, down.shape[1]), (*part.shape[:3], down.shape[1])
        z = shared
        if z is None:
            z = desk.take("behind down", *inner)
            torch.mm(part.reshape(-1, width), down, out=z.view(flat))
        x = desk.take("before the MLP", flat[0], width)
        for n, (slope, weight) in enumerate(block.slopes):
            own = shared is None and n == len(block.slopes) - 1
            a = torch.mul(z, slope[:, here], out=z if own else desk.take("behind up", *inner))
            torch.addmm(x, a.view(flat), weight, beta=float(n > 0), out=x)
        norm = block.middle[here]
        part.addcmul_(norm.project(x.view(part.shape)), norm.inverse)


def _attention(desk: Desk, block: Factors, span: _Span, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents behind the maps to queries, keys and values: (batch, position, basis, inner)."""
    attention = block.layer.attention
    batch, rows, basis, width = c.shape
    heads, time = attention.heads, span.positions.stop - span.positions.start
    shape = (batch, heads, rows, basis, attention.head_width)
    flat = desk.take("flat", batch * rows * basis, width)
    torch.mm(c.flatten(0, 2), attention.output.weight, out=flat)
    g = desk.take("attended", *shape).copy_(flat.view(batch, rows, basis, heads, -1).permute(0, 3, 1, 2, 4))
    q, k, v = _heads(desk, block, span, g.flatten(0, 1))
    if attention.kv_heads < heads:
        k, v = (x.unflatten(0, (-1, heads // attention.kv_heads)).sum(1) for x in (k, v))
    joined = [
        desk.take(name, batch, count, basis, len(x) // batch, attention.head_width)
        for name, count, x in (("queries", rows, q), ("keys", time, k), ("values", time, v))
    ]
    views = [x.permute(0, 3, 1, 2, 4) for x in joined]
    block.query.back(q, span.rows, views[0])
    block.key.back(k, span.positions, views[1])
    views[2].copy_(v.view(views[2].shape))
    return joined[0].flatten(3), joined[1].flatten(3), joined[2].flatten(3)


def _heads(desk: Desk, block: Factors, span: _Span, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of turned queries, turned keys and values, from that of the attended values.

    All are (batch·heads, position, basis, head width), for the wanted rows and the wanted positions.
    """
    heads, _, basis, width = g.shape
    start, stop, first = span.positions.start, span.positions.stop, span.rows.start
    own = dots(g, block.attended[:, span.rows])
    q = desk.take("q", *g.shape)
    k, v = (desk.take(name, heads, stop - start, basis, width) for name in "kv")
    tiles = list(_tiles(block, span))
    whole = bool(tiles) and tiles[-1][1] == stop and not block.layer.attention.window
    for x in () if whole else (q, k, v):  # else the first keys reach all rows, and all keys are reached
        x.zero_()
    for s, e, i, j in tiles:
        asked, count = g[:, i - first : j - first], e - s
        p = block.probabilities[:, i:j, s:e]
        x = desk.take("scores", heads, (j - i) * basis, count)
        torch.bmm(asked.flatten(1, 2), block.values[:, s:e].transpose(1, 2), out=x)
        x = x.view(heads, j - i, basis, count)
        x.sub_(own[:, i - first : j - first]).mul_(p[:, :, None])
        into = q[:, i - first : j - first].flatten(1, 2)
        into.baddbmm_(x.flatten(1, 2), block.keys[:, s:e], beta=float(not whole or s > 0))
        if s >= start:
            y = desk.take("tile", heads, basis * count, width)
            torch.bmm(x.flatten(2).transpose(1, 2), block.queries[:, i:j], out=y)
            k[:, s - start : e - start] = y.view(heads, basis, count, width).transpose(1, 2)
            torch.bmm(p.transpose(1, 2), asked.flatten(2), out=y.view(heads, count, basis * width))
            v[:, s - start : e - start] = y.view(heads, count, basis, width)
    return q, k, v


def _tiles(block: Factors, span: _Span) -> Iterator[tuple[int, int, int, int]]:
    """Keys s..e-1 and the rows i..j-1 that see some of them. None crosses the first position."""
    start, stop, window = span.positions.start, span.positions.stop, block.layer.attention.window
    for low, high in ((0, start), (start, stop)):
        for s in range(low, high, KEYS):
            e = min(s + KEYS, high)
            i = bisect_left(block.rows, s, span.rows.start, span.rows.stop)
            j = bisect_left(block.rows, e - 1 + window, i, span.rows.stop) if window else span.rows.stop
            if i < j:
                yield s, e, i, j


def _entry(
    block: Factors, span: _Span, c: Tensor, parts: tuple[Tensor, Tensor, Tensor], out: Tensor
) -> Tensor:
    """Write to `out` the cotangent of the block's input, at all wanted positions."""
    attention, norm = block.layer.attention, block.entry[span.positions]
    query, key, value = parts
    torch.mm(key.flatten(0, 2), attention.key.weight, out=out.flatten(0, 2))
    out.flatten(0, 2).addmm_(value.flatten(0, 2), attention.value.weight)
    if query.shape[1] == key.shape[1]:
        out.flatten(0, 2).addmm_(query.flatten(0, 2), attention.query.weight)
    else:
        out[:, span.at] += query @ attention.query.weight
    norm.project(out)
    if out.shape == c.shape:
        return torch.addcmul(c, out, norm.inverse, out=out)
    out.mul_(norm.inverse)
    out[:, span.at] += c
    return out


def _segments(
    block: Factors, span: _Span, c: Tensor, parts: tuple[Tensor, Tensor, Tensor], segment: int
) -> Tensor:
    """The cotangent of the block's input, summed before the products: (batch, segments, basis, width)."""
    attention, norm = block.layer.attention, block.entry[span.positions]
    batch, time, _, width = norm.y.shape
    basis = c.shape[2]
    ones = torch.eye(time // segment, dtype=c.dtype, device=c.device).repeat_interleave(segment, 1)
    scaled = ones * norm.inverse[:, None, :, 0, 0]
    out = (ones[:, span.at] @ c.flatten(2)).unflatten(-1, (basis, width))
    along = c.new_zeros(batch, time, basis)
    everywhere = (span.positions, slice(None))
    for x, layer, taped, (where, at) in zip(
        parts,
        (attention.query, attention.key, attention.value),
        block.maps,
        ((span.rows, span.at), everywhere, everywhere),
        strict=True,
    ):
        along[:, at] += dots(x, taped[:, where])[..., 0]
        out += (scaled[..., at] @ x.flatten(2)).unflatten(-1, (basis, -1)) @ layer.weight
    rays = scaled[:, :, None] * along.transpose(1, 2)[:, None]
    return out.flatten(1, 2).baddbmm_(rays.flatten(1, 2), norm.y[:, :, 0], alpha=-1 / width).view_as(out)
