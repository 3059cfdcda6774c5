"""Logarithmic opinion pool of several branches.

    compose     log p = Σ_b w_b log p_b / Σ_b w_b - log Z     weighted geometric mean, Log-OP   §6.5.6, eq. 7

The product of experts, log p = Σ_b w_b z_b - log Z (eq. 1, 2, 10), and the one in which an unsure branch
counts less (eq. 5) are those of `nn.pooling.pool`.

Where every branch has a head of its own, z_b = W h_b + W_b h_b, `compose` of the readouts is the two-level
Log-OP of §6.5.8, eq. 11: a product within a branch, the mean across branches. A softcap on the head bends the
sum of the two, so then it is not.

z_b (..., vocab) are a branch's logits, p_b = softmax(z_b), C the vocabulary. Log p_b and z_b differ by a
constant per token that the normalisation takes away, so the code pools z_b. Cost: O(branches · tokens ·
vocab).

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
constant to one branch's logits moves such figures and changes no probability, nor the margin between two
tokens. In the sweep of §6.5.6 the balanced mean has a larger raw logit than Stage 4 alone (12.03, 9.81)
and a smaller margin (1.7, 2.3). That an unsure branch should count less is a heuristic: Appendix C.5 found
no reliable gain from weighting by confidence.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.nn.pooling import pool


def compose(logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Log-probabilities of the weighted geometric mean; weight 2 is the same as giving a branch twice."""
    _check(len(logits), weights)
    total = math.fsum(weights)
    return torch.log_softmax(pool(logits, [w / total for w in weights]), dim=-1)


def _check(branches: int, weights: Sequence[float]) -> None:
    if branches == 0:
        raise ConfigError(setting="logits", given=[], allowed="those of at least one branch")
    finite = all(0 <= w < math.inf for w in weights) and 0 < sum(weights) < math.inf
    if len(weights) != branches or not finite:
        allowed = f"{branches} finite numbers of at least 0, one of them positive: one for each branch"
        raise ConfigError(setting="weights", given=list(weights), allowed=allowed)
