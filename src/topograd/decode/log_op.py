"""Logarithmic opinion pool of several branches.

    compose     log p = Σ_b w_b log p_b / Σ_b w_b - log Z     weighted geometric mean, Log-OP   §6.5.6, eq. 7
    product     log p = Σ_b w_b z_b - log Z                   product of experts                eq. 1, 2, 10
    shrunk      product with w_b = 1 - H(p_b) / log C         per token                         eq. 5

Where every branch has a head of its own, z_b = W h_b + W_b h_b, `compose` of the readouts is the two-level
Log-OP of §6.5.8, eq. 11: a product within a branch, the mean across branches. A softcap on the head bends the
sum of the two, so then it is not.

z_b (..., vocab) are a branch's logits, p_b = softmax(z_b), C the vocabulary. Everything returns log p, which
is normalised. Log p_b and z_b differ by a constant per token that the normalisation takes away, so the code
pools z_b. Cost: O(branches · tokens · vocab).

What sharpens ("Product of Experts" Theorem 2.4.4, which says "Log-OP" for both the mean and the product):
- The mean minimises Σ_b w_b KL(r || p_b) over all r (weights that sum to 1); the least value is -log Z, and
  Σ_b w_b KL(r || p_b) = KL(r || p) - log Z. It gives every token at least the geometric mean of its
  probabilities, and may give it more than any branch does, where the branches' doubts differ. But it need
  not be sharper than its branches: equal branches give themselves, and a flat branch flattens a sharp one.
  The log-odds of two tokens are the weighted mean of the branches' log-odds.
- The product (weights of 1 or more) sharpens equal branches: the entropy of softmax(β z) falls with β.
  Branches that agree on the top token make it at least as probable as any of them does. Yet its entropy may
  exceed that of one of them even then: it can remove a runner-up and so lift a long tail.

The paper's "+9.26" and "+11.64" (§6.5.5) are raw logits and their plain mean, (9.26 + 14.0) / 2. Adding a
constant to one branch's logits moves such figures and changes no probability; `Confidence` reads what it
cannot move. In the sweep of §6.5.6 the balanced mean has a larger raw logit than Stage 4 alone (12.03, 9.81)
and a smaller margin (1.7, 2.3). That an unsure branch should count less is a heuristic: Appendix C.5 found
no reliable gain from weighting by confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import ConfigError, DivergenceError
from topograd.nn.pooling import pool


def compose(logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Log-probabilities of the weighted geometric mean; weight 2 is the same as giving a branch twice."""
    _check(len(logits), weights)
    total = math.fsum(weights)
    return torch.log_softmax(pool(logits, [w / total for w in weights]), dim=-1)


def product(logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Log-probabilities of the product Π p_b^w_b; weights 1 are eq. 2, or eq. 10 on the stages' readouts."""
    _check(len(logits), weights)
    return torch.log_softmax(pool(logits, weights), dim=-1)


def shrunk(logits: Sequence[Tensor]) -> Tensor:
    """Log-probabilities of the product in which an unsure branch counts less, token by token.

    The weights do not sum to 1: a single branch is flattened by its own weight, equal ones may be sharpened.
    """
    _check(len(logits), [1.0] * len(logits))
    return torch.log_softmax(pool(logits, "shrinkage"), dim=-1)


@dataclass(frozen=True)
class Confidence:
    """How sure a prediction is. Nothing here changes when a constant is added to the logits."""

    token: int
    """The likeliest token."""
    probability: float
    margin: float
    """The logit of the likeliest token minus that of the second."""
    runner_up: int
    entropy: float
    """In nats."""


def confidence(logits: Tensor) -> Confidence:
    """The confidence of logits or log-probabilities (vocab,), computed in float64 on the CPU."""
    if logits.dim() != 1 or len(logits) < 2:
        allowed = "of one token, (vocab,), at least 2 long"
        raise ConfigError(setting="logits", given=tuple(logits.shape), allowed=allowed)
    log_p = torch.log_softmax(logits.detach().cpu().double(), dim=-1)
    if log_p.isnan().any():
        raise DivergenceError("the logits are not finite, so nothing can be read from them", setting="logits")
    token = int(log_p.argmax())
    others = log_p.clone()
    others[token] = -math.inf
    runner_up = int(others.argmax())
    p = log_p.exp()
    return Confidence(
        token=token,
        probability=float(p[token]),
        margin=float(log_p[token] - log_p[runner_up]),
        runner_up=runner_up,
        entropy=float(torch.special.entr(p).sum()),
    )


def _check(branches: int, weights: Sequence[float]) -> None:
    if branches == 0:
        raise ConfigError(setting="logits", given=[], allowed="those of at least one branch")
    finite = all(0 <= w < math.inf for w in weights) and 0 < sum(weights) < math.inf
    if len(weights) != branches or not finite:
        allowed = f"{branches} finite numbers of at least 0, one of them positive: one for each branch"
        raise ConfigError(setting="weights", given=list(weights), allowed=allowed)
