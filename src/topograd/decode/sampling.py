"""Sampling of tokens, and the acceptance rule of sampled drafts.

    p = softmax(z / T)     over the top_k largest logits, then over the fewest likeliest tokens whose
                           probability, among those, reaches top_p ("The Curious Case of Neural Text
                           Degeneration", nucleus sampling); T = 0 is the likeliest token alone

Speculative sampling ("Fast Inference from Transformers via Speculative Decoding", Leviathan et al. 2023,
§2.3, Algorithm 1): a token x ~ q is accepted with probability min(1, p(x) / q(x)); otherwise the token is
drawn from the residual norm(max(p - q, 0)). If x ~ q, the outcome of `verify` has exactly distribution p:

    q(x) min(1, p(x) / q(x)) + (1 - β) max(p(x) - q(x), 0) / (1 - β) = min(p, q) + max(p - q, 0) = p(x)

with β = Σ min(p, q), the share that is accepted, and 1 - β = Σ max(p - q, 0). This holds for any q.

Everything here is float64 on the CPU, so that a seed means the same on every device. A uniform number has
53 bits: "exactly" is up to that and to rounding. Ties go to the smaller id.

Cost. `probabilities` sorts where there is a top_k or top_p, O(V log V) for a row of V logits; otherwise it is
O(V), as `draw` and `verify` are.

Limits. The CPU generator of torch uses the low 32 bits of a seed: seeds that are equal modulo 2^32 give one
stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.errors import ConfigError, DivergenceError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have this probability together."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(setting="temperature", given=self.temperature, allowed="finite and at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(setting="top_k", given=self.top_k, allowed="at least 1, or be left out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                setting="top_p", given=self.top_p, allowed="above 0 and at most 1, or be left out"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(setting="seed", given=self.seed, allowed="at least 0 and below 2^63")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: each token is the likeliest one."""
        return self.temperature == 0

    def shifted(self, number: int) -> Sampling:
        """The same with a seed that is larger by `number` (modulo 2^63): another sequence's stream."""
        return replace(self, seed=(self.seed + number) % 2**63) if number else self


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """p (..., vocab) of logits (..., vocab), in float64 on the CPU; one-hot if the sampling is greedy."""
    z = logits.detach().cpu().double()
    if not z.isfinite().all():
        raise DivergenceError(
            "the model's logits are not finite, so it cannot write",
            setting="logits",
            remedy="train it again",
        )
    if sampling.greedy:
        return F.one_hot(z.argmax(-1), z.shape[-1]).double()
    if sampling.top_k is None and (sampling.top_p is None or sampling.top_p >= 1):
        return ((z - z.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    z, tokens = z.sort(dim=-1, descending=True, stable=True)
    p = ((z - z[..., :1]) / sampling.temperature).softmax(-1)  # the largest is 0: nothing overflows
    if sampling.top_k is not None:
        p[..., sampling.top_k :] = 0
        p = p / p.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:  # at 1, rounding would cut the tail
        before = F.pad(p.cumsum(-1)[..., :-1], (1, 0))  # what the likelier tokens have together
        p = p.masked_fill(before >= sampling.top_p, 0)
        p = p / p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, tokens, p)


def draw(p: Tensor, generator: torch.Generator) -> int:
    """One token of the distribution p (vocab,)."""
    return quantile(p, _uniform(generator))


def quantile(p: Tensor, u: float) -> int:
    """The first token at which the cumulative sum of p (vocab,) exceeds u times its end; u in [0, 1).

    The sum rises at that token, so its probability is not 0. There is one: the largest u is 1 - 2^-53, and
    that times the end of the sum, whatever it was rounded to, is still below it.
    """
    cumulative = p.cumsum(0)
    return int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))


def acceptance(token: int, q: Tensor, p: Tensor) -> float:
    """min(1, p / q) at a token that was drawn from q."""
    assert q[token] > 0, "a token that was drawn has a probability"
    return min(1.0, float(p[token] / q[token]))


def residual(q: Tensor, p: Tensor) -> Tensor:
    """norm(max(p - q, 0)); p itself where that is 0, which a rejection meets only by rounding."""
    excess = (p - q).clamp(min=0)
    total = excess.sum()
    return excess / total if total > 0 else p


def verify(token: int, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[bool, int]:
    """Whether `token`, drawn from q (vocab,), is accepted, and the token to write: one of p (vocab,)."""
    if _uniform(generator) < acceptance(token, q, p):
        return True, token
    return False, draw(residual(q, p), generator)


def verify_certain(token: int, p: Tensor, generator: torch.Generator) -> tuple[bool, int]:
    """`verify` of a token that was certain: q is one there and zero elsewhere, and is not written out."""
    if _uniform(generator) < float(p[token]):
        return True, token
    rest = p.clone()
    rest[token] = 0
    return False, draw(rest if rest.sum() > 0 else p, generator)


def _uniform(generator: torch.Generator) -> float:
    """A multiple of 2^-53 in [0, 1)."""
    return torch.rand((), dtype=torch.float64, generator=generator).item()
