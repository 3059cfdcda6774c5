"""DDCAdam one gauge at a time, as the formulas are written; any dtype.

    translation   g_v = mean over classes, g_h = g - 1 g_v
                  Δ_h = Adam(g_h), re-projected: Δ_h ← Δ_h - mean(Δ_h)
                  θ ← θ + Δ_h + 1 Δ_v
    rescaling     n_b = ‖W_b‖, γ_b = ⟨W_b, g_b⟩ + Σ_f e_fb ⟨f, g_f⟩
                  r = ⟨w, γ⟩ / ‖w‖, τ_b = n_b (g_b - W_b ⟨W_b, g_b⟩ / n_b²)
                  D_b = Adam(τ_b), D_b ← D_b - W_b ⟨W_b, D_b⟩ / n_b²
                  Δℓ = (w / ‖w‖) Adam(r) + vertical,   vertical = 0, or -η P γ with P the projector on w^⊥
                  W_b ← e^{Δℓ_b} W_b + s_b D_b,  f ← e^{⟨e_f, Δℓ⟩} f + Π_b s_b^{e_fb} Adam(Π_b n_b^{e_fb} g_f)

W_b is a whole block as one vector: a matrix and its bias are joined. A gauge with channels is one such gauge
for each channel. Source: "Dead Directions: Geometric Singular Learning" algorithm 2. The fast version, with
the meaning of the symbols, is `topograd.optim.ddc_adam`. Cost: O(numbers) per step, in Python per block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Adam:
    """The moments of named components, and their common step count."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    t: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, name: str, y: Tensor) -> Tensor:
        """-η m̂ / (√v̂ + ε) of the component `name`."""
        beta1, beta2 = self.betas
        m, v = self.moments.get(name, (torch.zeros_like(y), torch.zeros_like(y)))
        m, v = beta1 * m + (1 - beta1) * y, beta2 * v + (1 - beta2) * y**2
        self.moments[name] = m, v
        m_hat, v_hat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
        return -self.lr * m_hat / (v_hat.sqrt() + self.eps)


def translation_step(theta: Tensor, g: Tensor, adam: Adam, vertical: str, reproject: bool = True) -> Tensor:
    """θ after a step; the classes are dimension 0."""
    adam.t += 1
    g_v = g.mean(0, keepdim=True)
    delta_h = adam.step("horizontal", g - g_v)
    if reproject:
        delta_h = delta_h - delta_h.mean(0, keepdim=True)
    delta_v = {"frozen": torch.zeros_like(g_v), "sgd": -adam.lr * g_v}.get(vertical)
    return theta + delta_h + (adam.step("vertical", g_v) if delta_v is None else delta_v)


@dataclass(frozen=True)
class Joint:
    """Blocks as vectors, followers with their powers, and the gradients of both."""

    blocks: Sequence[Tensor]
    gradients: Sequence[Tensor]
    followers: Sequence[Tensor] = ()
    follower_gradients: Sequence[Tensor] = ()
    powers: Sequence[Sequence[float]] = ()


def rescaling_step(
    joint: Joint, w: Sequence[float], adam: Adam, *, vertical: str, decay: float, retract: bool, rms: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The blocks and the followers after a step; vertical is frozen or sgd."""
    adam.t += 1
    keep = 1 - adam.lr * decay
    blocks, followers = [keep * W for W in joint.blocks], [keep * f for f in joint.followers]
    n = [W.norm() for W in blocks]
    scale = [norm / math.sqrt(W.numel()) if rms else norm for norm, W in zip(n, blocks, strict=True)]
    gamma = torch.stack([W @ g for W, g in zip(blocks, joint.gradients, strict=True)])
    for f, g, e in zip(followers, joint.follower_gradients, joint.powers, strict=True):
        gamma = gamma + gamma.new_tensor(e) * (f * g).sum()
    unit = gamma.new_tensor(w) / gamma.new_tensor(w).norm()
    logs = unit * adam.step("radial", unit @ gamma)
    if vertical == "sgd":
        logs = logs - adam.lr * (gamma - unit * (unit @ gamma))
    moved = []
    for b, (W, g) in enumerate(zip(blocks, joint.gradients, strict=True)):
        D = adam.step(f"block {b}", n[b] * (g - W * (W @ g) / n[b] ** 2))
        D = D - W * (W @ D) / n[b] ** 2
        new = logs[b].exp() * W + scale[b] * D
        if retract:
            ahead = W + scale[b] * D
            new = logs[b].exp() * n[b] * ahead / ahead.norm()
        moved.append(new)
    following = []
    for i, (f, g, e) in enumerate(zip(followers, joint.follower_gradients, joint.powers, strict=True)):
        reach = math.prod(float(norm) ** power for norm, power in zip(n, e, strict=True))
        out = math.prod(float(s) ** power for s, power in zip(scale, e, strict=True))
        D = adam.step(f"follower {i}", reach * g)
        following.append((logs @ logs.new_tensor(e)).exp() * f + out * D)
    return moved, following
