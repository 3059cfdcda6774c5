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
from topograd.nn.stack import Bus

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
            if call.get("state") is not None or call["bus"].positions.dim() != 1:
                raise StackError("a pullback wants whole sequences of equal length; record without a state")
            taken |= {"h": call["h"].detach(), "bus": call["bus"], "rows": call.get("rows")}
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
    """y = h / ρ, both with an axis for the basis: (batch, position, 1, width) and (batch, position, 1, 1)."""

    y: Tensor
    inverse: Tensor
    """1 / ρ"""

    def __getitem__(self, where: slice) -> _Norm:
        return _Norm(self.y[:, where], self.inverse[:, where])

    def project(self, x: Tensor) -> Tensor:
        """x - y (y·x) / d, in place."""
        return x.addcmul_(self.y, torch.linalg.vecdot(x, self.y)[..., None], value=-1 / x.shape[-1])

    def back(self, x: Tensor) -> Tensor:
        """The cotangent of h from that of y, in place."""
        return self.project(x).mul_(self.inverse)


def _norm(h: Tensor) -> _Norm:
    h = h[:, :, None]
    inverse = (h.square().mean(-1, keepdim=True) + torch.finfo(h.dtype).eps).rsqrt()
    return _Norm(h * inverse, inverse)


@dataclass(frozen=True)
class _Turned:
    """Queries or keys after rotation and norm, one row of the first axis for each sample and head."""

    norm: _Norm
    cos: Tensor
    sin: Tensor
    heads: int

    def back(self, x: Tensor, where: slice) -> Tensor:
        """(batch·heads, position, basis, head width) to the cotangent (batch, position, basis, width)."""
        x = self.norm[where].project(x)
        cos, sin = self.cos[:, where], self.sin[:, where]
        a, b = x.chunk(2, dim=-1)
        return _join(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), self.heads)


@dataclass(frozen=True)
class _Constants:
    """The factors of one block that all cotangents share; position is axis 1 everywhere."""

    layer: Block
    rows: Sequence[int]
    """Positions at which the block ran its queries and its MLP."""
    entry: _Norm
    middle: _Norm
    slopes: list[tuple[Tensor, Tensor]]
    """Derivative of the MLP's inner activations, and the matrix behind it: one pair, or two with a gate."""
    query: _Turned
    key: _Turned
    values: Tensor
    attended: Tensor
    probabilities: Tensor
    maps: dict[str, Tensor]
    """x = W y of the queries, keys and values: (batch, position, 1, inner)"""


@torch.no_grad()
def _constants(layer: Block, taken: dict[str, Any]) -> _Constants:
    attention, bus, rows = layer.attention, taken["bus"], taken["rows"]
    heads, kv_heads = attention.heads, attention.kv_heads
    h = taken["h"] if layer.x0_scale is None else taken["h"] + layer.x0_scale * bus.x0
    middle = taken["projected"] + (h if rows is None else h[:, rows])
    v = taken["value"]
    if "embedded" in taken:
        v = v + attention.value_gate * taken["embedded"]
    query = _turned(taken["query"], bus, rows, heads)
    key = _turned(taken["key"], bus, None, kv_heads)
    return _Constants(
        layer=layer,
        rows=range(h.shape[1]) if rows is None else rows.tolist(),
        entry=_norm(h),
        middle=_norm(middle),
        slopes=_slopes(layer, taken),
        query=query,
        key=key,
        values=_split(v, kv_heads).repeat_interleave(heads // kv_heads, 0),
        attended=_split(taken["attended"], heads)[:, :, None],
        probabilities=_probabilities(layer, query, key, bus, rows),
        maps={name: taken[name][:, :, None] for name in ("query", "key", "value")},
    )
