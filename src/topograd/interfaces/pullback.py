"""Cotangents through a region of GPT blocks, for a whole basis at once, without autograd.

A region is a few consecutive blocks. Its pooled output is p = Σ_t w_t h_out[t]. For each cotangent g of p this
gives the cotangent of the region's input, summed over segments of ℓ positions:

    out[i, b, s] = Σ_{t in segment s} (∂p_b / ∂h_in[b, t])ᵀ g[i, b]

A message is added to all positions of a segment, so only these sums are wanted. Every step is exact:

  - All but g is shared by the basis, so the basis is folded into the rows of matrix products. Arrays are
    (batch, position, basis, width), and a position's own factors broadcast over the basis.
  - Norm, y = h / ρ with ρ² = mean h² + ε:  ḣ = (ẏ - y (y·ẏ) / d) / ρ.
  - Softmax, o = P V:  Ṡ = P ⊙ (ȯ Vᵀ - ȯ·o). Keys go block by block, each with only the queries that see it.
  - In the last block W_downᵀ g is the same at all positions, and positions before the first weight are left
    out: with one weight, at the last position, that block runs there alone.
  - In the first block W_qᵀ, W_kᵀ, W_vᵀ act on sums over segments. The norm needs y_t · Wᵀ ẋ_t = (W y_t) · ẋ_t,
    and x_t = W y_t is on the tape.
  - Blocks are causal: a pool of the first T' positions uses a part of the tape, and before the first wanted
    segment everything is a constant.

Symbols: ẋ is the cotangent of x; B batch, r basis, d width, m inner width of the MLP, H heads.
Shapes: cotangent (r, B, d), weights (T'), result (r, B, segments, d).
Cost in multiply-adds, for each cotangent and sample: T' (4d² + 2md) and about 2T'²d for attention in a middle
block (ReLU²); the last block saves T'md, the first 3T'd². Memory: some 8 r B T' d numbers, and for each block
B H T² probabilities, kept with the tape.
Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", §3.2 and Appendix D.1, where
Jacobians are built by automatic differentiation.
Limits: blocks of `nn/gpt.py` with attention, on whole sequences of equal length; no autocast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import ConfigError, StackError
from topograd.nn.attention import attention_mask, rotate
from topograd.nn.gpt import Attention, Block

KEYS = 64
"""Keys in one block of attention: fewer skip more of what nobody sees, more make larger products."""
ROWS = 1024
"""Rows of the MLP's inner width that live at a time."""


class Tape:
    """What one forward of a region leaves for its pullback; a second forward replaces the first."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = [_checked(layer) for layer in layers]
        if not self.layers:
            raise StackError("a region of no layers has no pullback; record at least one block")
        self._taken: list[dict[str, Any]] = [{} for _ in self.layers]
        self._constants: list[_Constants] = []

    def constants(self) -> list[_Constants]:
        """Each block's factors, made from what was taken at first use."""
        if any("h" not in taken for taken in self._taken):
            raise StackError("the tape is empty; run all layers of the region inside `with record(layers)`")
        if not self._constants:
            pairs = zip(self.layers, self._taken, strict=True)
            self._constants = [_constants(layer, taken) for layer, taken in pairs]
        return self._constants

    def _hooks(self) -> Iterator[Any]:
        for layer, taken in zip(self.layers, self._taken, strict=True):
            attention, mlp = layer.attention, layer.mlp
            parts = {"query": attention.query, "key": attention.key, "value": attention.value}
            parts |= {"embedded": attention.value_embedding, "up": mlp.up, "gate": mlp.gate}
            for name, part in parts.items():
                if part is not None:
                    yield part.register_forward_hook(_take(taken, name))
            yield attention.output.register_forward_hook(_take(taken, "projected", "attended"))
            yield layer.register_forward_hook(self._take_call(taken), with_kwargs=True)

    def _take_call(self, taken: dict[str, Any]) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
            call = dict(zip(("h", "bus", "state", "rows"), args, strict=False)) | kwargs
            bus = call["bus"]
            if call.get("state") is not None or bus.positions.dim() != 1:
                raise StackError("a pullback wants whole sequences of equal length; record without a state")
            taken.update(h=call["h"].detach(), x0=bus.x0.detach(), rows=call.get("rows"))
            taken.update(rotary=bus.extras["rotary"])
            self._constants = []

        return hook


@contextmanager
def record(layers: Sequence[nn.Module]) -> Iterator[Tape]:
    """Tape the forward of these blocks that runs inside; values and gradients of that forward stay as they are."""
    tape = Tape(layers)
    handles = list(tape._hooks())
    try:
        yield tape
    finally:
        for handle in handles:
            handle.remove()


def _checked(layer: nn.Module) -> Block:
    if isinstance(layer, Block) and isinstance(layer.attention, Attention):
        return layer
    raise StackError(
        f"{type(layer).__name__} has no hand-written pullback, only a Block with attention has; "
        "use jacobian='loop'"
    )


def _take(taken: dict[str, Any], output: str, given: str | None = None) -> Any:
    def hook(_: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        taken[output] = result.detach()
        if given is not None:
            taken[given] = args[0].detach()

    return hook


@dataclass(frozen=True)
class _Norm:
    """y = h / ρ and 1 / ρ, with an axis for the basis: (batch, position, 1, width) and (batch, position, 1, 1)."""

    y: Tensor
    inverse: Tensor

    def __getitem__(self, where: slice) -> _Norm:
        return _Norm(self.y[:, where], self.inverse[:, where])

    def project(self, x: Tensor) -> Tensor:
        """x - y (y·x) / d, in place."""
        return x.addcmul_(self.y, torch.linalg.vecdot(x, self.y)[..., None], value=-1 / x.shape[-1])


@dataclass(frozen=True)
class _Turned:
    """Queries or keys after rotation and norm. The first axis runs over samples and heads."""

    norm: _Norm
    cos: Tensor
    sin: Tensor

    def back(self, x: Tensor, where: slice, batch: int) -> Tensor:
        """(batch·heads, position, basis, head width) to the cotangent before both, with heads joined."""
        a, b = self.norm[where].project(x).chunk(2, dim=-1)
        cos, sin = self.cos[:, where], self.sin[:, where]
        return _join(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), batch)


@dataclass(frozen=True)
class _Constants:
    """The factors of one block that all cotangents share. Positions, or rows, are axis 1 everywhere."""

    layer: Block
    rows: Sequence[int]
    """Positions at which queries and MLP ran."""
    entry: _Norm
    middle: _Norm
    slopes: list[tuple[Tensor, Tensor]]
    """Derivative of the MLP's inner part, and the matrix before it: one pair, or two with a gate."""
    query: _Turned
    key: _Turned
    queries: Tensor
    keys: Tensor
    values: Tensor
    """(batch·heads, position, head width), as are queries and keys, which carry the softmax's scale."""
    attended: Tensor
    probabilities: Tensor
    """(batch·heads, row, position)"""
    maps: tuple[Tensor, Tensor, Tensor]
    """W y of the queries, keys and values: (batch, position, 1, inner)"""


@torch.no_grad()
def _constants(layer: Block, taken: dict[str, Any]) -> _Constants:
    attention, rows = layer.attention, taken["rows"]
    heads, shared = attention.heads, attention.heads // attention.kv_heads
    h = taken["h"] if layer.x0_scale is None else taken["h"] + layer.x0_scale * taken["x0"]
    query = _turned(taken["query"], taken["rotary"], rows, heads)
    key = _turned(taken["key"], taken["rotary"], None, attention.kv_heads)
    value = taken["value"]
    if "embedded" in taken:
        value = value + attention.value_gate * taken["embedded"]
    scale = attention.head_width**-0.5
    k = _spread(key.norm.y[:, :, 0], shared)
    scores = scale * query.norm.y[:, :, 0] @ k.transpose(1, 2)
    time = h.shape[1]
    where = torch.arange(time, device=h.device) if rows is None else rows
    mask = attention_mask(where[None], time, attention.window)
    assert mask is not None, "positions with a batch axis always get a mask"
    return _Constants(
        layer=layer,
        rows=range(time) if rows is None else rows.tolist(),
        entry=_norm(h),
        middle=_norm(taken["projected"] + (h if rows is None else h[:, rows])),
        slopes=_slopes(layer, taken),
        query=query,
        key=key,
        queries=scale * query.norm.y[:, :, 0],
        keys=scale * k,
        values=_spread(_split(value, attention.kv_heads), shared),
        attended=_split(taken["attended"], heads)[:, :, None],
        probabilities=scores.masked_fill_(~mask[0, 0], -torch.inf).softmax(-1),
        maps=(taken["query"][:, :, None], taken["key"][:, :, None], taken["value"][:, :, None]),
    )


def _norm(h: Tensor) -> _Norm:
    h = h[:, :, None]
    inverse = (h.square().mean(-1, keepdim=True) + torch.finfo(h.dtype).eps).rsqrt()
    return _Norm(h * inverse, inverse)


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor | None, heads: int) -> _Turned:
    cos, sin = rotary
    if rows is not None:
        cos, sin = cos[rows], sin[rows]
    norm = _norm(rotate(_split(x, heads), cos, sin))
    return _Turned(norm, cos[:, None] * norm.inverse, sin[:, None] * norm.inverse)


def _slopes(layer: Block, taken: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    mlp, up = layer.mlp, taken["up"][:, :, None]
    if mlp.gate is None:
        return [(2 * F.relu(up), mlp.up.weight)]
    gate = taken["gate"][:, :, None]
    logistic = gate.sigmoid()
    slope = logistic * (1 + gate * (1 - logistic))
    return [(gate * logistic, mlp.up.weight), (up * slope, mlp.gate.weight)]


def _split(x: Tensor, heads: int) -> Tensor:
    """(batch, position, ..., width) to (batch·heads, position, ..., head width)."""
    return x.unflatten(-1, (heads, -1)).movedim(-2, 1).flatten(0, 1)


def _join(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).movedim(1, -2).flatten(-2)


def _spread(x: Tensor, shared: int) -> Tensor:
    """Each head of keys or values for the `shared` heads of queries that use it."""
    return x if shared == 1 else x.repeat_interleave(shared, 0)


@dataclass(frozen=True)
class _Span:
    """The part of a block that is wanted: positions start..stop-1, and the block's rows first..last-1."""

    positions: slice
    rows: slice
    at: slice | list[int]
    """Where the rows lie among the positions."""


def _span(block: _Constants, start: int, stop: int, asked: int) -> _Span:
    first, last = bisect_left(block.rows, asked), bisect_left(block.rows, stop)
    rows = block.rows[first:last]
    at: slice | list[int] = [row - start for row in rows]
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        at = slice(rows[0] - start, rows[-1] - start + 1)
    return _Span(slice(start, stop), slice(first, last), at)


@torch.no_grad()
def pullback(
    tape: Tape, cotangent: Tensor, weights: Tensor, segment: int, skip: int = 0, chunk: int | None = None
) -> Tensor:
    """Cotangents (basis, batch, segments - skip, width) of the input, summed over each segment of positions.

    `cotangent` (basis, batch, width) belongs to Σ_t weights[t] h_out[t], over the first len(weights) positions.
    The first `skip` segments are constants: their sums are not wanted. `chunk` cotangents run at a time.
    """
    blocks = tape.constants()
    first = _first_weight(blocks, cotangent, weights, segment, skip)
    start, stop = skip * segment, len(weights)
    spans = [_span(block, start, stop, start) for block in blocks[:-1]]
    spans.append(_span(blocks[-1], start, stop, max(start, first)))
    pooled = weights[list(blocks[-1].rows[spans[-1].rows])].to(cotangent)
    sizes = chunk or len(cotangent)
    parts = [_pull(blocks, spans, g.transpose(0, 1), pooled, segment) for g in cotangent.split(sizes)]
    return torch.cat(parts, dim=2).movedim(2, 0)


def _first_weight(
    blocks: list[_Constants], cotangent: Tensor, weights: Tensor, segment: int, skip: int
) -> int:
    """The first position with a weight, after a look at everything that the caller gave."""
    batch, time, _, width = blocks[0].entry.y.shape
    if cotangent.dim() != 3 or cotangent.shape[1:] != (batch, width) or not len(cotangent):
        raise ConfigError(
            f"the cotangent has shape {tuple(cotangent.shape)}; it must be (basis, {batch}, {width}), "
            "as the tape's batch and width"
        )
    if weights.dim() != 1 or not 1 <= len(weights) <= time:
        raise ConfigError(
            f"the weights have shape {tuple(weights.shape)}; give one for each of at most {time} taped positions"
        )
    if segment < 1 or len(weights) % segment or not 0 <= skip < len(weights) // segment:
        raise ConfigError(
            f"{len(weights)} positions in segments of {segment}, {skip} of them skipped, leave no whole segments; "
            "choose a divisor, and skip fewer than there are"
        )
    weighted = weights.nonzero()[:, 0].tolist()
    if not set(weighted) <= set(blocks[-1].rows):
        raise ConfigError(
            f"positions {weighted} have weights, but the last block ran at {list(blocks[-1].rows)}; "
            "record it at all positions that the pool reads"
        )
    return weighted[0] if weighted else len(weights) - 1


def _pull(
    blocks: list[_Constants], spans: list[_Span], g: Tensor, weights: Tensor, segment: int
) -> Tensor:
    """One chunk, with the batch first: g (batch, basis, width) to (batch, segments, basis, width)."""
    last = blocks[-1]
    c = g[:, None].repeat(1, len(weights), 1, 1)
    _mlp(last, c, spans[-1], g[:, None] @ last.layer.mlp.down.weight)
    c *= weights[:, None, None]
    for i in range(len(blocks) - 1, 0, -1):
        c = _entry(blocks[i], c, spans[i], _attention(blocks[i], c, spans[i]))
        _mlp(blocks[i - 1], c, spans[i - 1])
    return _segments(blocks[0], c, spans[0], _attention(blocks[0], c, spans[0]), segment)


def _mlp(block: _Constants, c: Tensor, span: _Span, inner: Tensor | None = None) -> None:
    """Add to c, in place, what comes back through the MLP; `inner` is c W_down where positions share it."""
    batch, time, basis, width = c.shape
    step = max(1, ROWS // (batch * basis))
    for t in range(0, time, step):
        here = slice(span.rows.start + t, span.rows.start + min(t + step, time))
        part = c[:, t : t + step]
        z = part @ block.layer.mlp.down.weight if inner is None else inner
        x = sum((z * slope[:, here]) @ weight for slope, weight in block.slopes)
        norm = block.middle[here]
        part.addcmul_(norm.project(x), norm.inverse)


def _attention(block: _Constants, c: Tensor, span: _Span) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the queries, keys and values before rotation and norm: (batch, position, basis, inner)."""
    attention = block.layer.attention
    batch, basis = len(c), c.shape[2]
    g = _split(c @ attention.output.weight, attention.heads)
    own = torch.linalg.vecdot(g, block.attended[:, span.rows])[..., None]
    heads, asked, _, width = g.shape
    start, stop = span.positions.start, span.positions.stop
    q = torch.zeros_like(g)
    k, v = (g.new_zeros(heads, stop - start, basis, width) for _ in range(2))
    for s, e in _key_blocks(start, stop):
        i = bisect_left(block.rows, s, span.rows.start, span.rows.stop)
        j = span.rows.stop
        if attention.window:
            j = bisect_left(block.rows, e - 1 + attention.window, i, j)
        if i == j:
            continue
        seen = slice(i - span.rows.start, j - span.rows.start)
        p = block.probabilities[:, i:j, s:e]
        x = torch.bmm(g[:, seen].flatten(1, 2), block.values[:, s:e].transpose(1, 2))
        x = x.view(heads, j - i, basis, e - s).sub_(own[:, seen]).mul_(p[:, :, None])
        q[:, seen].flatten(1, 2).baddbmm_(x.flatten(1, 2), block.keys[:, s:e])
        if s >= start:
            y = torch.bmm(x.flatten(2).transpose(1, 2), block.queries[:, i:j])
            k[:, s - start : e - start] = y.view(heads, basis, e - s, width).transpose(1, 2)
            y = torch.bmm(p.transpose(1, 2), g[:, seen].flatten(2))
            v[:, s - start : e - start] = y.view(heads, e - s, basis, width)
    shared = attention.heads // attention.kv_heads
    if shared > 1:
        k, v = (x.unflatten(0, (-1, shared)).sum(1) for x in (k, v))
    return (
        block.query.back(q, span.rows, batch),
        block.key.back(k, span.positions, batch),
        _join(v, batch),
    )


def _key_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most KEYS positions; one of them begins at `start`."""
    for low, high in ((0, start), (start, stop)):
        for s in range(low, high, KEYS):
            yield s, min(s + KEYS, high)


def _entry(block: _Constants, c: Tensor, span: _Span, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The cotangent of the block's input at all wanted positions."""
    attention, norm = block.layer.attention, block.entry[span.positions]
    query, key, value = parts
    x = key @ attention.key.weight
    x.flatten(0, 2).addmm_(value.flatten(0, 2), attention.value.weight)
    x[:, span.at] += query @ attention.query.weight
    norm.project(x).mul_(norm.inverse)
    x[:, span.at] += c
    return x


def _segments(
    block: _Constants, c: Tensor, span: _Span, parts: tuple[Tensor, Tensor, Tensor], segment: int
) -> Tensor:
    """The same, summed over segments before the products: (batch, segments, basis, width)."""
    attention, norm = block.layer.attention, block.entry[span.positions]
    batch, time, _, width = norm.y.shape
    basis = c.shape[2]
    ones = torch.eye(time // segment, dtype=c.dtype, device=c.device).repeat_interleave(segment, 1)
    scaled = ones * norm.inverse[:, None, :, 0, 0]
    out = (ones[:, span.at] @ c.flatten(2)).unflatten(-1, (basis, width))
    dots = c.new_zeros(batch, time, basis)
    matrices = (attention.query.weight, attention.key.weight, attention.value.weight)
    spots = (span.at, slice(None), slice(None))
    wheres = (span.rows, span.positions, span.positions)
    for x, matrix, taped, where, at in zip(parts, matrices, block.maps, wheres, spots, strict=True):
        dots[:, at] += torch.linalg.vecdot(x, taped[:, where])
        out += (scaled[..., at] @ x.flatten(2)).unflatten(-1, (basis, -1)) @ matrix
    rays = scaled[:, :, None] * dots.transpose(1, 2)[:, None]
    return out.flatten(1, 2).baddbmm(rays.flatten(1, 2), norm.y[:, :, 0], alpha=-1 / width).view_as(out)
