"""Drafters: proposals of next tokens for a speculation to verify. Any proposal is safe; good ones pay.

Two kinds of proposal:

    looked up    what followed the last tokens in some text, several at once and for nothing (`lookup.py`)
    computed     one token after the other: by the first stages of the model (`PrefixDrafter`), by a draft
                 stage (`draft_stage.py`), by a smaller model (`draft_model.py`)

`CompositeDrafter` takes several, in order, at most one of them autoregressive. At each place of a draft a
policy chooses: what was looked up ends the draft, a computed token is added and the policy chooses again.
Without a calibration the first that has a proposal is taken (`FirstMatchPolicy`); with one, what pays most by
measured costs and acceptances (`calibration/policy.py`).

Every proposal has a score before it is made (a match's length, the likeliest token's probability, a margin),
and whether it is taken depends on that alone. So sampled text stays exact: a computed token is drawn from q,
a looked up one has a q that is one-hot, and both are accepted by the rejection rule (`sampling.py`).

What a drafter keeps of a text is in the sequence (`Sequence.drafter_state`), so one drafter serves them all.

Source: "Product of Experts" §5.4 for prefixes; "Prompt Lookup Decoding" (A. Saxena) for lookups. Limits: text
that loops flatters every drafter.
"""

import math
import operator
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from topograd.decode.cache import Batch
from topograd.decode.draft_head import DraftHead
from topograd.decode.engine import Engine, check_exits, read_together
from topograd.decode.sampling import draw
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError
from topograd.limits import check_numbers

Guess = tuple[int, float]
"""A token that was looked up, and its score."""
Guesses = Mapping[str, abc.Sequence[Guess]]
"""By drafter."""
MAX_DRAFT = 64
MAX_BATCH_DRAFT = 3
"""Of each sequence where several are verified together: attention is as wide as the longest draft."""


@dataclass(frozen=True)
class DraftRule:
    """Draft the next token while its score is above `threshold`, at most `longest`."""

    threshold: float
    longest: int

    def __post_init__(self) -> None:
        check_numbers(self, threshold=(0, math.inf), longest=(1, math.inf))


@dataclass
class Draft:
    """The drafted tokens of a sequence, each with its drafter and the distribution that it was drawn from."""

    tokens: list[int] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    exits: list[int | None] = field(default_factory=list)
    """The exit that each came from, counted from 0; None if it came from no stage."""
    q: list[Tensor | None] = field(default_factory=list)
    """None where the guess was certain, or nothing is drawn."""
    promised: list[float] = field(default_factory=list)
    """The chance of each behind the ones before it, by the policy."""
    chance: float = 1.0
    """That all of it is accepted, by the policy."""
    pushed: int = 0
    """How many of the tokens are in the cache already."""

    def add(
        self, token: int, drafter: str, chance: float, q: Tensor | None = None, exit_: int | None = None
    ) -> None:
        self.tokens.append(token)
        self.drafters.append(drafter)
        self.exits.append(exit_)
        self.q.append(q)
        self.promised.append(chance / self.chance if self.chance else 0.0)
        self.chance = chance


class LookupDrafter(Protocol):
    """Guesses that are looked up."""

    name: str
    rule: DraftRule
    """What `FirstMatchPolicy` goes by."""

    def begin(self, sequence: Sequence) -> None:
        """A new round of a sequence whose tokens have grown."""

    def find(self, sequence: Sequence, ahead: abc.Sequence[int], count: int) -> list[Guess]:
        """Up to `count` tokens behind the sequence and the drafted tokens `ahead`."""


@runtime_checkable
class AutoregressiveDrafter(Protocol):
    """Guesses that are computed, a token at a time, in all sequences of a batch at once."""

    name: str
    rule: DraftRule
    exit: int | None
    vocabulary: Tensor | None
    """The tokens that its logits are of; None if they are all of them."""
    most: int
    """Tokens of a draft that it can compute."""

    def begin(self, batch: Batch) -> list[bool]:
        """A new round; says for which sequences it can draft."""

    def step(self, batch: Batch, drafts: abc.Sequence[Draft]) -> Tensor:
        """Logits (rows, tokens) behind each sequence and its draft so far."""

    def scores(self, logits: Tensor) -> Tensor:
        """(rows,): how sure it is of its likeliest token."""


class DraftPolicy(Protocol):
    """Which guesses are made and kept."""

    def choose(
        self, place: int, chance: float, guesses: Guesses, computed: str | None, sequences: int
    ) -> tuple[str | None, int]:
        """Who drafts at this place of a draft, and how many tokens; (None, 0) ends the draft."""

    def accept(
        self, name: str, score: float, place: int, chance: float, sequences: int, computed: bool
    ) -> float | None:
        """The chance that a draft is accepted with this guess in it, or None if it is not to be made."""

    def observe(self, name: str, promised: float, accepted: bool) -> None:
        """A guess with this promised chance was judged, behind accepted ones."""
        return

    def forget(self) -> None:
        """Drop what was observed."""
        return

    def pays(self, chances: abc.Sequence[abc.Sequence[float]]) -> bool:
        """Whether the drafts of a batch are verified, by the chance that each of their tokens is accepted."""
        return True


class FirstMatchPolicy(DraftPolicy):
    """The first drafter that has a guess; each may have a threshold on its score and a longest draft."""

    def __init__(self, rules: Mapping[str, DraftRule]) -> None:
        self.rules = rules

    def choose(
        self, place: int, chance: float, guesses: Guesses, computed: str | None, sequences: int
    ) -> tuple[str | None, int]:
        for name, rule in self.rules.items():
            if name == computed and place < rule.longest:
                return name, 1
            if guesses.get(name):
                return name, min(len(guesses[name]), rule.longest)
        return None, 0

    def accept(
        self, name: str, score: float, place: int, chance: float, sequences: int, computed: bool
    ) -> float | None:
        return chance if score > self.rules[name].threshold else None


class CompositeDrafter:
    """Several drafters, in order, and a policy that chooses among them at each place of a draft."""

    def __init__(
        self,
        engine: Engine,
        drafters: abc.Sequence[LookupDrafter | AutoregressiveDrafter],
        policy: DraftPolicy | None = None,
    ) -> None:
        names = [drafter.name for drafter in drafters]
        computing = [drafter for drafter in drafters if isinstance(drafter, AutoregressiveDrafter)]
        if not drafters or len(computing) > 1 or len(set(names)) < len(names):
            allowed = "one or more, each once, at most one of them a prefix, a draft stage or a model"
            raise ConfigError(setting="drafters", given=names, allowed=allowed)
        self.engine, self.name, self.drafters = engine, "+".join(names), list(drafters)
        self.lookups = [drafter for drafter in drafters if not isinstance(drafter, AutoregressiveDrafter)]
        self.computing = computing[0] if computing else None
        self.policy = policy or FirstMatchPolicy({drafter.name: drafter.rule for drafter in drafters})

    def draft(self, batch: Batch) -> list[Draft]:
        """A draft for each sequence, empty where there is no guess; its tokens are in the cache."""
        drafts = [Draft() for _ in batch]
        for lookup in self.lookups:
            for sequence in batch:
                lookup.begin(sequence)
        computing = self.computing
        able = computing.begin(batch) if computing else [False] * len(batch)
        alive = list(range(len(batch)))
        while alive:
            alive = [i for i in alive if self._look(batch[i], drafts[i], able[i], len(batch))]
            if computing is None or not alive:
                break
            some, ahead = [batch[i] for i in alive], [drafts[i] for i in alive]
            for i, on in zip(alive, self._compute(computing, some, ahead, len(batch)), strict=True):
                able[i] = on
        if computing is None:  # a computed token may have been drawn: to drop it then would bias the text
            chances = [list(accumulate(draft.promised, operator.mul)) for draft in drafts]
            if not self.policy.pays(chances):
                return [Draft() for _ in batch]
        batch[0].cache.push(batch, [draft.tokens[draft.pushed :] for draft in drafts])
        return drafts

    def _look(self, sequence: Sequence, draft: Draft, able: bool, sequences: int) -> bool:
        """Take what was looked up; True if a token is to be computed instead."""
        place = len(draft.tokens)
        longest = MAX_DRAFT if sequences == 1 else MAX_BATCH_DRAFT
        room = min(self.engine.context - len(sequence) + draft.pushed, longest)
        if place >= room:
            return False
        guesses = {lookup.name: lookup.find(sequence, draft.tokens, room - place) for lookup in self.lookups}
        if (processor := sequence.processor) is not None:  # up to the first that the grammar forbids
            for lookup, found in guesses.items():
                guesses[lookup] = found[: processor.fits(draft.tokens, [token for token, _ in found])]
        computed = self.computing.name if self.computing and able and place < self.computing.most else None
        name, count = self.policy.choose(place, draft.chance, guesses, computed, sequences)
        if name is None or name == computed:
            return name is not None
        for token, score in guesses[name][:count]:
            chance = self.policy.accept(name, score, len(draft.tokens), draft.chance, sequences, False)
            if chance is None:
                break
            draft.add(token, name, chance)
        return False

    def _compute(
        self, drafter: AutoregressiveDrafter, batch: list[Sequence], drafts: list[Draft], sequences: int
    ) -> list[bool]:
        """One token more in each sequence where the policy accepts it; where it did."""
        logits = drafter.step(batch, drafts)
        if not all(sequence.plain for sequence in batch):
            logits = logits.cpu()  # one copy from the device either way
            logits = self._processed(logits, batch, drafts)
        scores, best = read_together(drafter.scores(logits), largest(logits))
        accepted = []
        for row, (sequence, draft) in enumerate(zip(batch, drafts, strict=True)):
            place, chance = len(draft.tokens), None
            if not math.isnan(scores[row]):  # it is none where the drafter knows no token that is allowed
                chance = self.policy.accept(drafter.name, scores[row], place, draft.chance, sequences, True)
            if chance is None:
                accepted.append(False)
                continue
            token, q = self._token(best[row]), None
            if not sequence.sampling.greedy:
                q = sequence.probabilities(logits[row])
                token, q = self._token(draw(q, sequence.generator)), self._spread(q)
            draft.add(token, drafter.name, chance, q, drafter.exit)
            accepted.append(not sequence.ends(draft.tokens))
        return accepted

    def _processed(self, logits: Tensor, batch: list[Sequence], drafts: list[Draft]) -> Tensor:
        """The drafter's logits as each sequence's sampling wants them behind its draft so far."""
        if not any(sequence.sampling.looks_back for sequence in batch):
            return logits
        rows = []
        for z, sequence, draft in zip(logits.double(), batch, drafts, strict=True):
            if sequence.processor is not None:
                whole = sequence.processor.process(self._spread(z, -torch.inf)[None], draft.tokens)[0]
                z = whole[: len(z)] if self._vocabulary is None else whole[self._vocabulary]
            rows.append(z)
        return torch.stack(rows)

    @cached_property
    def _vocabulary(self) -> list[int] | None:
        """The tokens that the computed logits are of, on the host."""
        known = self.computing.vocabulary if self.computing else None
        return None if known is None else known.tolist()

    def _token(self, place: int) -> int:
        return place if self._vocabulary is None else self._vocabulary[place]

    def _spread(self, q: Tensor, other: float = 0.0) -> Tensor:
        """q over all tokens of the model, of which the drafter's others have `other`."""
        vocab, known = self.engine.vocab, self._vocabulary
        if known is None and len(q) == vocab:
            return q
        ids = torch.arange(len(q)) if known is None else torch.tensor(known)
        return torch.full((vocab,), other, dtype=q.dtype).scatter_(0, ids, q)


class PrefixDrafter:
    """The stages up to an exit draft while their best logit is above the second by more than a threshold.

    What they computed is not computed again. With a `vocabulary` they guess its tokens only.
    """

    most = MAX_DRAFT

    def __init__(
        self, engine: Engine, rule: DraftRule | None = None, exit_: int = 0, vocabulary: Tensor | None = None
    ) -> None:
        check_exits(engine.plan)
        self.engine, self.rule = engine, rule or DraftRule(0.0, MAX_DRAFT)
        self.exit: int | None = exit_
        self.stage = engine.stage_of(exit_)
        if exit_ == engine.last:
            problem = f"stage {exit_ + 1} is the last, so nothing is left to verify"
            raise ConfigError(problem, setting="exit", given=exit_ + 1, remedy="draft with less")
        self.name = f"stage {exit_ + 1}" + (f" ({len(vocabulary)})" if vocabulary is not None else "")
        self.head = DraftHead(engine, self.stage, vocabulary)
        self.vocabulary = vocabulary

    def begin(self, batch: Batch) -> list[bool]:
        return [True] * len(batch)

    def step(self, batch: Batch, drafts: abc.Sequence[Draft]) -> Tensor:
        batch[0].cache.push(batch, [draft.tokens[draft.pushed :] for draft in drafts])
        for draft in drafts:
            draft.pushed = len(draft.tokens)
        self.engine.run(batch, self.stage)
        return self.head.logits(batch)

    def scores(self, logits: Tensor) -> Tensor:
        if logits.device.type != "cpu" or len(logits) > 1:
            best = logits.topk(2).values
            return best[:, 0] - best[:, 1]
        row = logits[0].numpy()  # a sort takes longer than reading it twice
        top = row.argmax()
        margin = row[top] - max(row[:top].max(initial=-math.inf), row[top + 1 :].max(initial=-math.inf))
        return logits.new_tensor([margin])


def certainty(logits: Tensor) -> Tensor:
    """(rows,): the probability of the likeliest token; on a CPU by numpy, which is faster."""
    if logits.device.type != "cpu":
        return (logits.amax(-1) - logits.logsumexp(-1)).exp()
    rows = logits.numpy()
    with np.errstate(invalid="ignore"):  # of a row that is -inf it is no number
        return torch.from_numpy(1 / np.exp(rows - rows.max(-1, keepdims=True)).sum(-1))


def largest(logits: Tensor) -> Tensor:
    """(rows,): which logit is the largest, the first of several; on a CPU by numpy, which is faster."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
