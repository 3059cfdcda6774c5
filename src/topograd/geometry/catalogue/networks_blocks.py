"""Described blocks as plain functions of t, open at every node: attention, gated MLPs, compositions.

Statement. All weights are diag(1, …, 1, t), so that x Wᵀ multiplies the last channel by t: no matrix is
formed.

    attention    o = softmax(q kᵀ / √d_h) v,  q, k, v = W_Q x, W_K x, W_V x,  output W_O o
    gated MLP    W_d [gate(W_g x) ⊙ W_u x]

Symbols and shapes. T points t, B samples of n tokens, width d in heads of d_h. x (T, B, n, d). Cost: O(T B
n² d) for each attention block, O(T B n d) for all others.
Source: "Dead Directions: Geometric Singular Learning", §9.4 (attention), appendix A.4 (gated MLP), §8
(composition).
Limits. float64. The dead channel is the last one of the last head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.geometry.catalogue.architectures import Attention, Composition, GatedStack, Mixer
from topograd.geometry.catalogue.networks import NORMS, Reading, Trace, layer_norm, normal

GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": torch.relu}


def trace_attention(net: Attention, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes Q_p, K_p, V_p, O_p: outputs of block p's projections. Of a chain, its input and output too."""
    x = start = _tokens(t, samples, net.tokens, net.width, seed)
    dead, backward = _dead(x), dict[str, Reading]()
    for p in range(1, net.blocks + 1):
        parts = attend(layer_norm(x) if net.wiring == "pre-norm" else x, t, net.heads, net.causal)
        backward |= {f"{part}_{p}": Reading(at, dead) for part, at in parts.items()}
        x = parts["O"] if net.wiring == "chain" else x + parts["O"]
    if net.wiring != "chain":
        return Trace(x, backward, {})
    return Trace(
        x, backward | {"input gradient": Reading(start, dead)}, {"output": Reading(x.detach(), dead)}
    )


def trace_gated(net: GatedStack, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes gradient_m, at the input of block m, and output."""
    x = normal(samples, net.width, seed=seed, like=t).expand(len(t), -1, -1).requires_grad_()
    dead, backward = _dead(x), {}
    for m in range(1, net.blocks + 1):
        backward[f"gradient_{m}"] = Reading(x, dead)
        x = _gated_mlp(x, t, net.kind)
    return Trace(x, backward, {"output": Reading(x.detach(), dead)})


def trace_composition(net: Composition, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes gradient_m, at the input of block m, and output_m."""
    x = _tokens(t, samples, net.tokens, net.width, seed)
    dead, backward, forward = _dead(x), {}, {}
    for m, block in enumerate(net.blocks, 1):
        backward[f"gradient_{m}"] = Reading(x, dead)
        if block.kind == "attention":
            x = attend(x, t)["O"]
        elif block.kind == "residual":
            x = x + _shrink(x, t)
        else:
            for _ in range(block.weights):
                x = torch.tanh(_shrink(x, t))
        forward[f"output_{m}"] = Reading(x.detach(), dead)
    return Trace(x, backward, forward)


def trace_mixer(net: Mixer, t: Tensor, samples: int, seed: int) -> Trace:
    """Nodes gradient_m and stream_m: the residual stream that enters block m, and the one that leaves it."""
    x, norm = _tokens(t, samples, net.tokens, net.width, seed), NORMS[net.norm]
    dead, backward, forward = _dead(x), {}, {}
    for m in range(1, net.blocks + 1):
        backward[f"gradient_{m}"] = Reading(x, dead)
        x = x + attend(norm(x), t)["O"]
        inner = norm(x)
        x = x + (
            _shrink(F.gelu(_shrink(inner, t)), t) if net.mlp == "gelu" else _gated_mlp(inner, t, "swiglu")
        )
        forward[f"stream_{m}"] = Reading(x.detach(), dead)
    return Trace(x, backward, forward)


def attend(x: Tensor, t: Tensor, heads: int = 1, causal: bool = False) -> dict[str, Tensor]:
    """Outputs of the four projections of one attention block on x (T, B, n, d); "O" is the block's output."""
    q, k, v = (_shrink(x, t) for _ in range(3))
    split = [part.unflatten(-1, (heads, -1)).transpose(-2, -3) for part in (q, k, v)]  # (T, B, heads, n, d_h)
    scores = split[0] @ split[1].mT / split[0].shape[-1] ** 0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    mixed = (scores.softmax(-1) @ split[2]).transpose(-2, -3).flatten(-2)
    return {"Q": q, "K": k, "V": v, "O": _shrink(mixed, t)}


def _gated_mlp(x: Tensor, t: Tensor, kind: str) -> Tensor:
    return _shrink(GATES[kind](_shrink(x, t)) * _shrink(x, t), t)


def _shrink(x: Tensor, t: Tensor) -> Tensor:
    """x Wᵀ with W = diag(1, …, 1, t): (T, …, d)."""
    factor = torch.cat((t.new_ones(len(t), x.shape[-1] - 1), t[:, None]), 1)
    return x * factor.view(len(t), *(1,) * (x.dim() - 2), -1)


def _tokens(t: Tensor, samples: int, tokens: int, width: int, seed: int) -> Tensor:
    x = normal(samples, tokens, width, seed=seed, like=t)
    return x.expand(len(t), -1, -1, -1).requires_grad_()


def _dead(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[-1]
