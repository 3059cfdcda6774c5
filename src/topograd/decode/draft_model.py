"""Drafts by another model, smaller and with the same tokenizer.

It has a cache of its own that follows the text: what it drafted and was kept is not computed again, and what
was refused is taken back. Cost: one token of the small model a draft. Source: "Fast Inference from
Transformers via Speculative Decoding" (Leviathan et al. 2023) §2. Limits: rows longer than the small model's
context are not drafted; both models are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from topograd.decode.autotune import DraftRule
from topograd.decode.drafters import Draft, Drafting, Generators, certainty
from topograd.decode.engine import AnyCache, Engine
from topograd.decode.sampling import Sampling
from topograd.errors import ConfigError

MODEL_RULE = DraftRule(0.3, 5)
"""Draft while the likeliest token has more than this probability, at most so many."""


class ModelDrafter:
    """The full depth of another model."""

    exit: int | None = None
    vocabulary: Tensor | None = None

    def __init__(
        self, engine: Engine, small: Engine, name: str = "model", rule: DraftRule | None = None
    ) -> None:
        if small.vocab > engine.vocab:
            raise ConfigError(
                f"the draft model {name} predicts {small.vocab} tokens and the model {engine.vocab}; "
                "give one with the same tokenizer"
            )
        self.engine, self.small, self.name, self.rule = engine, small, name, rule or MODEL_RULE
        self._full = small.exits[-1]
        self._own: AnyCache | None = None
        self._alone = Drafting(engine, [self])

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """It is a drafter by itself too."""
        return self._alone.draft(cache, active, sampling, generators)

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> list[bool]:
        fits = [on and len(text) < self.small.context for text, on in zip(cache.tokens, active, strict=True)]
        texts = [text if on else [] for text, on in zip(cache.tokens, fits, strict=True)]
        if self._own is None or len(self._own.tokens) != len(active):
            self._own = self.small.start([text[:1] or [0] for text in texts])
        own = self._own
        kept = [
            common(mine, text) if on else len(mine)
            for mine, text, on in zip(own.tokens, texts, fits, strict=True)
        ]
        kept = [min(n, len(text) - 1) if on else n for n, text, on in zip(kept, texts, fits, strict=True)]
        if kept != own.lengths():
            own.truncate(kept)
        self._new = [text[n:] if on else [] for text, n, on in zip(texts, kept, fits, strict=True)]
        return fits

    def step(self, cache: AnyCache, drafting: Sequence[bool], new: Sequence[Sequence[int]]) -> Tensor:
        own = self._own
        assert own is not None, "begin comes first"
        room = [self.small.context - n for n in own.lengths()]
        pushed = [[*first, *more][:left] for first, more, left in zip(self._new, new, room, strict=True)]
        own.push(pushed)
        self._new = [[] for _ in new]
        self.small.run(own, self._full)
        return self.small.logits(own, self._full)[:, -1]

    def scores(self, logits: Tensor) -> Tensor:
        return certainty(logits)

    def pushed(self, row: int) -> int:
        return 0


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their start."""
    least = min(len(a), len(b))
    if list(a[:least]) == list(b[:least]):
        return least
    return next(i for i in range(least) if a[i] != b[i])
