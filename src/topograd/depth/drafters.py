"""Drafters: who guesses the next tokens for a speculation to verify. Any guess is safe; good ones are fast.

    PrefixDrafter   the first stages of the model itself, while their margin is above a threshold
    LookupDrafter   what followed the last n tokens where they stood before in this text, longest n first
    FirstOf         the first of several that has a guess; the tuner may give each row another order

A draft has tokens and, where sampling draws them, the distribution q that each was drawn from. A lookup's
guess is certain (q is one-hot), so it is kept with probability p, and replaced from p without it: exact too.

Cost. A prefix drafts at the price of its stages, and what it computed is not computed again. A lookup costs a
search of the text, O(tokens) a round, and no arithmetic. Source: "Product of Experts" §5.4 for prefixes;
"Prompt Lookup Decoding" (A. Saxena) for lookups. Limits: a lookup pays where text repeats itself or its
prompt; text that loops flatters it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from topograd.depth.autotune import DraftRule
from topograd.depth.engine import AnyCache, Engine
from topograd.depth.exit_rules import check_exits
from topograd.depth.sampling import Sampling, draw, probabilities
from topograd.errors import ConfigError

Generators = Sequence[torch.Generator]
"""A random stream for each row."""
LONGEST_MATCH = 3
LOOKUP_TOKENS = 6


@dataclass
class Draft:
    """One row's drafted tokens, each with the distribution that it was drawn from (none if greedy)."""

    tokens: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    drafter: str = ""
    """Who made it."""
    exit: int | None = None
    """The exit that it came from, counted from 0; None if it came from no stage."""


class Drafter(Protocol):
    """Guesses the next tokens of each row, and leaves them in the cache."""

    name: str

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """A draft for each row, empty where it has no guess and in rows that are not active."""


class PrefixDrafter:
    """The stages up to an exit draft while their best logit is above the second by more than a threshold."""

    def __init__(self, engine: Engine, rule: DraftRule, exit_: int = 0) -> None:
        check_exits(engine.plan)
        self.engine, self.rule, self.exit = engine, rule, exit_
        self.stage = engine.stage_of(exit_)
        if exit_ == engine.last:
            raise ConfigError(f"stage {exit_ + 1} is the last, so nothing is left to verify; draft with less")
        self.name = f"stage {exit_ + 1}"

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        drafts = [Draft(drafter=self.name, exit=self.exit) for _ in active]
        drafting = list(active)
        while True:
            drafting = [
                on and n < self.engine.context and len(draft.tokens) < self.rule.longest
                for on, n, draft in zip(drafting, cache.lengths(), drafts, strict=True)
            ]
            if not any(drafting):
                return drafts
            self.engine.run(cache, self.stage)
            logits = self.engine.logits(cache, self.stage)[:, -1]
            best = logits.topk(2)
            for row, ((first, second), (token, _)) in enumerate(
                zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ):
                drafting[row] = drafting[row] and first - second > self.rule.threshold
                if drafting[row]:
                    _add(drafts[row], token, logits[row], sampling, generators[row])
            cache.push([draft.tokens[-1:] if on else [] for draft, on in zip(drafts, drafting, strict=True)])


def _add(draft: Draft, best: int, logits: Tensor, sampling: Sampling, generator: torch.Generator) -> None:
    if sampling.greedy:
        draft.tokens.append(best)
        return
    q = probabilities(logits, sampling)
    draft.q.append(q)
    draft.tokens.append(draw(q, generator))


class LookupDrafter:
    """What followed the last tokens where they stood before: at most `tokens` of it."""

    name = "lookup"

    def __init__(self, engine: Engine, tokens: int = LOOKUP_TOKENS, longest: int = LONGEST_MATCH) -> None:
        if tokens < 1 or longest < 1:
            raise ConfigError(f"a lookup has tokens {tokens} and longest {longest}; both are at least 1")
        self.engine, self.tokens, self.longest = engine, tokens, longest
        self._vocab = engine.vocab()

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        drafts = []
        for text, on in zip(cache.tokens, active, strict=True):
            room = min(self.tokens, self.engine.context - len(text))
            drafts.append(Draft(followers(text, self.longest, room) if on else [], drafter=self.name))
        if not sampling.greedy:
            for draft in drafts:
                draft.q = [_certain(token, self._vocab) for token in draft.tokens]
        cache.push([draft.tokens for draft in drafts])
        return drafts


def followers(text: Sequence[int], longest: int, count: int) -> list[int]:
    """Up to `count` tokens that followed the newest earlier place of the text's last n tokens, n ≤ `longest`.

    >>> followers([1, 2, 3, 9, 1, 2], longest=3, count=2)
    [3, 9]
    """
    for n in range(min(longest, len(text) - 1), 0, -1):
        end = list(text[len(text) - n :])
        for start in range(len(text) - n - 1, -1, -1):
            if text[start + n - 1] == end[-1] and list(text[start : start + n]) == end:
                return list(text[start + n : start + n + max(count, 0)])
    return []


def _certain(token: int, vocab: int) -> Tensor:
    q = torch.zeros(vocab, dtype=torch.float64)
    q[token] = 1
    return q


class FirstOf:
    """Each row's draft by the first drafter that has a guess for it."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ConfigError("no drafter was given; give at least one")
        self.drafters = tuple(drafters)
        self.name = " then ".join(drafter.name for drafter in self.drafters)

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        drafts = [Draft() for _ in active]
        left = list(active)
        for drafter in self.drafters:
            if any(left):
                for row, draft in enumerate(drafter.draft(cache, left, sampling, generators)):
                    if left[row] and draft.tokens:
                        drafts[row], left[row] = draft, False
        return drafts
