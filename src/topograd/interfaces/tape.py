"""The tape of a forward of GPT blocks, for a hand-written pullback.

Hooks on the blocks' own parts keep, detached, a block's input, its queries, keys and values, the attended
values before and after the output matrix, and the MLP's inner part. From these come the factors that all
cotangents share:

    y = h / ρ,  ρ² = mean h² + ε                          before attention and before the MLP, and for q and k
    P = softmax(q̂ k̂ᵀ / √w)                                q̂, k̂ rotated and normed, w the width of a head
    σ = 2 relu(u),  or  silu(a) and u silu'(a)             ReLU² of u, or SwiGLU with gate a

Shapes: (batch, position, 1, width) where a basis of cotangents will broadcast, (batch·heads, position, ...)
in attention. Memory for each block: B T (6d + m) numbers of the forward, where m is the MLP's inner width, or
twice that with a gate; at first use they become about B T (12d + m) of factors and B H T² probabilities.
Source: as `topograd.interfaces.pullback`, which has the formulas.
Limits: whole sequences of equal length, causal attention, no decoding state, no autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from topograd.errors import StackError
from topograd.nn.transformer.attention import attention_mask, rotate_halves
from topograd.nn.transformer.block import Block


class Desk:
    """Memory for results on the way, used again: fresh pages can cost more than the arithmetic on them."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An array with any content; an earlier array of that name is overwritten."""
        size = math.prod(shape)
        if name not in self.buffers or len(self.buffers[name]) < size:
            self.buffers[name] = torch.empty(size, dtype=self.like.dtype, device=self.like.device)
        return self.buffers[name][:size].view(shape)


class Tape:
    """The record of a region's forward; a second forward replaces the first."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = [_checked(layer) for layer in layers]
        if not self.layers:
            raise StackError(setting="layers", given=[], allowed="at least one block")
        self.desk = Desk(self.layers[0].mlp.up.weight)
        self._taken: list[dict[str, Any]] = [{} for _ in self.layers]
        self._factors: list[Factors] = []

    def factors(self) -> list[Factors]:
        """Those of each block, made at first use."""
        if not self._factors:
            if not all("h" in taken for taken in self._taken):
                raise StackError(
                    "the tape is not full", remedy="run every layer of the region inside `with record`"
                )
            pairs = zip(self.layers, self._taken, strict=True)
            self._factors = [_factors(layer, taken) for layer, taken in pairs]
            for taken in self._taken:
                taken.clear()
        return self._factors

    def attach(self) -> list[RemovableHandle]:
        """Put the hooks in place."""
        handles = []
        for layer, taken in zip(self.layers, self._taken, strict=True):
            attention, mlp = layer.attention, layer.mlp
            parts: dict[str, nn.Module | None] = {
                "query": attention.query,
                "key": attention.key,
                "value": attention.value,
            }
            parts |= {"embedded": attention.value_embedding, "up": mlp.up, "gate": mlp.gate}
            for name, part in parts.items():
                if part is not None:
                    handles.append(part.register_forward_hook(_take_output(taken, name)))
            handles.append(attention.output.register_forward_hook(_take_both(taken)))
            handles.append(layer.register_forward_hook(self._take_call(taken), with_kwargs=True))
        return handles

    def _take_call(self, taken: dict[str, Any]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            call = dict(zip(("h", "ctx", "state", "rows"), args, strict=False)) | named
            ctx, rows = call["ctx"], call.get("rows")
            if call.get("state") is not None or ctx.positions.dim() != 1:
                raise StackError(
                    "a tape holds whole sequences of equal length", remedy="record without a decoding state"
                )
            if ctx.mask is not None:
                raise StackError(
                    setting="jacobian", given="pullback", allowed="another for an encoder, such as loop"
                )
            if torch.is_autocast_enabled(ctx.x0.device.type):
                raise StackError(
                    setting="jacobian", given="pullback", allowed="another with bf16, such as loop"
                )
            x0, rotary = ctx.x0.detach(), ctx.rotary
            taken.update(h=call["h"].detach(), x0=x0, rotary=rotary, rows=rows)
            self._factors = []
            self.output = output.detach()

        return hook


@contextmanager
def record(layers: Sequence[nn.Module]) -> Iterator[Tape]:
    """Tape the forward of these blocks that runs inside; its values and gradients stay as they are."""
    tape = Tape(layers)
    handles = tape.attach()
    try:
        yield tape
    finally:
        for handle in handles:
            handle.remove()


def _checked(layer: nn.Module) -> Block:
    traits = getattr(getattr(layer, "attention", None), "traits", None)
    if type(layer) is Block and traits is not None and traits.norm_behind_rotation:  # the GPT's
        return layer
    raise StackError(
        f"{type(layer).__name__} has no hand-written pullback: only a GPT's block with attention has one",
        setting="jacobian",
        given="pullback",
        remedy="use jacobian='loop'",
    )


def _take_output(taken: dict[str, Any], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        taken[name] = output.detach()

    return hook


def _take_both(taken: dict[str, Any]) -> Callable[..., None]:
    def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        taken["attended"], taken["projected"] = given[0].detach(), output.detach()

    return hook


def dots(x: Tensor, y: Tensor) -> Tensor:
    """x·y along the last axis, which stays: x (..., basis, width), y (..., 1, width); vecdot would write all
    their products first."""
    return x @ y.mT


@dataclass(frozen=True)
class Norm:
    """y = h / ρ and 1 / ρ: (batch, position, 1, width) and (batch, position, 1, 1)."""

    y: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, h: Tensor) -> Norm:
        h = h[:, :, None]
        inverse = (h.square().mean(-1, keepdim=True) + torch.finfo(h.dtype).eps).rsqrt()
        return cls(h * inverse, inverse)

    def __getitem__(self, where: slice) -> Norm:
        return Norm(self.y[:, where], self.inverse[:, where])

    def project(self, x: Tensor) -> Tensor:
        """x - y (y·x) / d, in place: the cotangent of h, but for 1 / ρ, from that of y."""
        return x.addcmul_(self.y, dots(x, self.y), value=-1 / x.shape[-1])


@dataclass(frozen=True)
class Turned:
    """Queries or keys after rotation and norm; the tables of the way back carry 1 / ρ."""

    norm: Norm
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, x: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor | None, heads: int) -> Turned:
        cos, sin = rotary if rows is None else (rotary[0][rows], rotary[1][rows])
        norm = Norm.of(rotate_halves(split(x, heads), cos, sin))
        return cls(norm, cos[:, None] * norm.inverse, sin[:, None] * norm.inverse)

    def back(self, x: Tensor, where: slice, out: Tensor) -> None:
        """Write to out (batch, heads, position, basis, head width) the cotangent before both; x is lost."""
        a, b = self.norm[where].project(x).view(out.shape).chunk(2, dim=-1)
        cos, sin = (table[:, where].unflatten(0, out.shape[:2]) for table in (self.cos, self.sin))
        first, second = out.chunk(2, dim=-1)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)


@dataclass(frozen=True)
class Factors:
    """The factors of one block; axis 1 is the position, or the row, everywhere."""

    layer: Block
    rows: Sequence[int]
    """Positions at which queries and MLP ran, rising: all, but for a last block that ran at a few."""
    entry: Norm
    middle: Norm
    slopes: list[tuple[Tensor, Tensor]]
    """σ, and the matrix before it: one pair, or two with a gate."""
    query: Turned
    key: Turned
    queries: Tensor
    """q̂ / √w, as keys are k̂ / √w: (batch·heads, position, head width)"""
    keys: Tensor
    values: Tensor
    attended: Tensor
    """(batch·heads, row, 1, head width)"""
    probabilities: Tensor
    """(batch·heads, row, position)"""
    maps: tuple[Tensor, Tensor, Tensor]
    """W y of queries, keys and values: (batch, position, 1, inner)"""


@torch.no_grad()
def _factors(layer: Block, taken: dict[str, Any]) -> Factors:
    attention, rows, rotary = layer.attention, taken["rows"], taken["rotary"]
    heads, scale = attention.heads, attention.head_width**-0.5
    h = taken["h"] if layer.x0_scale is None else taken["h"] + layer.x0_scale * taken["x0"]
    value = taken["value"]
    if attention.value_embedding is not None:
        value = value + attention.value_gate * taken["embedded"]
    query = Turned.of(taken["query"], rotary, rows, heads)
    key = Turned.of(taken["key"], rotary, None, attention.kv_heads)
    queries = scale * query.norm.y[:, :, 0]
    keys = _spread(key.norm.y[:, :, 0], heads // attention.kv_heads)
    return Factors(
        layer=layer,
        rows=range(h.shape[1]) if rows is None else rows.tolist(),
        entry=Norm.of(h),
        middle=Norm.of(taken["projected"] + (h if rows is None else h[:, rows])),
        slopes=_slopes(layer, taken),
        query=query,
        key=key,
        queries=queries,
        keys=scale * keys,
        values=_spread(split(value, attention.kv_heads), heads // attention.kv_heads),
        attended=split(taken["attended"], heads)[:, :, None],
        probabilities=_probabilities(queries, keys, rows, attention.window),
        maps=(taken["query"][:, :, None], taken["key"][:, :, None], taken["value"][:, :, None]),
    )


def _probabilities(queries: Tensor, keys: Tensor, rows: Tensor | None, window: int) -> Tensor:
    time = keys.shape[1]
    where = torch.arange(time, device=keys.device) if rows is None else rows
    mask = attention_mask(where[None], time, window)
    assert mask is not None, "positions with a batch axis always get a mask"
    return (queries @ keys.transpose(1, 2)).masked_fill_(~mask[0, 0], -torch.inf).softmax(-1)


def _slopes(layer: Block, taken: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    mlp, up = layer.mlp, taken["up"][:, :, None]
    if mlp.gate is None:
        return [(2 * F.relu(up), mlp.up.weight)]
    gate = taken["gate"][:, :, None]
    logistic = gate.sigmoid()
    slope = logistic * (1 + gate * (1 - logistic))
    return [(gate * logistic, mlp.up.weight), (up * slope, mlp.gate.weight)]


def split(x: Tensor, heads: int) -> Tensor:
    """(batch, position, width) to (batch·heads, position, head width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def _spread(x: Tensor, shared: int) -> Tensor:
    """Each head of keys or values for the `shared` heads of queries that use it."""
    return x if shared == 1 else x.repeat_interleave(shared, 0)
