"""The chunked scan with a scalar decay, for Mamba-2 and Mamba-3.

    S_t = e^{a_t} S_{t-1} + v_t B_tᵀ        y_t = S_t C_t

Within a chunk of Q positions, with c_t = Σ_{j≤t} a_j and S the state before the chunk,

    M_ts = e^{c_t - c_s} for s ≤ t, else 0
    Y    = ((C Bᵀ) ∘ M) V + e^c ∘ (C Sᵀ)
    S   ← e^{c_Q} S + (V ∘ e^{c_Q - c})ᵀ B

Only the last line goes from chunk to chunk; all the rest is batched matrix products. `ssd` is the layer of
Mamba-2 on it: a = Δ A, v = Δ x, and y + D x.

Shapes: v (batch, L, h, p); log-decays a (batch, L, h), not positive; B and C (batch, L, g, n), where head i
reads group i // (h / g); S (batch, h, p, n). Any L ≥ 1: the last chunk is filled with a = 0, v = 0, which
leaves the state alone; L = 1 is one step of the recurrence. Cost per position, in multiply-adds:
h p (Q + 2 n) + g n Q; memory O(L h (Q + p n / Q)).

Precision: float32 at least, under autocast too; y has the dtype of v and the state that of the work. Masked
entries are -inf before the exponential: masking after it gives inf · 0 = NaN gradients. Differences of c
carry the rounding of c itself, so the decays of a chunk are right to about ε Σ|a|, relatively.

Everything is functional: jvp, vmap, vmap(grad) and forward over reverse go through.

Source: "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality" (T. Dao, A. Gu), section 6. The obvious version is `tests.oracles.recurrence`.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.errors import StackError


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of recurrences: float32, or float64 where the input has it."""
    return torch.promote_types(dtype, torch.float32)


def decay_scan(
    v: Tensor,
    a: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    chunk: int = 64,
    before: bool = False,
) -> tuple[Tensor, Tensor]:
    """y (batch, L, h, p) of the scan, and the state (batch, h, p, n) behind it.

    With `before`, y_t reads the state before v_t is written, e^{a_t} S_{t-1} C_t; v_t may then know t + 1.
    """
    _check(v, a, B, C, initial_state, chunk)
    length, dtype = v.shape[1], working_dtype(v.dtype)
    state = v.new_zeros(*v.shape[:1], *v.shape[2:], B.shape[3]) if initial_state is None else initial_state
    Q = min(chunk, length)
    kind = v.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        parts = [part.to(dtype) for part in (v, a, B, C)]
        if length == 1:
            y, state = _step(state.to(dtype), [part[:, 0] for part in parts], before)
            return y[:, None].to(v.dtype), state
        y, state = _scan_chunks(state.to(dtype), [_chunks(part, Q) for part in parts], before)
        return y.flatten(1, 2)[:, :length].to(v.dtype), state


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """y with D x, and the last state, of x (batch, L, h, p), dt (batch, L, h) positive, A (h,) negative."""
    dtype = working_dtype(x.dtype)
    wide, dt = x.to(dtype), dt.to(dtype)
    y, state = decay_scan(wide * dt[..., None], dt * A.to(dtype), B, C, initial_state, chunk)
    return torch.addcmul(y, wide, D.to(dtype)[:, None]).to(x.dtype), state


def _step(state: Tensor, parts: list[Tensor], before: bool) -> tuple[Tensor, Tensor]:
    """y (batch, h, p) and the new state, of v (batch, h, p), a (batch, h), B and C (batch, g, n)."""
    v, a, B, C = parts
    x = v.reshape(len(v), B.shape[1], -1, 1)  # (batch, g, h/g · p, 1)
    decayed = state * a.exp()[..., None, None]
    state = decayed + (x * B[:, :, None]).reshape(state.shape)
    y = (decayed if before else state).reshape(*x.shape[:3], -1) @ C[..., None]
    return y.reshape(v.shape), state


def _scan_chunks(state: Tensor, parts: list[Tensor], before: bool) -> tuple[Tensor, Tensor]:
    """The scan of (batch, chunks, Q, ...): y (batch, chunks, Q, h, p) and the last state."""
    v, a, B, C = parts
    heads, groups = v.shape[3], B.shape[3]
    c = a.cumsum(2)
    total = c[:, :, -1:]
    B, C = B.transpose(2, 3), C.transpose(2, 3)  # (batch, chunks, g, Q, n)

    scores = (C @ B.mT)[:, :, :, None] * _decays(c, before).unflatten(2, (groups, heads // groups))
    within = scores.flatten(2, 3) @ v.transpose(2, 3)  # (batch, chunks, h, Q, p)

    # All the heads of a group are one matrix (Q, h/g · p): they share B and C.
    decayed = (v * (total - c).exp()[..., None]).unflatten(3, (groups, -1)).flatten(4).transpose(2, 3)
    written = (decayed.mT @ B).reshape(*v.shape[:2], heads, v.shape[-1], B.shape[-1])
    earlier, state = _pass_on(total[:, :, 0].exp(), written, state)
    read = C @ earlier.unflatten(2, (groups, -1)).flatten(3, 4).mT  # (batch, chunks, g, Q, h/g · p)
    read = read.transpose(2, 3).reshape(v.shape)
    return read * c.exp()[..., None] + within.transpose(2, 3), state


def _decays(c: Tensor, before: bool) -> Tensor:
    """M (batch, chunks, h, Q, Q) of the cumulated log-decays c (batch, chunks, Q, h)."""
    Q, c = c.shape[2], c.transpose(2, 3)
    future = torch.ones(Q, Q, dtype=torch.bool, device=c.device).triu(0 if before else 1)
    return (c[..., :, None] - c[..., None, :]).masked_fill(future, -torch.inf).exp()


def _pass_on(decay: Tensor, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk (batch, chunks, h, p, n), and the one behind the last."""
    states = [state]
    for e, z in zip(decay[..., None, None].unbind(1), written.unbind(1), strict=True):
        states.append(e * states[-1] + z)
    return torch.stack(states[:-1], dim=1), states[-1]


def _chunks(x: Tensor, Q: int) -> Tensor:
    """(batch, L, ...) as (batch, ⌈L / Q⌉, Q, ...), filled with zeros."""
    missing = -x.shape[1] % Q
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, Q))


def _check(v: Tensor, a: Tensor, B: Tensor, C: Tensor, state: Tensor | None, chunk: int) -> None:
    if chunk < 1:
        raise StackError(setting="chunk", given=chunk, allowed="at least 1")
    fits = v.dim() == 4 and a.shape == v.shape[:3] and B.dim() == 4 and C.shape == B.shape
    if not fits or B.shape[:2] != v.shape[:2]:
        problem = f"a scan got v {tuple(v.shape)}, a {tuple(a.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)}"
        remedy = "give (batch, L, h, p), (batch, L, h) and twice (batch, L, g, n)"
        raise StackError(problem, setting="v", given=tuple(v.shape), remedy=remedy)
    (batch, length, heads, p), (groups, n) = v.shape, B.shape[2:]
    if length < 1 or groups < 1 or heads % groups:
        allowed = f"a divisor of {heads} heads, with at least one position"
        raise StackError(setting="groups", given=groups, allowed=allowed)
    if state is not None and state.shape != (batch, heads, p, n):
        allowed = f"of shape {(batch, heads, p, n)}"
        raise StackError(setting="initial_state", given=tuple(state.shape), allowed=allowed)
