"""Speculative decoding: a drafter proposes tokens, the full model verifies them in one pass. Exact.

A round, in each sequence. A drafter (`drafters.py`) proposes the next tokens: the first stages of the model,
a lookup in the text, a draft stage, a smaller model, or several of them. Those tokens are now pending before
the later stages, which run them as one batch and predict at every drafted position what the full model would
have written:

    greedy     drafts are accepted up to the first that is not the full model's own token, which replaces it
    sampled    each draft x ~ q is accepted with probability min(1, p / q), else replaced from the residual
               (`sampling.verify`); whether to draft depends on what is before the token alone, so the text
               has exactly the full model's distribution

and one token of the full model follows. Each position is judged behind its own history, so bias, penalties
and grammar (`processor.py`) change it as they would change a token that is written by itself. What the draft
stages computed is not computed again. A rejected draft is forgotten by taking every watermark back to the
last accepted token.

The drafts of all sequences of a batch are verified in one pass, whichever drafter they
are of and however long they are. Source: "Product of Experts" §5.4.

Limits. In float32, the same position in another batch shape is rounded differently: where the full model's
two best logits are closer than that, the token can differ from token-by-token decoding. In float64 none did.
"""

from collections import abc

import torch
from torch import Tensor

from topograd.decode.cache import Batch
from topograd.decode.drafters import (
    AutoregressiveDrafter,
    CompositeDrafter,
    Draft,
    DraftPolicy,
    DraftRule,
    LookupDrafter,
    PrefixDrafter,
)
from topograd.decode.engine import Emitted, Engine, check_exits, check_finite, likeliest
from topograd.decode.sampling import draw, verify, verify_certain
from topograd.decode.sequence import Count, Sequence
from topograd.decode.strategies import DecodeStrategy

Drafter = LookupDrafter | AutoregressiveDrafter


class Speculate(DecodeStrategy):
    """Draft by a rule with the stages up to exit `exit_`, or by some drafters; verify with all stages."""

    drafter: CompositeDrafter

    def __init__(
        self,
        engine: Engine,
        drafters: DraftRule | Drafter | abc.Sequence[Drafter],
        exit_: int = 0,
        policy: DraftPolicy | None = None,
    ) -> None:
        if engine.plan.prediction.path is not None:
            check_exits(engine.plan)
        if isinstance(drafters, DraftRule):
            drafters = PrefixDrafter(engine, drafters, exit_)
        given = drafters if isinstance(drafters, abc.Sequence) else [drafters]
        self.engine, self.exit = engine, engine.last
        self.drafter = CompositeDrafter(engine, given, policy)
        self.full = engine.exits[-1]

    def last_stages(self) -> list[int]:
        return [self.full]

    def first_stages(self) -> list[int]:
        computing = self.drafter.computing
        return [computing.stage] if isinstance(computing, PrefixDrafter) else []

    @torch.inference_mode()
    def step(self, batch: Batch) -> list[list[Emitted]]:
        start = [len(sequence) for sequence in batch]
        for sequence in batch:
            sequence.start_writing()  # before drafts are pushed
        drafts = self.drafter.draft(batch)
        counts = [len(draft.tokens) + 1 for draft in drafts]
        self.engine.run(batch, self.full)
        logits = self.engine.logits(batch, self.full, counts)
        verdicts = _verified(batch, drafts, logits, counts)
        lengths = [n + accepted for n, (accepted, _) in zip(start, verdicts, strict=True)]
        batch[0].cache.truncate(batch, lengths)
        for sequence, draft, (accepted, _) in zip(batch, drafts, verdicts, strict=True):
            sequence.take(draft.tokens[:accepted])
        self.engine.append(batch, [[token] for _, token in verdicts])
        return [
            self._emitted(sequence, draft, *verdict)
            for sequence, draft, verdict in zip(batch, drafts, verdicts, strict=True)
        ]

    def _emitted(self, sequence: Sequence, draft: Draft, accepted: int, token: int) -> list[Emitted]:
        """The tokens of one sequence, counted."""
        sequence.tally.rounds += 1
        for place, name in enumerate(draft.drafters):
            for count in (sequence.tally, sequence.tally.by.setdefault(name, Count())):
                count.drafted += 1
                count.accepted += place < accepted
            if place <= accepted:  # those behind a rejected one were not judged
                self.drafter.policy.observe(name, draft.promised[place], place < accepted)
        made = zip(draft.tokens[:accepted], draft.exits, draft.drafters, strict=False)
        return [
            *(Emitted(drafted, self.exit if exit_ is None else exit_, who) for drafted, exit_, who in made),
            Emitted(token, self.exit),
        ]


def _verified(
    batch: Batch, drafts: abc.Sequence[Draft], logits: Tensor, counts: abc.Sequence[int]
) -> list[tuple[int, int]]:
    """For each sequence how many drafts are accepted, and the full model's token that follows them.

    All are read at once: logits (N, vocab), `counts` of each sequence.
    """
    if all(sequence.plain for sequence in batch):
        best, tokens = likeliest(logits)
        check_finite(best)
        verdicts, first = [], 0
        for draft, count in zip(drafts, counts, strict=True):
            own = tokens[first : first + count]
            first += count
            wrong = (place for place, token in enumerate(draft.tokens) if token != own[place])
            accepted = next(wrong, len(draft.tokens))
            verdicts.append((accepted, own[accepted]))
        return verdicts
    each = zip(batch, drafts, logits.cpu().split(list(counts)), strict=True)  # one copy for all
    return [_drawn(sequence, draft, z) for sequence, draft, z in each]


def _drawn(sequence: Sequence, draft: Draft, logits: Tensor) -> tuple[int, int]:
    p = sequence.probabilities(sequence.processed(logits, draft.tokens))  # one-hot where it is greedy
    for i, (token, q) in enumerate(zip(draft.tokens, draft.q, strict=True)):
        if sequence.sampling.greedy:
            accepted, token = bool(p[i, token]), int(p[i].argmax())
        elif q is None:
            accepted, token = verify_certain(token, p[i], sequence.generator)
        else:
            accepted, token = verify(token, q, p[i], sequence.generator)
        if not accepted:
            return i, token
    if draft.tokens and sequence.ends(draft.tokens):  # then the last one is the token that follows the others
        return len(draft.tokens) - 1, draft.tokens[-1]
    greedy = sequence.sampling.greedy
    return len(draft.tokens), int(p[-1].argmax()) if greedy else draw(p[-1], sequence.generator)
