"""Speculation: somebody drafts, the model verifies the whole draft at once. Exact.

A round, in each row. A drafter (`drafters.py`) guesses the next tokens: the first stages of the model, a
lookup in the text, a draft stage, a smaller model, or several of them. Those tokens are now pending before
the later stages, which run them as one batch and predict at every drafted position what the full model would
have written:

    greedy     drafts are kept up to the first that is not the full model's own token, which replaces it
    sampled    each draft x ~ q is kept with probability min(1, p / q), else replaced from the residual
               (`sampling.verify`); whether to draft depends on what is before the token alone, so the text
               has exactly the full model's distribution

and one token of the full model follows. What the draft stages computed is not computed again. A rejected
draft is forgotten by taking every watermark back to the last token that was kept.

In a batch, rows draft side by side and each keeps what it may: their lengths drift apart, and the cache
allows it. Source: "Product of Experts" §5.4.

Limits. In float32, the same position in another batch shape is rounded differently: where the full model's
two best logits are closer than that, the token can differ from token-by-token decoding. In float64 none did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from topograd.decode.autotune import DraftRule
from topograd.decode.drafters import Draft, Drafter, PrefixDrafter
from topograd.decode.engine import AnyCache, Emitted, Engine, check_finite, read_together
from topograd.decode.exit_rules import check_exits
from topograd.decode.sampling import Sampling, draw, generators, probabilities, verify, verify_certain


@dataclass
class Count:
    """Drafts that were made, and kept."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Drafts kept over drafts made."""
        return self.accepted / self.drafted if self.drafted else math.nan


@dataclass
class Tally(Count):
    """What a speculation did since `begin`."""

    rounds: int = 0
    by: dict[str, Count] = field(default_factory=dict)
    """The same by drafter."""


class Speculate:
    """Draft by a rule with the stages up to exit `stage`, or by any drafter; verify with all stages."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | DraftRule,
        stage: int = 0,
        sampling: Sampling | None = None,
    ) -> None:
        if engine.plan.prediction.path is not None:
            check_exits(engine.plan)
        self.engine = engine
        self.drafter = PrefixDrafter(engine, drafter, stage) if isinstance(drafter, DraftRule) else drafter
        self.full = engine.exits[-1]
        self.sampling = sampling or Sampling()
        self.tally = Tally()
        self.drafted: list[int] = []
        """How many tokens were drafted in each row by the last `advance`."""

    def begin(self, rows: int) -> None:
        self.generators = generators(self.sampling, rows)
        self.tally = Tally()

    @torch.inference_mode()
    def advance(self, cache: AnyCache, active: Sequence[bool]) -> list[list[Emitted]]:
        start = cache.lengths()
        drafts = self.drafter.draft(cache, active, self.sampling, self.generators)
        counts = [len(draft.tokens) + 1 for draft in drafts]
        self.engine.run(cache, self.full)
        verdicts = self._judge(drafts, self.engine.logits(cache, self.full, counts), active)
        kept = [n + accepted for n, (accepted, _) in zip(start, verdicts, strict=True)]
        if kept != cache.lengths():
            cache.truncate(kept)
        self.engine.append(cache, [[t] if on else [] for (_, t), on in zip(verdicts, active, strict=True)])
        self._count(drafts, verdicts, active)
        return [
            self._emitted(draft, accepted, token) if on else []
            for draft, (accepted, token), on in zip(drafts, verdicts, active, strict=True)
        ]

    def _emitted(self, draft: Draft, accepted: int, token: int) -> list[Emitted]:
        last = self.engine.last
        kept = zip(draft.tokens[:accepted], draft.exits, draft.drafters, strict=False)
        return [
            *(Emitted(drafted, last if exit_ is None else exit_, who) for drafted, exit_, who in kept),
            Emitted(token, last),
        ]

    def _judge(
        self, drafts: Sequence[Draft], logits: Tensor, active: Sequence[bool]
    ) -> list[tuple[int, int]]:
        """For each row how many drafts are kept, and the full model's token that follows them."""
        if self.sampling.greedy:
            return _agreed(drafts, logits)
        each = zip(drafts, logits.cpu(), self.generators, active, strict=True)  # one copy for all rows
        return [self._sampled(draft, z, g) if on else (0, 0) for draft, z, g, on in each]

    def _sampled(self, draft: Draft, logits: Tensor, generator: torch.Generator) -> tuple[int, int]:
        p = probabilities(logits[: len(draft.tokens) + 1], self.sampling)
        for i, (token, q) in enumerate(zip(draft.tokens, draft.q, strict=True)):
            accepted, token = (
                verify_certain(token, p[i], generator) if q is None else verify(token, q, p[i], generator)
            )
            if not accepted:
                return i, token
        return len(draft.tokens), draw(p[-1], generator)

    def _count(
        self, drafts: Sequence[Draft], verdicts: Sequence[tuple[int, int]], active: Sequence[bool]
    ) -> None:
        self.drafted = [len(draft.tokens) for draft in drafts]
        self.tally.rounds += sum(active)
        for draft, (accepted, _) in zip(drafts, verdicts, strict=True):
            for place, name in enumerate(draft.drafters):
                for count in (self.tally, self.tally.by.setdefault(name, Count())):
                    count.drafted += 1
                    count.accepted += place < accepted


def _agreed(drafts: Sequence[Draft], logits: Tensor) -> list[tuple[int, int]]:
    """How many drafts of each row are the full model's likeliest tokens, and its token behind them.

    All rows are read at once: logits (rows, most drafts + 1, vocab).
    """
    best, tokens = read_together(*logits.max(-1))
    verdicts = []
    for draft, scores, own in zip(drafts, best, tokens, strict=True):
        check_finite(scores[: len(draft.tokens) + 1])
        wrong = (place for place, token in enumerate(draft.tokens) if token != own[place])
        accepted = next(wrong, len(draft.tokens))
        verdicts.append((accepted, own[accepted]))
    return verdicts
