"""Draft-stage drafter: one layer (`nn/draft_stage.py`) that reads the model's states a position late.

When a round begins, the model has run all tokens of a sequence but the last. The stage reads the tokens that
are new to it with the model's own states, as one batch, and predicts behind the last; from there it goes on
with its own states. Its keys and values of true states stay; those of its own are overwritten in the next
round.

Cost a draft: the join, one layer and the head's draft vocabulary; about a twentieth of SmolLM2. Limits: the
first round behind a prompt drafts nothing, since the model has no state yet.
"""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from topograd.decode.cache import Batch, Cache
from topograd.decode.draft_model import Twin, common_prefix
from topograd.decode.drafters import Draft, DraftRule, certainty
from topograd.decode.engine import Engine
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError
from topograd.exec.stage_cache import StageCache
from topograd.nn.draft_stage import DraftStage, unit
from topograd.nn.mkl_linear import MklLinear
from topograd.nn.slots import Place
from topograd.nn.stack import LayerContext
from topograd.runtime.protocol import TorchRuntime
from topograd.topology.plan import Plan

STAGE_RULE = DraftRule(0.3, 4)
"""Draft while the likeliest token has more than this probability, at most so many."""


class _JoinedStage(StageCache):
    """The layer's cache; what it reads is joined from x0 and the states of the positions before."""

    join: MklLinear
    previous: dict[Place, Tensor]

    def layers(self, h: Tensor, ctx: LayerContext) -> dict[int, Tensor]:
        assert ctx.spans is not None
        before = torch.cat([self.previous[place] for place in ctx.spans.places])[None]
        joined = torch.cat([unit(h), unit(before.to(h.dtype))], dim=-1)
        return super().layers(self.join(joined.flatten(0, 1)).view(h.shape), ctx)


class _JoinedRuntime(TorchRuntime):
    def stage_caches(self, plan: Plan, capacity: int) -> list[StageCache]:
        return [_JoinedStage(self.stack, planned, capacity) for planned in plan.stages]


class DraftStageDrafter:
    """The draft stage, with a cache of its own beside the model's."""

    exit: int | None = None
    name = "draft"

    def __init__(self, engine: Engine, stage: DraftStage, rule: DraftRule | None = None) -> None:
        if not engine.keeps_states:
            raise ConfigError(
                "a draft stage needs a model that keeps its states while it decodes", setting="engine"
            )
        self.stage, self.rule = stage, rule or STAGE_RULE
        self.vocabulary: Tensor | None = stage.vocabulary
        self.stack = stage.stack.for_decoding()
        relay = stage.relay
        device = stage.vocabulary.device
        self._cache = Cache(_JoinedRuntime(self.stack), Plan.of("1", 1), engine.context, device)
        (joined,) = self._cache.stages
        assert isinstance(joined, _JoinedStage)
        joined.join = MklLinear(torch.cat([relay.token.weight, relay.state.weight], dim=1))
        self._joined, self._full = joined, engine.exits[-1]

    def _twin(self, sequence: Sequence) -> Twin:
        if self.name not in sequence.drafter_state:
            sequence.drafter_state[self.name] = Twin(self._cache)
        twin: Twin = sequence.drafter_state[self.name]
        return twin

    def begin(self, batch: Batch) -> list[bool]:
        able = [sequence.cache.pending(sequence, self._full) == 1 for sequence in batch]
        for sequence, on in zip(batch, able, strict=True):
            if on:
                twin = self._twin(sequence)
                common = common_prefix(twin.sequence.tokens, sequence.tokens)
                twin.known = min(common, twin.known, len(sequence) - 1)
                self._cache.truncate([twin.sequence], [twin.known])
        return able

    def step(self, batch: Batch, drafts: abc.Sequence[Draft]) -> Tensor:
        twins = [self._twin(sequence) for sequence in batch]
        own = [twin.sequence for twin in twins]
        new = [
            [*sequence.tokens, *draft.tokens][len(mine) :]
            for sequence, draft, mine in zip(batch, drafts, own, strict=True)
        ]
        if drafts[0].tokens:
            states = self._cache.hidden(own, 0).split(1)
        else:
            states = self._true_states(batch, own, new)
            for twin, sequence in zip(twins, batch, strict=True):
                twin.known = len(sequence)
        self._cache.push(own, new)
        self._joined.previous = {mine.place: h for mine, h in zip(own, states, strict=True)}
        self._cache.run(own, 0)
        return self.stack.readout(self._cache.hidden(own, 0), 0)

    def _true_states(self, batch: Batch, own: list[Sequence], new: list[list[int]]) -> abc.Sequence[Tensor]:
        """The model's states of the position before each new one; 0 before the first."""
        counts = [len(tokens) - (not mine.tokens) for mine, tokens in zip(own, new, strict=True)]
        like = self._joined.join.matrix
        first = like.new_zeros(1, like.shape[0] // 2)
        if not any(counts):
            return [first] * len(own)
        states = batch[0].cache.hidden(batch, self._full, counts).split(counts)
        return [
            h if mine.tokens else torch.cat([first.to(h.dtype), h])
            for mine, h in zip(own, states, strict=True)
        ]

    def scores(self, logits: Tensor) -> Tensor:
        return certainty(logits)
