"""Drafters: who guesses the next tokens for a speculation to verify. Any guess is safe; good ones are fast.

Two kinds of guess:

    looked up    what followed the last tokens in some text, several at once and for nothing (`lookup.py`)
    stepped      computed, one token after the other: by the first stages of the model (`PrefixDrafter`),
                 by a draft stage (`draft_stage.py`), by a smaller model (`draft_model.py`)

`Drafting` takes several, in order, at most one of them stepped. At each place of a draft a policy chooses:
what was looked up ends the draft, a step adds one token and asks again. Without a calibration the first that
has a guess is taken (`FirstGuess`); with one, what pays most by measured costs and acceptances (`policy.py`).

Every guess has a score before it is made (a match's length, the likeliest token's probability, a margin), and
whether it is taken depends on that alone. So sampled text stays exact: a stepped token is drawn from q, a
looked up one has a q that is one-hot, and both are kept by the rejection rule (`sampling.py`).

Source: "Product of Experts" §5.4 for prefixes; "Prompt Lookup Decoding" (A. Saxena) for lookups. Limits: text
that loops flatters every drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from topograd.decode.autotune import DraftRule
from topograd.decode.engine import AnyCache, Engine, read_together
from topograd.decode.exit_rules import check_exits
from topograd.decode.sampling import Sampling, draw, probabilities
from topograd.errors import ConfigError

Generators = Sequence[torch.Generator]
"""A random stream for each row."""
Guess = tuple[int, float]
"""A token that was looked up, and its score."""
MOST_DRAFT = 64


@dataclass
class Draft:
    """One row's drafted tokens, each with who made it and the distribution that it was drawn from."""

    tokens: list[int] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    exits: list[int | None] = field(default_factory=list)
    """The exit that each came from, counted from 0; None if it came from no stage."""
    q: list[Tensor | None] = field(default_factory=list)
    """None where the guess was certain, or nothing is drawn."""
    chance: float = 1.0
    """That all of it is kept, by the policy."""

    def add(
        self, token: int, drafter: str, chance: float, q: Tensor | None = None, exit_: int | None = None
    ) -> None:
        self.tokens.append(token)
        self.drafters.append(drafter)
        self.exits.append(exit_)
        self.q.append(q)
        self.chance = chance


class Drafter(Protocol):
    """Guesses the next tokens of each row, and leaves them in the cache."""

    name: str

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """A draft for each row, empty where it has no guess and in rows that are not active."""


class Source(Protocol):
    """Guesses that are looked up."""

    name: str
    rule: DraftRule
    """What `FirstGuess` goes by."""

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> None:
        """A new round: `cache.tokens` has grown, or is of other rows."""

    def find(self, row: int, ahead: Sequence[int], count: int) -> list[Guess]:
        """Up to `count` tokens behind the row's text and the drafted tokens `ahead`."""


@runtime_checkable
class Steps(Protocol):
    """Guesses that are computed, a token at a time, in all rows at once."""

    name: str
    rule: DraftRule
    exit: int | None
    vocabulary: Tensor | None
    """The tokens that its logits are of; None if they are all of them."""

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> list[bool]:
        """A new round; says in which rows it can draft."""

    def step(self, cache: AnyCache, drafting: Sequence[bool], new: Sequence[Sequence[int]]) -> Tensor:
        """Logits (rows, tokens) behind the text and what was drafted, of which `new` is new."""

    def scores(self, logits: Tensor) -> Tensor:
        """(rows,): how sure it is of its likeliest token."""

    def pushed(self, row: int) -> int:
        """How many drafted tokens of a row it has put into the cache itself."""


class Policy(Protocol):
    """Which guesses are made and kept."""

    def look(
        self, place: int, chance: float, found: Mapping[str, Sequence[Guess]], steps: str | None, rows: int
    ) -> tuple[str | None, int]:
        """Who drafts at this place of a draft, and how many tokens; nobody: (None, 0)."""

    def keep(
        self, name: str, score: float, place: int, chance: float, rows: int, computed: bool
    ) -> float | None:
        """The chance that a draft is kept with this guess in it, or None if the guess is not to be made."""


class FirstGuess:
    """The first drafter that has a guess; each may have a threshold on its score and a longest draft."""

    def __init__(self, rules: Mapping[str, DraftRule]) -> None:
        self.rules = rules

    def look(
        self, place: int, chance: float, found: Mapping[str, Sequence[Guess]], steps: str | None, rows: int
    ) -> tuple[str | None, int]:
        for name, rule in self.rules.items():
            if name == steps and place < rule.longest:
                return name, 1
            if found.get(name):
                return name, min(len(found[name]), rule.longest)
        return None, 0

    def keep(
        self, name: str, score: float, place: int, chance: float, rows: int, computed: bool
    ) -> float | None:
        return chance if score > self.rules[name].threshold else None


class Drafting:
    """Several drafters, in order, and a policy that chooses among them at each place of a draft."""

    def __init__(
        self, engine: Engine, drafters: Sequence[Source | Steps], policy: Policy | None = None
    ) -> None:
        if not drafters:
            raise ConfigError("no drafter was given; give at least one")
        names = [drafter.name for drafter in drafters]
        stepped = [drafter for drafter in drafters if isinstance(drafter, Steps)]
        if len(stepped) > 1 or len(set(names)) < len(names):
            raise ConfigError(
                f"the drafters are {', '.join(names)}; give each once, and at most one that computes its "
                "drafts (a prefix, a draft stage, a model)"
            )
        self.engine, self.name = engine, "+".join(names)
        self.sources = [drafter for drafter in drafters if not isinstance(drafter, Steps)]
        self.steps = stepped[0] if stepped else None
        self.policy = policy or FirstGuess({drafter.name: drafter.rule for drafter in drafters})

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        drafts = [Draft() for _ in active]
        for source in self.sources:
            source.begin(cache, active)
        steps, alive, rows = self.steps, list(active), sum(active)
        steppable = steps.begin(cache, active) if steps else [False] * len(drafts)
        rooms = [min(self.engine.context - n, MOST_DRAFT) for n in cache.lengths()]
        new: list[list[int]] = [[] for _ in drafts]
        while any(alive):
            for row in range(len(drafts)):
                alive[row] = alive[row] and self._look(row, drafts[row], rooms[row], steppable[row], rows)
            if steps is None or not any(alive):
                break
            logits = steps.step(cache, alive, new)
            new = self._take(steps, logits, drafts, alive, sampling, generators, rows)
            steppable = [on and bool(tokens) for on, tokens in zip(steppable, new, strict=True)]
        done = [steps.pushed(row) if steps else 0 for row in range(len(drafts))]
        cache.push([draft.tokens[n:] for draft, n in zip(drafts, done, strict=True)])
        return drafts

    def _look(self, row: int, draft: Draft, room: int, steppable: bool, rows: int) -> bool:
        """Take what was looked up; True if a step is to be made instead."""
        place = len(draft.tokens)
        if place >= room:
            return False
        found = {source.name: source.find(row, draft.tokens, room - place) for source in self.sources}
        steps = self.steps.name if self.steps and steppable else None
        name, count = self.policy.look(place, draft.chance, found, steps, rows)
        if name is None or name == steps:
            return name is not None
        for token, score in found[name][:count]:
            chance = self.policy.keep(name, score, len(draft.tokens), draft.chance, rows, False)
            if chance is None:
                break
            draft.add(token, name, chance)
        return False

    def _take(
        self,
        steps: Steps,
        logits: Tensor,
        drafts: Sequence[Draft],
        stepping: Sequence[bool],
        sampling: Sampling,
        generators: Generators,
        rows: int,
    ) -> list[list[int]]:
        """One token more in the rows that are stepping, where the policy keeps it: what is new."""
        logits = logits if sampling.greedy else logits.cpu()  # one copy from the device either way
        scores, best = read_together(steps.scores(logits), logits.argmax(-1))
        tokens = [self._token(place) for place in best]
        new: list[list[int]] = [[] for _ in drafts]
        for row, draft in enumerate(drafts):
            if not stepping[row]:
                continue
            chance = self.policy.keep(steps.name, scores[row], len(draft.tokens), draft.chance, rows, True)
            if chance is None:
                continue
            q = None
            if not sampling.greedy:
                q = probabilities(logits[row], sampling)
                tokens[row] = self._token(draw(q, generators[row]))
                q = self._spread(q)
            draft.add(tokens[row], steps.name, chance, q, steps.exit)
            new[row] = [tokens[row]]
        return new

    @cached_property
    def _vocabulary(self) -> list[int] | None:
        """The tokens that the steps' logits are of, on the host."""
        known = self.steps.vocabulary if self.steps else None
        return None if known is None else known.tolist()

    def _token(self, place: int) -> int:
        return place if self._vocabulary is None else self._vocabulary[place]

    def _spread(self, q: Tensor) -> Tensor:
        """q over all tokens of the model."""
        vocab, known = self.engine.vocab, self._vocabulary
        if known is None and len(q) == vocab:
            return q
        ids = torch.arange(len(q)) if known is None else torch.tensor(known)
        return torch.zeros(vocab, dtype=q.dtype).scatter_(0, ids, q)


class PrefixDrafter:
    """The stages up to an exit draft while their best logit is above the second by more than a threshold.

    What they computed is not computed again.
    """

    vocabulary: Tensor | None = None

    def __init__(self, engine: Engine, rule: DraftRule, exit_: int = 0) -> None:
        check_exits(engine.plan)
        self.engine, self.rule = engine, rule
        self.exit: int | None = exit_
        self.stage = engine.stage_of(exit_)
        if exit_ == engine.last:
            raise ConfigError(f"stage {exit_ + 1} is the last, so nothing is left to verify; draft with less")
        self.name = f"stage {exit_ + 1}"
        self._alone = Drafting(engine, [self])

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """It is a drafter by itself too."""
        return self._alone.draft(cache, active, sampling, generators)

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> list[bool]:
        self._pushed = [0] * len(active)
        return list(active)

    def step(self, cache: AnyCache, drafting: Sequence[bool], new: Sequence[Sequence[int]]) -> Tensor:
        cache.push(new)
        self._pushed = [count + len(tokens) for count, tokens in zip(self._pushed, new, strict=True)]
        self.engine.run(cache, self.stage)
        return self.engine.logits(cache, self.stage)[:, -1]

    def scores(self, logits: Tensor) -> Tensor:
        best = logits.topk(2).values
        return best[:, 0] - best[:, 1]

    def pushed(self, row: int) -> int:
        return self._pushed[row]


def certainty(logits: Tensor) -> Tensor:
    """(rows,): the probability of the likeliest token."""
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
