"""A described chain as plain functions of t, open at every node.

Statement. For all t of a grid at once, the weights, the forward pass and the tensors at its nodes:
pre-activations z_l, whose gradient along v_l is the backward reading of G_l, and activations h_l, for A_l.
v_l is the dead direction of layer l: a unit vector of the canonical frame, or, in linear chains that are
rotated or rectangular, a column of the isometry E_l with W_l E_{l-1} = E_l blockdiag(R_l, t). R_l mixes the
live units: it is random (`live_block`), or the identity where a constant is derived for that.

Symbols and shapes. T points t, n samples, layer widths d_0 … d_L, r the narrowest. W_l (T, d_l, d_{l-1}),
z_l and h_l (T, n, d_l), E_l (d_l, r). Cost: O(T n Σ d_l d_{l-1}).
Source: "Dead Directions: Geometric Singular Learning", §3 and §7 (canonical approach), appendix A.1
(isometries).
Limits. float64. Numbers are drawn on the CPU, so that a seed means the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.geometry.rules.architectures import Chain
from topograd.geometry.rules.chains import node

SPREAD = (0.7, 1.3)
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Reading:
    """A tensor (T, …, d) at a node and the unit vector (d,) along which it is read."""

    at: Tensor
    along: Tensor

    def of(self, value: Tensor) -> Tensor:
        """mean((value · v)²) over everything but t: projected sample by sample, then squared."""
        return (value @ self.along).square().flatten(1).mean(1)


@dataclass(frozen=True)
class Trace:
    """One forward pass at every t: outputs (T, …, C), and what can be read backward and forward, by node."""

    outputs: Tensor
    backward: dict[str, Reading]
    forward: dict[str, Reading]
    alignment_error: float = 0.0


@dataclass(frozen=True)
class Frame:
    """Isometries E_l and their orthogonal complements, both as columns."""

    shared: Tensor
    rest: Tensor


def normal(*shape: int, seed: int, like: Tensor) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def dead_diagonal(t: Tensor, size: int, powers: tuple[int, ...] = (1,)) -> Tensor:
    """diag(1, …, 1, t^{α_1}, …, t^{α_k}) for every t: (T, size, size)."""
    places = {size - len(powers) + i: power for i, power in enumerate(powers)}
    return dead_block(t, torch.eye(size - len(powers), dtype=t.dtype, device=t.device), places)


def dead_block(t: Tensor, live: Tensor, powers: Mapping[int, int]) -> Tensor:
    """For every t, `live` on the live units and t^α on each dead one, by its place: (T, d, d)."""
    size = len(live) + len(powers)
    units = torch.tensor([unit for unit in range(size) if unit not in powers], device=t.device)
    result = t.new_zeros(len(t), size, size)
    result[:, units[:, None], units] = live
    for place, power in powers.items():
        result[:, place, place] = t**power
    return result


def live_block(size: int, seed: int, like: Tensor) -> Tensor:
    """U diag(s) Vᵀ, U and V random and orthogonal, s evenly within SPREAD: every live unit hears every other.

    Singular values near 1 keep a live signal of size one through many layers; nothing else is asked of it.
    """
    left, right = (torch.linalg.qr(normal(size, size, seed=seed + i, like=like)).Q for i in (0, 5000))
    return left * torch.linspace(*SPREAD, size, dtype=like.dtype, device=like.device) @ right.mT


def layer_norm(x: Tensor) -> Tensor:
    """No gain, no offset, and no floor under the variance: a floor would be a scale of its own."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt()


def rms_norm(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def batch_norm(x: Tensor) -> Tensor:
    """Every unit by its mean and spread over the samples, for each t by itself."""
    return layer_norm(x.mT).mT


def group_norm(x: Tensor) -> Tensor:
    """Two groups of units; live ones share the dead one's."""
    return torch.cat([layer_norm(part) for part in x.chunk(2, -1)], -1)


NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm, "batchnorm": batch_norm, "groupnorm": group_norm}


def trace_chain(chain: Chain, t: Tensor, samples: int, seed: int) -> Trace:
    """The chain at every t on isotropic Gaussian inputs."""
    frames = _frames(chain, t, seed)
    weights = [_weight(chain, layer, frames, t, seed) for layer in range(1, chain.depth + 1)]
    directions = range(chain.directions)
    dead = [[_dead(chain, frame, i) for i in directions] for frame in frames]
    h = normal(samples, chain.layer_widths[0], seed=seed, like=t).expand(len(t), -1, -1).requires_grad_()
    below, z = [h], []
    for layer, weight in enumerate(weights, 1):
        z.append(below[-1] @ weight.mT)
        if chain.bias:
            z[-1] = z[-1] + (t**chain.bias)[:, None, None] * torch.stack(dead[layer]).sum(0)
        h = z[-1] if layer == chain.depth else ACTIVATE[chain.activation](z[-1])
        for a, b in chain.skips:
            if b == layer:
                h = h + _skipped(chain, below[a], t, seed + 300 + layer)
        below.append(NORMS[chain.norm](h) if layer in chain.norm_at else h)
    backward = {
        node("G", layer + 1, i, chain): Reading(z[layer], dead[layer + 1][i])
        for layer in range(chain.depth)
        for i in directions
    }
    forward = {
        node("A", layer, i, chain): Reading(below[layer].detach(), dead[layer][i])
        for layer in range(chain.depth)
        for i in directions
    }
    error = _alignment_error([weight[t > 0] for weight in weights], dead)
    return Trace(_logits(chain, below[-1], t, seed), backward, forward, error)


def _skipped(chain: Chain, h: Tensor, t: Tensor, seed: int) -> Tensor:
    if chain.skip == "identity":
        return h
    return h @ _core(chain, (1,) * chain.directions, t, seed).mT


def _core(chain: Chain, powers: tuple[int, ...], t: Tensor, seed: int) -> Tensor:
    """(T, r, r): the live block, and t^α on the last units."""
    size = chain.rank - len(powers)
    if chain.live == "identity":
        return dead_diagonal(t, chain.rank, powers)
    return dead_block(t, live_block(size, seed, t), {size + i: power for i, power in enumerate(powers)})


def _logits(chain: Chain, out: Tensor, t: Tensor, seed: int) -> Tensor:
    """z_L itself, or B z_L with B (d + 1, d) orthonormal and Bᵀ1 = 0."""
    if chain.loss == "squared-error" or chain.head == "square":
        return out
    size = chain.layer_widths[-1]
    ones = torch.ones(size + 1, 1, dtype=t.dtype, device=t.device)
    basis = torch.linalg.qr(torch.cat((ones, normal(size + 1, size, seed=seed + 1, like=t)), 1)).Q
    return out @ basis[:, 1:].mT


def _frames(chain: Chain, t: Tensor, seed: int) -> list[Frame]:
    """E_l: random for linear rectangular chains, exp(ρ S) for rotated ones, else unit vectors."""
    frames = []
    turned = torch.eye(chain.rank, dtype=t.dtype, device=t.device)
    if chain.rotation:
        skew = normal(chain.width, chain.width, seed=seed + 2, like=t)
        turned = torch.linalg.matrix_exp(chain.rotation * (skew - skew.mT) / 2)
    for layer, width in enumerate(chain.layer_widths):
        frame = torch.eye(width, dtype=t.dtype, device=t.device)
        if chain.rotation:
            frame = turned
        elif chain.widths and chain.activation == "linear":
            frame = torch.linalg.qr(normal(width, width, seed=seed + 100 + layer, like=t)).Q
        frames.append(Frame(frame[:, : chain.rank], frame[:, chain.rank :]))
    return frames


def _weight(chain: Chain, layer: int, frames: list[Frame], t: Tensor, seed: int) -> Tensor:
    """E_l blockdiag(R_l, t^α) E_{l-1}ᵀ, and a random full-rank map between the complements."""
    into, out = frames[layer - 1], frames[layer]
    core = _core(chain, tuple(row[layer - 1] for row in chain.powers), t, seed + 400 + layer)
    rest = normal(out.rest.shape[1], into.rest.shape[1], seed=seed + 200 + layer, like=t)
    return out.shared @ core @ into.shared.mT + out.rest @ rest @ into.rest.mT


def _dead(chain: Chain, frame: Frame, direction: int) -> Tensor:
    """v of one dead direction. A nonlinear σ acts on units, so a rotated chain is read at its last one."""
    if chain.rotated_out_of_reach:
        return torch.eye(chain.width, dtype=frame.shared.dtype, device=frame.shared.device)[-1]
    return frame.shared[:, chain.rank - chain.directions + direction]


def _alignment_error(weights: list[Tensor], dead: list[list[Tensor]]) -> float:
    """The largest part of v_lᵀ W_l beside v_{l-1} over the part along it; what is rounding counts as 0.

    In a turned frame a row t v is rounded by 1e-16 of the live weights, and what comes of that is cut off
    where values are read (`probing.PROJECTED`).
    """
    worst = 0.0
    for weight, into, out in zip(weights, dead[:-1], dead[1:], strict=True):
        for v, u in zip(into, out, strict=True):
            row = u @ weight  # (T, d_{l-1})
            along = row @ v
            beside = (row - along[:, None] * v).norm(dim=-1)
            beside = torch.where(beside > 1e-14, beside, 0.0)
            worst = max(worst, (beside / along.abs()).max().item())
    return worst
