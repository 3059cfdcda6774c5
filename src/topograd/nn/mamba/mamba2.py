"""The Mamba-2 mixer: a short convolution, the scan with a scalar decay per head, a gated norm.

    z, xBC, τ = in_proj(u)
    xBC_t ← SiLU(b + Σ_k w_k xBC_{t-3+k}),  k = 0..3, w_3 the token's own      → x, B, C
    Δ_t = softplus(τ_t + dt_bias),   a_t = -e^{A_log} Δ_t
    S_t = e^{a_t} S_{t-1} + Δ_t x_t B_tᵀ,   y_t = S_t C_t + D x_t
    out = out_proj(norm(y ∘ SiLU(z)))

u (batch, time, width); x (batch, time, h, p); B, C (batch, time, g, n); S (batch, h, p, n). The norm is an
RMSNorm over the h p / g channels of each group, with a gain, and comes after the gate. Cost per token, in
multiply-adds: width (3 h p + 2 g n + h) for the projections, and that of `ssd.py`.

Many tokens go through the chunked scan; one token with a state is one step of the recurrence. The state
holds S, in float32 at least, and the last three columns before the convolution.

Source: "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (T. Dao, A. Gu), section 7.1, with the rows of in_proj and the initial values as in its code,
state-spaces/mamba. Steps are not clamped (dt_limit is (0, ∞)). Hugging Face's norm spans all channels, which
is the same for one group only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.mamba.recurrent import RecurrentState, last_columns
from topograd.nn.mamba.ssd import ssd, working_dtype

KERNEL = 4
"""Taps of the convolution."""


def check_mixer(**sizes: int) -> None:
    """The sizes of a mixer: all at least 1, and groups that divide the heads."""
    for name, size in sizes.items():
        if size < 1:
            raise StackError(setting=name, given=size, allowed="at least 1")
    if sizes["heads"] % sizes["groups"]:
        allowed = f"a divisor of the {sizes['heads']} heads"
        raise StackError(setting="groups", given=sizes["groups"], allowed=allowed)


def check_state(state: RecurrentState | None, u: Tensor) -> None:
    """A state has as many sequences as its input."""
    if state is not None and state.rows != len(u):
        allowed = f"a state of {len(u)} sequences, as the input"
        raise StackError(setting="state", given=state.rows, allowed=allowed)


def initial_dt_bias(heads: int) -> Tensor:
    """What softplus takes to steps that are log-uniform in [0.001, 0.1]."""
    dt = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1))).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


class GatedNorm(nn.Module):
    """RMSNorm(y ∘ SiLU(z)) over each of `groups` parts of the channels, times a gain; float32 at least."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        dtype = working_dtype(y.dtype)
        gated = (y.to(dtype) * F.silu(z.to(dtype))).unflatten(-1, (self.groups, -1))
        return (F.rms_norm(gated, gated.shape[-1:], eps=1e-5).flatten(-2) * self.weight).to(z.dtype)


class Mamba2Mixer(nn.Module):
    """Mamba-2 in the place of attention: (batch, time, width) to the same."""

    def __init__(
        self, width: int, heads: int, head_dim: int, state: int, groups: int = 1, chunk: int = 64
    ) -> None:
        super().__init__()
        check_mixer(width=width, heads=heads, head_dim=head_dim, state=state, groups=groups, chunk=chunk)
        self.heads, self.head_dim, self.state, self.groups = heads, head_dim, state, groups
        self.chunk = chunk
        inner = heads * head_dim
        self.columns = inner + 2 * groups * state
        self.in_proj = nn.Linear(width, inner + self.columns + heads, bias=False)
        self.conv = nn.Conv1d(self.columns, self.columns, KERNEL, groups=self.columns)
        self.dt_bias = nn.Parameter(initial_dt_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(inner, groups)
        self.out_proj = nn.Linear(inner, width, bias=False)

    def new_state(self, batch: int) -> RecurrentState:
        """The state of `batch` sequences before the first position."""
        like = self.in_proj.weight
        S = like.new_zeros(batch, self.heads, self.head_dim, self.state, dtype=working_dtype(like.dtype))
        return RecurrentState({"columns": like.new_zeros(batch, KERNEL - 1, self.columns), "S": S})

    def forward(self, u: Tensor, state: RecurrentState | None = None, rows: Tensor | None = None) -> Tensor:
        """Outputs at all times, or at the times `rows` (E,); a state is continued from, and advanced."""
        check_state(state, u)
        inner, n = self.heads * self.head_dim, self.groups * self.state
        z, new, tau = self.in_proj(u).split([inner, self.columns, self.heads], dim=-1)
        old = new.new_zeros(len(u), KERNEL - 1, self.columns) if state is None else state["columns"]
        columns = torch.cat((old, new), dim=1)
        x, B, C = F.silu(self._convolve(columns)).split([inner, n, n], dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        B, C = (part.unflatten(-1, (self.groups, self.state)) for part in (B, C))
        dtype = working_dtype(x.dtype)
        dt = F.softplus(tau.to(dtype) + self.dt_bias)
        S = None if state is None else state["S"]
        y, S = ssd(x, dt, -self.A_log.to(dtype).exp(), B, C, self.D, S, self.chunk)
        if state is not None:
            after = {"columns": last_columns(columns, KERNEL - 1), "S": S}
            state.advance(after, u.shape[1])
        if rows is not None:
            y, z = y[:, rows], z[:, rows]
        return self.out_proj(self.norm(y.flatten(2), z))

    def _convolve(self, columns: Tensor) -> Tensor:
        """(batch, 3 + time, channels) to (batch, time, channels)."""
        weight, bias = self.conv.weight, self.conv.bias
        assert bias is not None
        if columns.shape[1] == KERNEL:  # one token: a product with the taps, without a kernel's start-up
            return (columns * weight[:, 0].T).sum(1, keepdim=True) + bias
        image = columns.mT[:, :, None]  # of height 1 and channels last: nothing has to be transposed
        return F.conv2d(image, weight[:, :, None], bias, groups=self.columns).squeeze(2).mT
