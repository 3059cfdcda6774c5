"""Described blocks as plain functions of t, open at every node: attention, gated MLPs, compositions.

Statement. Every weight is blockdiag(R, t): a random live block of its own (`networks.live_block`), and dead
channels that it multiplies by t, or by t^α in every head. Chains of more than ALIKE blocks have W_K = W_Q.

    attention    o = softmax(q kᵀ / √d_h) v,  q, k, v = W_Q x, W_K x, W_V x,  output W_O o
    gated MLP    W_d [gate(W_g x) ⊙ W_u x]
    experts      Σ_e p_e E_e(x), p a softmax over the two largest of W_r x, E_e two weights and a tanh
    scan         W_o [y ⊙ silu(W_z x)],  s_n = exp(-Δ_n) s_{n-1} + Δ_n B_nᵀ x'_n,  y_n = C_n s_n

Symbols and shapes. T points t, B samples of n tokens, width d in heads of d_h. x (T, B, n, d). Cost: O(T B
n d (n + d)) for each attention block, O(T B n d²) for all others.
Source: "Dead Directions: Geometric Singular Learning", §9.4 (attention), appendix A.4 (gated MLP), §8
(composition).
Limits. float64. The dead channel is the last one of the last head, or of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from papers.dead_directions.catalogue.networks import (
    NORMS,
    Reading,
    Trace,
    dead_block,
    layer_norm,
    live_block,
    normal,
)
from topograd.geometry.rules.architectures import Attention, Composition, GatedStack, Mixer

GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": torch.relu}


ALIKE = 4
"""In longer chains keys share the weight of the queries, so that a token hears itself most. With weights of
their own the tokens become alike block by block, and from the fifth on the scores' gradient is rounding."""


class Maps:
    """Draws one weight after another, each with a live block of its own."""

    def __init__(self, t: Tensor, width: int, seed: int, dead: Mapping[int, int] | None = None) -> None:
        self._t, self._width, self._seed = t, width, seed + 600
        self._dead = {width - 1: 1} if dead is None else dead

    def draw(self) -> Tensor:
        """The next W: (T, d, d)."""
        self._seed += 1
        live = live_block(self._width - len(self._dead), self._seed, self._t)
        return dead_block(self._t, live, self._dead)

    def __call__(self, x: Tensor) -> Tensor:
        """x Wᵀ with the next W: (T, …, d)."""
        return _mapped(x, self.draw())


def trace_attention(net: Attention, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes Q_p, K_p, V_p, O_p: outputs of block p's projections. Of a chain, its input and output too."""
    x = start = _tokens(t, samples, net.tokens, net.width, seed)
    maps, units = Maps(t, net.width, seed, net.dead), torch.eye(net.width, dtype=t.dtype, device=t.device)
    places = list(net.dead) if net.powers else [net.width - 1]
    along = {i: units[place] for i, place in enumerate(places)}
    memory = _tokens(t, samples, net.tokens, net.width, seed + 7) if net.memory else None

    def read(name: str, at: Tensor) -> dict[str, Reading]:
        return {net.node(name, i): Reading(at, unit) for i, unit in along.items()}

    backward: dict[str, Reading] = {}
    for p in range(1, net.blocks + 1):
        inner = layer_norm(x) if net.wiring == "pre-norm" else x
        parts = attend(
            inner,
            maps,
            net.heads,
            net.causal,
            shared=net.blocks > ALIKE,
            grouped=net.grouped,
            rotary=net.positions != "none",
            memory=memory,
        )
        for part, at in parts.items():
            backward |= read(f"{part}_{p}", at)
        x = parts["O"] if net.wiring == "chain" else x + parts["O"]
    if net.wiring != "chain":
        return Trace(x, backward, {})
    return Trace(x, backward | read("input gradient", start), read("output", x.detach()))


def trace_gated(net: GatedStack, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes gradient_m, at the input of block m, and output."""
    x = normal(samples, net.width, seed=seed, like=t).expand(len(t), -1, -1).requires_grad_()
    dead, backward, maps = _dead(x), {}, Maps(t, net.width, seed)
    for m in range(1, net.blocks + 1):
        backward[f"gradient_{m}"] = Reading(x, dead)
        x = _gated_mlp(x, maps, net.kind)
    return Trace(x, backward, {"output": Reading(x.detach(), dead)})


def trace_composition(net: Composition, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes gradient_m, at the input of block m, and output_m."""
    x = _tokens(t, samples, net.tokens, net.width, seed)
    dead, backward, forward, maps = _dead(x), {}, {}, Maps(t, net.width, seed)
    for m, block in enumerate(net.blocks, 1):
        backward[f"gradient_{m}"] = Reading(x, dead)
        if block.kind == "attention":
            x = attend(x, maps)["O"]
        elif block.kind == "experts":
            x = _experts(x, t, maps, seed + 40 * m)
        elif block.kind == "scan":
            x = _scan(x, t, maps, seed + 40 * m)
        elif block.kind == "residual":
            x = x + maps(x)
        else:
            for _ in range(block.weights):
                x = torch.tanh(maps(x))
        forward[f"output_{m}"] = Reading(x.detach(), dead)
    return Trace(x, backward, forward)


def trace_mixer(net: Mixer, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes gradient_m and stream_m: the residual stream that enters block m, and the one that leaves it."""
    x, norm = _tokens(t, samples, net.tokens, net.width, seed), NORMS[net.norm]
    dead, backward, forward, maps = _dead(x), {}, {}, Maps(t, net.width, seed)
    for m in range(1, net.blocks + 1):
        backward[f"gradient_{m}"] = Reading(x, dead)
        x = x + attend(norm(x), maps)["O"]
        inner = norm(x)
        x = x + (maps(F.gelu(maps(inner))) if net.mlp == "gelu" else _gated_mlp(inner, maps, "swiglu"))
        forward[f"stream_{m}"] = Reading(x.detach(), dead)
    return Trace(x, backward, forward)


def attend(
    x: Tensor,
    maps: Maps,
    heads: int = 1,
    causal: bool = False,
    *,
    shared: bool = False,
    grouped: int = 1,
    rotary: bool = False,
    memory: Tensor | None = None,
) -> dict[str, Tensor]:
    """Outputs of the four projections of one attention block on x (T, B, n, d); "O" is the block's output.

    With `shared`, W_K = W_Q. Of keys and values `grouped` heads share those of the last of them.
    """
    W, read = maps.draw(), x if memory is None else memory
    q, k, v = _mapped(x, W), _mapped(read, W if shared else maps.draw()), maps(read)
    split = [part.unflatten(-1, (heads, -1)).transpose(-2, -3) for part in (q, k, v)]  # (T, B, heads, n, d_h)
    if grouped > 1:
        last = torch.arange(heads, device=x.device) // grouped * grouped + grouped - 1
        split[1:] = [part[:, :, last] for part in split[1:]]
    if rotary:
        split[:2] = [_rotated(part) for part in split[:2]]
    scores = split[0] @ split[1].mT / split[0].shape[-1] ** 0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    mixed = (scores.softmax(-1) @ split[2]).transpose(-2, -3).flatten(-2)
    return {"Q": q, "K": k, "V": v, "O": maps(mixed)}


def _rotated(x: Tensor) -> Tensor:
    """Neighbouring channels turned by n θ_i at position n: (…, n, d_h)."""
    n, pairs = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(n).to(x)[:, None] * 0.5 ** torch.arange(pairs).to(x)
    a, b = x.unflatten(-1, (pairs, 2)).unbind(-1)
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


def _reader(t: Tensor, size: int, width: int, seed: int) -> Tensor:
    """A map (T, size, width) with live rows that read the dead channel, the last, with t."""
    W = normal(size, width, seed=seed, like=t).expand(len(t), -1, -1).clone() / width**0.5
    W[..., -1] *= t[:, None]
    return W


def _experts(x: Tensor, t: Tensor, maps: Maps, seed: int, count: int = 4) -> Tensor:
    scores = x @ _reader(t, count, x.shape[-1], seed).mT[:, None]
    top = scores.topk(2, -1)
    weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values.softmax(-1))
    outputs = torch.stack([maps(torch.tanh(maps(x))) for _ in range(count)], -1)
    return (outputs * weights[..., None, :]).sum(-1)


def _scan(x: Tensor, t: Tensor, maps: Maps, seed: int, states: int = 3) -> Tensor:
    width = x.shape[-1]
    inner, gate = maps(x), F.silu(maps(x))
    B, C = (x @ _reader(t, states, width, seed + i).mT[:, None] for i in range(2))
    step = F.softplus(x @ _reader(t, width, width, seed + 2).mT[:, None])
    state, outputs = torch.zeros(*x.shape[:2], width, states).to(x), []
    for n in range(x.shape[2]):
        put = (step[:, :, n] * inner[:, :, n])[..., None] * B[:, :, n, None]
        state = (-step[:, :, n])[..., None].exp() * state + put
        outputs.append((state * C[:, :, n, None]).sum(-1))
    return maps(torch.stack(outputs, 2) * gate)


def _mapped(x: Tensor, W: Tensor) -> Tensor:
    return (x.flatten(1, -2) @ W.mT).view_as(x)


def _gated_mlp(x: Tensor, maps: Maps, kind: str) -> Tensor:
    return maps(GATES[kind](maps(x)) * maps(x))


def _tokens(t: Tensor, samples: int, tokens: int, width: int, seed: int) -> Tensor:
    x = normal(samples, tokens, width, seed=seed, like=t)
    return x.expand(len(t), -1, -1, -1).requires_grad_()


def _dead(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[-1]
