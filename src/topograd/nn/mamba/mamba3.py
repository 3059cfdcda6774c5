"""The Mamba-3 mixer (SISO): trapezoid steps, decays and rotations from the data, no convolution.

    z, x, B, C, dt, s, trap, angle = in_proj(u)
    Δ = softplus(dt + dt_bias),   λ = sigmoid(trap),   a = -max(f(s), 10⁻⁴) Δ
    f(s) = 1 + s for s ≥ 0, 1 / (1 - s) for s < 0
    θ_t = θ_{t-1} + π tanh(angle_t) Δ_t
    B̃ = norm(B) + B_bias,   C̃ = norm(C) + C_bias,   B̂_t = R(θ_t) B̃_t,   Ĉ_t = R(θ_t) C̃_t
    S_t = e^{a_t} S_{t-1} + (1-λ_t) Δ_t e^{a_t} x_{t-1} B̂_{t-1}ᵀ + λ_t Δ_t x_t B̂_tᵀ
    out = out_proj((S_t Ĉ_t + D x_t) ∘ SiLU(z_t))

R turns the adjacent pairs (2j, 2j+1), j < r, counter-clockwise by θ_j and leaves the channels from 2r on;
r = rope_fraction n / 2. Token s writes at s and again at s + 1, under the same decay, so in the scan of
`ssd.py` it has one weight. What it writes at s + 1 depends on token s + 1, so y_t reads the state before
token t is written and adds t's own part. Nothing then depends on a later token, not even by rounding:

    σ_s = (1-λ_{s+1}) Δ_{s+1} (0 at the end),   ω_s = λ_s Δ_s + σ_s
    y_t = scan(v = ω ∘ x, a, B̂, Ĉ, before)_t + (D + λ_t Δ_t (C̃_t · B̃_t)) x_t

Continuing from (θ, S, B̂, x), the scan starts with S + (1-λ_1) Δ_1 x B̂ᵀ.

u (batch, time, width); x (batch, time, h, p); B̂, Ĉ (batch, time, h, n), for bias and angles differ by head;
S (batch, h, p, n); θ (batch, h, r), float32 at least and kept within 2π. Cost per token, in multiply-adds:
width (3 h p + 2 g n + 3 h + r) for the projections, and that of `ssd.py` with g = h.

Source: the Mamba-3 of state-spaces/mamba, `modules/mamba3.py`: no MIMO, no norm before out_proj, and A by f
(checkpoints older than that have softplus). Angles are summed over the call in the working precision.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.mamba.mamba2 import check_mixer, check_state, initial_dt_bias
from topograd.nn.mamba.recurrent import RecurrentState, last_columns
from topograd.nn.mamba.ssd import decay_scan, working_dtype


class Mamba3Mixer(nn.Module):
    """Mamba-3 in the place of attention: (batch, time, width) to the same."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        state: int,
        groups: int = 1,
        rope_fraction: float = 0.5,
        chunk: int = 32,
    ) -> None:
        super().__init__()
        check_mixer(width=width, heads=heads, head_dim=head_dim, state=state, groups=groups, chunk=chunk)
        if rope_fraction not in (0.5, 1) or state * rope_fraction % 2:
            allowed = "0.5 (state a multiple of 4) or 1 (of 2)"
            raise StackError(setting="rope_fraction", given=rope_fraction, allowed=allowed)
        self.heads, self.head_dim, self.state, self.groups = heads, head_dim, state, groups
        self.angles = int(state * rope_fraction) // 2
        self.chunk = chunk
        inner = heads * head_dim
        self.parts = [inner, inner, groups * state, groups * state, heads, heads, heads, self.angles]
        self.in_proj = nn.Linear(width, sum(self.parts), bias=False)
        self.dt_bias = nn.Parameter(initial_dt_bias(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.B_norm = nn.RMSNorm(state, eps=1e-5)
        self.C_norm = nn.RMSNorm(state, eps=1e-5)
        self.B_bias = nn.Parameter(torch.ones(heads, 1, state))
        self.C_bias = nn.Parameter(torch.ones(heads, 1, state))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def new_state(self, batch: int) -> RecurrentState:
        """The state of `batch` sequences before the first position."""
        like, h, p, n = self.in_proj.weight, self.heads, self.head_dim, self.state
        shapes = {"theta": (h, self.angles), "S": (h, p, n), "B": (h, n), "x": (h, p)}
        dtype = working_dtype(like.dtype)
        zeros = {name: like.new_zeros(batch, *shape, dtype=dtype) for name, shape in shapes.items()}
        return RecurrentState(zeros)

    def forward(self, u: Tensor, state: RecurrentState | None = None, rows: Tensor | None = None) -> Tensor:
        """Outputs at all times, or at the times `rows` (E,); a state is continued from, and advanced."""
        check_state(state, u)
        z, *parts = self.in_proj(u).split(self.parts, dim=-1)
        dtype = working_dtype(z.dtype)
        x, B, C, dt, s, trap, angle = (part.to(dtype) for part in parts)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        dt = F.softplus(dt + self.dt_bias)
        late = torch.sigmoid(-trap) * dt  # (1-λ) Δ
        turns = (math.pi * torch.tanh(angle)[:, :, None] * dt[..., None]).cumsum(1)
        theta = turns if state is None else state["theta"][:, None] + turns
        B, C = self._biased(B, self.B_norm, self.B_bias), self._biased(C, self.C_norm, self.C_bias)
        turn = torch.complex(theta.cos(), theta.sin())
        own, B, C = (C * B).sum(-1), rotate_pairs(B, turn), rotate_pairs(C, turn)
        start = None
        if state is not None:  # the last token writes once more
            start = state["S"] + (late[:, 0, :, None] * state["x"])[..., None] * state["B"][:, :, None]
        later = F.pad(late[:, 1:], (0, 0, 0, 1))  # σ
        now = dt - late  # λ Δ
        v = x * (now + later)[..., None]
        y, S = decay_scan(v, -decay_rate(s) * dt, B, C, start, self.chunk, before=True)
        y = torch.addcmul(y, (self.D + now * own)[..., None], x)
        if state is not None:
            after = {
                "theta": theta[:, -1].remainder(2 * math.pi),
                "S": S,
                "B": last_columns(torch.cat((state["B"][:, None], B), 1), 1)[:, 0],
                "x": last_columns(torch.cat((state["x"][:, None], x), 1), 1)[:, 0],
            }
            state.advance(after, u.shape[1])
        if rows is not None:
            y, z = y[:, rows], z[:, rows]
        return self.out_proj((y.flatten(2) * F.silu(z.to(dtype))).to(z.dtype))

    def _biased(self, x: Tensor, norm: nn.RMSNorm, bias: Tensor) -> Tensor:
        """B̃ or C̃ (batch, time, h, n) of (batch, time, g n)."""
        x = x.unflatten(-1, (self.groups, self.state))
        x = F.rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.eps)
        return (x[:, :, :, None] + bias.view(self.groups, -1, self.state)).flatten(2, 3)


def decay_rate(s: Tensor) -> Tensor:
    """max(f(s), 10⁻⁴), whose derivative at 0 is 1."""
    return torch.where(s >= 0, 1 + s, 1 / (1 - s.clamp(max=0))).clamp(min=1e-4)


def rotate_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """The pairs (2j, 2j+1) of x (..., n), as complex numbers, times turn (..., r); r ≤ n / 2."""
    last = 2 * turn.shape[-1]
    pairs = torch.view_as_complex(x.contiguous()[..., :last].unflatten(-1, (-1, 2)))
    return torch.cat((torch.view_as_real(pairs * turn).flatten(-2), x[..., last:]), dim=-1)
