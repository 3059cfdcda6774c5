"""Draft model: another run, smaller and with the same tokenizer.

It has a sequence of its own for each text: what it drafted and was accepted is not computed again, and what
was rejected is rolled back. Cost: one token of the small model a draft. Source: "Fast Inference from
Transformers via Speculative Decoding" (Leviathan et al. 2023) §2. Limits: texts longer than the small model's
context are not drafted; both models are in memory.
"""

from collections import abc

from torch import Tensor

from topograd.decode.cache import Batch, Cache
from topograd.decode.draft_head import DraftHead
from topograd.decode.drafters import MAX_DRAFT, Draft, DraftRule, certainty
from topograd.decode.engine import Engine
from topograd.decode.sequence import Sequence, common_prefix
from topograd.errors import ConfigError

MODEL_RULE = DraftRule(0.3, 5)
"""Draft while the likeliest token has more than this probability, at most so many."""


class Twin:
    """A drafter's own sequence of a text."""

    guesses: Tensor
    """Of a block that was computed: (slots, tokens)."""

    def __init__(self, cache: Cache) -> None:
        self.sequence = cache.new()
        self.known = 0
        """Tokens that were read with the model's own states, where a drafter reads those."""

    def close(self) -> None:
        self.sequence.cache.free(self.sequence)


class TwinDrafter:
    """A drafter with a cache of its own, and in it a sequence of each text."""

    name: str
    exit: int | None = None
    most = MAX_DRAFT
    _cache: Cache

    def twin(self, sequence: Sequence) -> Twin:
        """Its own sequence of a text."""
        if self.name not in sequence.drafter_state:
            sequence.drafter_state[self.name] = Twin(self._cache)
        twin: Twin = sequence.drafter_state[self.name]
        return twin

    def roll_back(self, sequence: Sequence, most: int) -> int:
        """Keep of the twin what it has in common with the text but for its last token: how much that is."""
        own = self.twin(sequence).sequence
        length = min(common_prefix(own.tokens, sequence.tokens), most, len(sequence) - 1)
        self._cache.truncate([own], [length])
        return length

    def scores(self, logits: Tensor) -> Tensor:
        """(rows,): the probability of the likeliest token."""
        return certainty(logits)


class ModelDrafter(TwinDrafter):
    """The full depth of another model."""

    def __init__(
        self,
        engine: Engine,
        small: Engine,
        name: str = "model",
        rule: DraftRule | None = None,
        vocabulary: Tensor | None = None,
    ) -> None:
        """With a `vocabulary` it guesses its tokens only."""
        if small.vocab > engine.vocab:
            problem = f"the draft model {name} predicts {small.vocab} tokens and the model {engine.vocab}"
            remedy = "give one with the same tokenizer"
            raise ConfigError(problem, setting="small", given=name, remedy=remedy)
        self.small, self.name, self.rule = small, name, rule or MODEL_RULE
        self._full, self._cache = small.exits[-1], small.new_cache()
        if vocabulary is not None:  # the small model may predict fewer tokens
            vocabulary = vocabulary[vocabulary < small.vocab]
        self.vocabulary, self.head = vocabulary, DraftHead(small, self._full, vocabulary)

    def begin(self, batch: Batch) -> list[bool]:
        fits = [len(sequence) < self.small.context for sequence in batch]
        for sequence, on in zip(batch, fits, strict=True):
            if on:
                self.roll_back(sequence, len(sequence))
        return fits

    def step(self, batch: Batch, drafts: abc.Sequence[Draft]) -> Tensor:
        own = [self.twin(sequence).sequence for sequence in batch]
        new = []
        for mine, sequence, draft in zip(own, batch, drafts, strict=True):
            text = [*sequence.tokens, *draft.tokens]
            new.append(text[len(mine) : self.small.context])
        self._cache.push(own, new)
        self.small.run(own, self._full)
        return self.head.logits(own)
