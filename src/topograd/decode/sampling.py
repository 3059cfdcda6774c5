"""Sampling of tokens, and the acceptance rule of sampled drafts.

    p = softmax(z / T)     over the top_k largest logits, then over the fewest likeliest tokens whose
                           probability, among those, reaches top_p ("The Curious Case of Neural Text
                           Degeneration", nucleus sampling), then over those that have at least min_p times
                           the probability of the likeliest; T = 0 is the likeliest token alone

Before that, the logits may be changed by what was written before them: bias, penalties, a grammar
(`processor.py`).

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from topograd.errors import ConfigError, DivergenceError
from topograd.limits import check_rules

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from topograd.decode.grammar import CompiledGrammar


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have this probability together."""
    min_p: float | None = None
    """Draw among the tokens that have at least this share of the likeliest one's probability only."""
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token, what is added to its logit."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the text has."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the text has it."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt or text have, and multiplies their negative ones."""
    grammar: CompiledGrammar | None = None
    """What the text must be."""

    def __post_init__(self) -> None:
        k, p, share = self.top_k, self.top_p, self.min_p
        check_rules(
            self,
            temperature=(0 <= self.temperature < math.inf, "finite and at least 0"),
            top_k=(k is None or k >= 1, "at least 1, or be left out"),
            top_p=(p is None or 0 < p <= 1, "above 0 and at most 1, or be left out"),
            min_p=(share is None or 0 <= share <= 1, "0 to 1, or be left out"),
            seed=(0 <= self.seed < 2**63, "at least 0 and below 2^63"),
            presence_penalty=(math.isfinite(self.presence_penalty), "a finite number"),
            frequency_penalty=(math.isfinite(self.frequency_penalty), "a finite number"),
            repetition_penalty=(0 < self.repetition_penalty < math.inf, "finite and above 0"),
        )
        for token, bias in self.logit_bias.items():
            if token < 0 or not math.isfinite(bias):
                allowed = "finite numbers by token, from 0 on"
                raise ConfigError(setting="logit_bias", given={token: bias}, allowed=allowed)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: each token is the likeliest one."""
        return self.temperature == 0

    @property
    def looks_back(self) -> bool:
        """Whether logits are changed before a token is drawn (`processor.py`)."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return bool(self.logit_bias) or any(penalties) or self.grammar is not None

    def shifted(self, number: int) -> Sampling:
        """The same with a seed that is larger by `number` (modulo 2^63): another sequence's stream."""
        return replace(self, seed=(self.seed + number) % 2**63) if number else self


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """p (..., vocab) of logits (..., vocab), in float64 on the CPU; one-hot if the sampling is greedy."""
    return distribution(finite(logits), sampling)


def finite(logits: Tensor) -> Tensor:
    """Logits in float64 on the CPU; DivergenceError where one is no number."""
    z = logits.detach().cpu().double()
    if not z.isfinite().all():
        raise not_finite()
    return z


def not_finite() -> DivergenceError:
    """The error of logits among which is no number."""
    problem = "the model's logits are not finite, so it cannot write"
    return DivergenceError(problem, setting="logits", remedy="train it again")


def distribution(z: Tensor, sampling: Sampling) -> Tensor:
    """The same of float64 logits on the CPU, of which some, but not all of a row, may be -inf: forbidden."""
    import torch
    import torch.nn.functional as F

    if sampling.greedy:
        return F.one_hot(z.argmax(-1), z.shape[-1]).double()
    if sampling.top_k is None and (sampling.top_p is None or sampling.top_p >= 1):
        p = ((z - z.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
        return _likely(p, sampling.min_p)
    z, tokens = z.sort(dim=-1, descending=True, stable=True)
    p = ((z - z[..., :1]) / sampling.temperature).softmax(-1)  # the largest is 0: nothing overflows
    if sampling.top_k is not None:
        p[..., sampling.top_k :] = 0
        p = p / p.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:  # at 1, rounding would cut the tail
        before = F.pad(p.cumsum(-1)[..., :-1], (1, 0))  # what the likelier tokens have together
        p = p.masked_fill(before >= sampling.top_p, 0)
        p = p / p.sum(-1, keepdim=True)
    return _likely(torch.zeros_like(p).scatter(-1, tokens, p), sampling.min_p)


def _likely(p: Tensor, share: float | None) -> Tensor:
    """p over the tokens that have at least a share of the likeliest one's probability."""
    if not share:
        return p
    p = p.masked_fill(p < share * p.amax(-1, keepdim=True), 0)
    return p / p.sum(-1, keepdim=True)


def draw(p: Tensor, generator: torch.Generator) -> int:
    """One token of the distribution p (vocab,)."""
    return quantile(p, _uniform(generator))


def quantile(p: Tensor, u: float) -> int:
    """The first token at which the cumulative sum of p (vocab,) exceeds u times its end; u in [0, 1).

    The sum rises at that token, so its probability is not 0. There is one: the largest u is 1 - 2^-53, and
    that times the end of the sum, whatever it was rounded to, is still below it.
    """
    import torch

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
    import torch

    return torch.rand((), dtype=torch.float64, generator=generator).item()
