"""Scores of sequences written out: every scored token is predicted from all tokens before it, by itself.

    log p(x_start..x_n-1 | x_0..x_start-1) = Σ_t log softmax(Σ_j w_j z_j(x_0..x_t-1))_{x_t}

z_j are the logits of stage j and w_j the weights of a prediction. Nothing is shared or remembered; everything
is float64 behind the logits. Cost: one forward pass of the stages for every scored token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.decoding import next_logits
from topograd.topology.plan import Plan


def token_logprobs(
    stack: Any, plan: Plan, tokens: Sequence[int], start: int, terms: Sequence[tuple[int, float]]
) -> list[tuple[float, int]]:
    """Log-probability and rank (1 is the likeliest) of each token from `start` on."""
    found = []
    for place in range(start, len(tokens)):
        z: Tensor = sum(w * next_logits(stack, plan, tokens[:place], k) for k, w in terms)  # type: ignore[assignment]
        log_p = torch.log_softmax(z.double(), -1)
        own = log_p[tokens[place]]
        found.append((float(own), 1 + int((log_p > own).sum())))
    return found


def least_loss(rows: Sequence[tuple[Sequence[int], int]], stack: Any, plan: Plan, stage: int) -> int:
    """Which sequence has the least mean loss of its tokens from its start on; the first of equals."""
    terms = plan.prediction.after(stage)
    losses = []
    for tokens, start in rows:
        each = [-log_p for log_p, _ in token_logprobs(stack, plan, tokens, start, terms)]
        losses.append(sum(each) / len(each))
    return losses.index(min(losses))
