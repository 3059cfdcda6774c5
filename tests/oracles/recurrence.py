"""Recurrent mixers, one token at a time, as the formulas are written. The slow, obvious version.

    S_t = e^{a_t} S_{t-1} + v_t B_tᵀ,   y_t = S_t C_t                     the scan
    a = -e^{A_log} Δ,   v = Δ x                                           Mamba-2
    S_t = e^{a_t} S_{t-1} + (1-λ_t) Δ_t e^{a_t} x_{t-1} B̂_{t-1}ᵀ + λ_t Δ_t x_t B̂_tᵀ      Mamba-3

S (batch, h, p, n); head i reads group i // (h / g). The mixers take a module of `nn/mamba2.py` or
`nn/mamba3.py` for its parameters and sizes only, and u (batch, time, width). They answer the outputs and what
is remembered behind the last token. Cost: time in a row; the graph keeps every S_t, so use short inputs.

Tokens come from `unbind`: a differentiated loop over u[:, t] would allocate the whole gradient at each step.

Sources: "Transformers are SSMs" (T. Dao, A. Gu), equations 1 and 2 and section 7, and the trapezoid rule and
data-dependent rotations of Mamba-3, as in the code of state-spaces/mamba. The fast version is in `nn/`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def scan_by_steps(
    v: Tensor, a: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (batch, L, h, p) and the last state, of v (batch, L, h, p), a (batch, L, h), B and C (b, L, g, n)."""
    heads = v.shape[2]
    S = v.new_zeros(v.shape[0], heads, v.shape[3], B.shape[3]) if state is None else state
    answers = []
    for v_t, a_t, B_t, C_t in zip(v.unbind(1), a.unbind(1), B.unbind(1), C.unbind(1), strict=True):
        S = a_t.exp()[..., None, None] * S + v_t[..., :, None] * per_head(B_t, heads)[..., None, :]
        answers.append((S * per_head(C_t, heads)[..., None, :]).sum(-1))
    return torch.stack(answers, dim=1), S


def per_head(x: Tensor, heads: int) -> Tensor:
    """(batch, g, n) as (batch, h, n): consecutive heads share a group."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def root_mean_square_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def mamba2_by_steps(mixer: Any, u: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs (batch, time, width), and the last three columns before the convolution, and S."""
    h, p, n, g = mixer.heads, mixer.head_dim, mixer.state, mixer.groups
    batch, inner = u.shape[0], h * p
    columns = [u.new_zeros(batch, inner + 2 * g * n) for _ in range(3)]
    S = u.new_zeros(batch, h, p, n)
    taps, answers = mixer.conv.weight[:, 0].unbind(1), []
    for u_t in u.unbind(1):
        z, xBC, dt = (u_t @ mixer.in_proj.weight.T).split([inner, inner + 2 * g * n, h], dim=-1)
        columns = [*columns[-3:], xBC]
        convolved = mixer.conv.bias + sum(w * column for w, column in zip(taps, columns, strict=True))
        x, B, C = silu(convolved).split([inner, g * n, g * n], dim=-1)
        x, B, C = x.view(batch, h, p), B.view(batch, g, n), C.view(batch, g, n)
        delta = softplus(dt + mixer.dt_bias)
        decay = torch.exp(-torch.exp(mixer.A_log) * delta)
        S = decay[..., None, None] * S + (delta[..., None] * x)[..., None] * per_head(B, h)[:, :, None]
        y = (S * per_head(C, h)[:, :, None]).sum(-1) + mixer.D[:, None] * x
        gated = (y.reshape(batch, inner) * silu(z)).view(batch, g, inner // g)
        normed = root_mean_square_norm(gated).view(batch, inner) * mixer.norm.weight
        answers.append(normed @ mixer.out_proj.weight.T)
    return torch.stack(answers, dim=1), {"columns": torch.stack(columns[-3:], dim=1), "S": S}


def mamba3_by_steps(mixer: Any, u: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs (batch, time, width), and the angles (not wrapped), S, the last rotated B and the last x."""
    h, p, n, g = mixer.heads, mixer.head_dim, mixer.state, mixer.groups
    batch, inner, r = u.shape[0], h * p, mixer.angles
    theta, S = u.new_zeros(batch, h, r), u.new_zeros(batch, h, p, n)
    last_B, last_x = u.new_zeros(batch, h, n), u.new_zeros(batch, h, p)
    answers = []
    for u_t in u.unbind(1):
        parts = (u_t @ mixer.in_proj.weight.T).split([inner, inner, g * n, g * n, h, h, h, r], dim=-1)
        z, x, B, C, dt, s, trap, angle = parts
        x = x.view(batch, h, p)
        delta = softplus(dt + mixer.dt_bias)
        f = torch.where(s >= 0, 1 + s, 1 / (1 - torch.where(s >= 0, 0, s)))
        decay = torch.exp(-torch.where(f > 1e-4, f, 1e-4) * delta)
        lam = 1 / (1 + torch.exp(-trap))
        theta = theta + math.pi * torch.tanh(angle)[:, None] * delta[..., None]
        B = root_mean_square_norm(B.view(batch, g, n)) * mixer.B_norm.weight
        C = root_mean_square_norm(C.view(batch, g, n)) * mixer.C_norm.weight
        B = rotated(per_head(B, h) + mixer.B_bias[:, 0], theta)
        C = rotated(per_head(C, h) + mixer.C_bias[:, 0], theta)
        before = ((1 - lam) * delta * decay)[..., None, None] * last_x[..., None] * last_B[:, :, None]
        now = (lam * delta)[..., None, None] * x[..., None] * B[:, :, None]
        S = decay[..., None, None] * S + before + now
        y = (S * C[:, :, None]).sum(-1) + mixer.D[:, None] * x
        answers.append((y.reshape(batch, inner) * silu(z)) @ mixer.out_proj.weight.T)
        last_B, last_x = B, x
    return torch.stack(answers, dim=1), {"theta": theta, "S": S, "B": last_B, "x": last_x}


def rotated(x: Tensor, theta: Tensor) -> Tensor:
    """The complex numbers x_{2j} + √-1 x_{2j+1} turned by the angles theta_j; later channels stay."""
    r = theta.shape[-1]
    pairs = torch.complex(x[..., 0 : 2 * r : 2], x[..., 1 : 2 * r : 2])
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
    return torch.cat((turned, x[..., 2 * r :]), dim=-1)
