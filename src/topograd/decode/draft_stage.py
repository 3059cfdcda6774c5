"""Draft-stage drafter: one layer (`nn/draft_stage.py`) that reads the model's states a position late.

When a round begins, the model has run all tokens of a sequence but the last. The stage reads the tokens that
are new to it with the model's own states, as one batch, and predicts behind the last.

    a chain     continues with its own states, a pass for each guess
    a block     the same pass has its empty slots behind the last token, and guesses for all of them

Its keys and values of true states stay; those of drafted tokens and of slots are overwritten in the next
round.

Cost a pass: the join, one layer and the head's draft vocabulary, in the model's runtime and precision where
that is native, else in torch; about a fifteenth of SmolLM2. Limits: the first round behind a prompt drafts
nothing, since the model has no state yet.
"""

from collections import abc

import torch
from torch import Tensor

from topograd.decode.cache import Batch, Cache
from topograd.decode.draft_head import runtime_like
from topograd.decode.draft_model import Twin, TwinDrafter
from topograd.decode.drafters import MAX_DRAFT, Draft, DraftRule
from topograd.decode.engine import Engine
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError
from topograd.exec.stage_cache import StageCache
from topograd.nn.draft_stage import DraftStage, unit
from topograd.nn.mkl_linear import MklLinear
from topograd.nn.slots import Place, Spans
from topograd.nn.stack import LayerContext
from topograd.runtime.native.cache import Array, NativeStageCache
from topograd.runtime.native.runtime import Head, NativeRuntime, normed_linear
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan

STAGE_RULE = DraftRule(0.3, 4)
"""Draft while the likeliest token has more than this probability, at most so many."""


class _TorchJoin(StageCache):
    """The layer's cache; what it reads is joined from x0 and the states of the positions before."""

    previous: dict[Place, Tensor]

    def prepare(self, stage: DraftStage) -> None:
        self._draft = stage
        self._join = MklLinear(torch.cat([stage.relay.token.weight, stage.relay.state.weight], dim=1))

    def fuse(self, states: Tensor) -> Tensor:
        """f (N, width) of the model's states (N, depths, width)."""
        return self._draft.fuse(states)

    def layers(self, h: Tensor, ctx: LayerContext) -> dict[int, Tensor]:
        assert ctx.spans is not None
        before = torch.cat([self.previous[place] for place in ctx.spans.places])[None]
        joined = torch.cat([unit(h), unit(before.to(h.dtype))], dim=-1)
        return super().layers(self._join(joined.flatten(0, 1)).view(h.shape), ctx)


class _NativeJoin(NativeStageCache):
    """The same by the kernels."""

    previous: dict[Place, Tensor]

    def prepare(self, stage: DraftStage) -> None:
        def packed(weight: Tensor) -> Head:
            return normed_linear(weight, self.runtime.precision, self.runtime.threads)

        self._token, self._state = packed(stage.relay.token.weight), packed(stage.relay.state.weight)
        parts = () if stage.fusion is None else stage.fusion.weight.split(stage.stack.width, dim=1)
        self._fusion = [packed(part) for part in parts]

    def fuse(self, states: Tensor) -> Tensor:
        if not self._fusion:
            return states[:, -1]
        each = zip(self._fusion, states.unbind(1), strict=True)
        return torch.from_numpy(sum(part(h.numpy()) for part, h in each))

    def run_arrays(self, h: Array, x0: Array, spans: Spans) -> Array:
        before = [self.previous[place].numpy() for place in spans.places]
        rows = before[0] if len(before) == 1 else torch.cat([*map(torch.from_numpy, before)]).numpy()
        return super().run_arrays(self._token(x0) + self._state(rows), x0, spans)


class DraftStageDrafter(TwinDrafter):
    """The draft stage, with a cache of its own beside the model's."""

    name = "draft"

    def __init__(self, engine: Engine, stage: DraftStage, rule: DraftRule | None = None) -> None:
        if not engine.keeps_states:
            problem = "a draft stage needs a model that keeps its states while it decodes"
            raise ConfigError(problem, setting="engine")
        self.stage, self.rule, self.context = stage, rule or STAGE_RULE, engine.context
        self.vocabulary: Tensor | None = stage.vocabulary
        self.most = MAX_DRAFT if stage.masks is None else stage.slots
        self._runtime = runtime_like(engine, stage.stack)
        if isinstance(self._runtime, NativeRuntime):
            self._runtime.stage_cache = _NativeJoin
        else:
            self._runtime.stage_cache = _TorchJoin
        device = stage.vocabulary.device
        self._cache = Cache(self._runtime, Plan.of("1", 1), engine.context, device)
        (joined,) = self._cache.stages
        assert isinstance(joined, (_TorchJoin, _NativeJoin))
        joined.prepare(stage)
        self._joined, self._full = joined, engine.exits[-1]
        self._slots = None if stage.masks is None else unit(stage.masks.detach())
        """x0 of the empty slots of a block."""
        depths = [-1] if stage.depths is None else stage.depths.tolist()
        self._read = [engine.exits[i] for i in depths]

    def begin(self, batch: Batch) -> list[bool]:
        able = [sequence.cache.pending(sequence, self._full) == 1 for sequence in batch]
        for sequence, on in zip(batch, able, strict=True):
            if on:
                twin = self.twin(sequence)
                twin.known = self.roll_back(sequence, twin.known)
        return able

    def step(self, batch: Batch, drafts: abc.Sequence[Draft]) -> Tensor:
        twins, place = [self.twin(sequence) for sequence in batch], len(drafts[0].tokens)
        if place and self._slots is not None:
            return torch.stack([twin.guesses[place] for twin in twins])
        own = [twin.sequence for twin in twins]
        new = [
            [*sequence.tokens, *draft.tokens][len(mine) :]
            for sequence, draft, mine in zip(batch, drafts, own, strict=True)
        ]
        if place:
            states: abc.Sequence[Tensor] = self._cache.hidden(own, 0).split(1)
        else:
            states = self._true_states(batch, own, new)
            for twin, sequence in zip(twins, batch, strict=True):
                twin.known = len(sequence)
        if self._slots is not None:
            return self._block(twins, new, states, self._slots)
        self._run(own, new, states)
        return self._runtime.readout(self._cache.hidden(own, 0), 0)

    def _run(
        self,
        own: list[Sequence],
        new: list[list[int]],
        states: abc.Sequence[Tensor],
        slots: abc.Sequence[Tensor] = (),
    ) -> None:
        """Run new tokens, each with the state before it; of a block, x0 of the last ones is given."""
        self._cache.push(own, new)
        for mine, x0 in zip(own, slots, strict=False):
            room = self._cache.outputs[EMBEDDING].at(mine.place.room, 1)
            room[mine.place.slot, len(mine) - len(x0) : len(mine)] = x0
        self._joined.previous = {mine.place: h for mine, h in zip(own, states, strict=True)}
        self._cache.run(own, 0)

    def _block(
        self, twins: list[Twin], new: list[list[int]], states: abc.Sequence[Tensor], slots: Tensor
    ) -> Tensor:
        """One pass over the new tokens and the empty slots behind them; the guesses of the first place."""
        own = [twin.sequence for twin in twins]
        room = [self.context - len(mine) - len(tokens) for mine, tokens in zip(own, new, strict=True)]
        empty = [slots[: max(left, 0)] for left in room]
        both = [torch.cat([h, h[-1:].expand(len(x0), -1)]) for h, x0 in zip(states, empty, strict=True)]
        padded = [[*tokens, *[0] * len(x0)] for tokens, x0 in zip(new, empty, strict=True)]
        self._run(own, padded, both, empty)
        counts = [len(x0) + 1 for x0 in empty]
        logits = self._runtime.readout(self._cache.hidden(own, 0, counts), 0).split(counts)
        for twin, each in zip(twins, logits, strict=True):
            twin.guesses = each
        return torch.stack([each[0] for each in logits])

    def _true_states(self, batch: Batch, own: list[Sequence], new: list[list[int]]) -> abc.Sequence[Tensor]:
        """What the stage reads of the position before each new one; 0 before the first."""
        counts = [len(tokens) - (not mine.tokens) for mine, tokens in zip(own, new, strict=True)]
        like = self.stage.relay.state.weight
        first = like.new_zeros(1, like.shape[0])
        if not any(counts):
            return [first] * len(own)
        cache = batch[0].cache
        read = torch.stack([cache.hidden(batch, stage, counts) for stage in self._read], dim=1)
        states = self._joined.fuse(read).split(counts)
        return [
            h if mine.tokens else torch.cat([first.to(h.dtype), h])
            for mine, h in zip(own, states, strict=True)
        ]
