"""Exit heads of a trained model, initialised by least squares.

Statement. x_k is the state at an exit behind the head's norm, x_K that at the last one, W the shared matrix.
A head of zero reads the exit as if it were the last (the logit lens). What it should read is x_K, whose best
linear guess from x_k is x_k + D x_k with

    D = E[(x_K - x_k) x_kᵀ] (C + ρ)⁻¹,      C = E[x_k x_kᵀ]

A head of rank r has W_k = U V. With P the r leading eigenvectors of D C Dᵀ, the part of the guess that it can
say most of,

    U = W P,    V = Pᵀ D        so that (W + U V) x_k = W (x_k + P Pᵀ D x_k)

Symbols and shapes. x (n, d), D and C (d, d), P (d, r), U (vocab, r), V (r, d); sums in float64. ρ is `RIDGE`
times the mean of C's diagonal. U and V are scaled against each other to one size, since they learn at one
rate. Only tokens with a target count, and no row's first: its state is unlike all others.

Cost: the states of TOKENS tokens, which a frozen model keeps anyway, and d³. Source: ours, after the tuned
lens (`nn/translator.py` has the affine form, which needs no rank). Limits: W and its bias are those of
all stages; a softcap is left out of account.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from topograd.exec.forward import stage_outputs
from topograd.nn.stack import Projection, Stack
from topograd.topology.plan import Plan
from topograd.training.activation_cache import StateBatch

TOKENS = 8192
RIDGE = 1e-3


@torch.no_grad()
def begin_exit_heads(stack: Stack, plan: Plan, read: Callable[[], StateBatch]) -> None:
    """Set the new heads of low rank of all exits but the last; `read` gives some rows, if there are any."""
    *exits, last = plan.predicting()
    heads = {stage: stack.projection(plan.stages[stage].head) for stage in (*exits, last)}
    new = {stage: head for stage in exits if (head := heads[stage]) is not None and _is_new(head)}
    final = heads[last]
    if not new or final is None:
        return
    rows = read()
    counted = rows.mask.clone()
    counted[:, 0] = False
    if int(counted.sum()) < 2:
        return
    states = _states(stack, plan, rows, [*new, last])
    wanted = final.normalize(states[last])[counted]
    for stage, head in new.items():
        assert head.low_rank is not None
        up, down = head.low_rank
        basis, reading = leading_map(head.normalize(states[stage])[counted], wanted, up.shape[1])
        u, v = head.weight @ basis.to(up), reading.to(down)
        size = (u.square().mean() / v.square().mean().clamp_min(1e-30)).clamp(1e-12, 1e12) ** 0.25
        up.copy_(u / size)
        down.copy_(v * size)


def _is_new(head: Projection) -> bool:
    """Whether a head has a low rank of its own that is to learn and has not yet."""
    return head.low_rank is not None and head.low_rank[0].requires_grad and not bool(head.low_rank[0].any())


def leading_map(x: Tensor, y: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """P (d, r) and Pᵀ D (r, d) of the module's head, from rows x and what they should be, y; float64."""
    x, y = x.double(), y.double()
    C = x.T @ x / len(x)
    ridge = RIDGE * C.diagonal().mean().clamp_min(1e-30)
    D = torch.linalg.solve(
        C + ridge * torch.eye(len(C), dtype=C.dtype, device=C.device), x.T @ (y - x) / len(x)
    ).T
    basis = torch.linalg.eigh(D @ C @ D.T).eigenvectors[:, -rank:]
    return basis, basis.T @ D


def _states(stack: Stack, plan: Plan, rows: StateBatch, stages: list[int]) -> dict[int, Tensor]:
    """The outputs of some stages: as they were kept, or computed now."""
    device = next(stack.parameters()).device
    stops = {stage: plan.stages[stage].stage.stop for stage in stages}
    if rows.states.keys() >= set(stops.values()):
        return {stage: rows.states[stop].to(device) for stage, stop in stops.items()}
    return stage_outputs(stack, plan, rows.inputs.to(device), stages)
