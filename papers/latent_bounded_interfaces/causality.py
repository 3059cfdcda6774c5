"""Causality check of a model of regions: the largest derivative of logits by a later input.

Statement.

    leak = max over t and t' > t of |∂ ⟨w, z_t⟩ / ∂ x0_{t'}|

z (batch, T, vocab) are the last stage's logits as evaluation computes them; x0 (batch, T, width) is the
canvas, a leaf here: the embedding itself may look back (a smear), and tokens have no derivative; w (vocab,)
is random, twice for every t. A causal interface gives exactly 0.0, since no operation joins the two. The
other way round, a Jacobian that is not zero has ⟨w, ·⟩ = 0 with probability 0. Every entry of every later
position is looked at.

Cost: one forward and 2 (T - 1) backwards. Use float64: what leaks by rounding alone shows too.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.1 pools a whole sequence,
which is `causal=False` here and leaks. Limits: this is a statement about one model and one batch, so use
random parameters; layers that read later tokens from `bus.inputs` rather than from x0 are not
seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.exec.forward import stage_logits
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan

DRAWS = 2
"""Random combinations of the logits of each position."""


def future_gradient(stack: Stack, plan: Plan, inputs: Tensor) -> float:
    """The largest |∂ ⟨w, logits[t]⟩ / ∂ x0[t']| with t' > t, over the batch; exactly 0.0 without a leak."""
    if inputs.dim() != 2 or inputs.shape[1] < 2:
        raise StackError(
            setting="inputs",
            given=tuple(inputs.shape),
            allowed="tokens (batch, time) of at least 2 positions",
        )
    x0 = stack.embed(inputs).detach().requires_grad_()
    logits = stage_logits(stack, plan, plan.stages[-1].index, inputs, x0, lean=True)
    generator = torch.Generator().manual_seed(0)
    worst = x0.new_zeros(())
    for t in range(inputs.shape[1] - 1):
        for w in torch.randn(DRAWS, logits.shape[-1], generator=generator).to(logits):
            (gradient,) = torch.autograd.grad((logits[:, t] @ w).sum(), x0, retain_graph=True)
            worst = torch.maximum(worst, gradient[:, t + 1 :].abs().max())
    return float(worst)
