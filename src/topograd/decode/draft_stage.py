"""Drafts by a draft stage (`nn/draft_stage.py`): one layer that hears the model's last state one position
late.

When a round begins, the model has run all tokens of a row but the last. The stage reads the tokens that are
new to it with the model's own states, as one batch, and predicts behind the last; from there it goes on with
its own states. Its keys and values of true states stay; those of its own are overwritten in the next round,
which the memory of a layer allows (`layer_state.py`).

Cost a draft: the join, one layer and the head's draft vocabulary; about a twentieth of SmolLM2. Limits: the
first round behind a prompt drafts nothing, since the model has no state yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.decode.autotune import DraftRule
from topograd.decode.draft_model import common
from topograd.decode.drafters import Draft, Drafting, Generators, certainty
from topograd.decode.engine import AnyCache, Engine
from topograd.decode.recompute import RecomputedCache
from topograd.decode.sampling import Sampling
from topograd.errors import ConfigError
from topograd.nn.draft_stage import DraftStage, unit
from topograd.nn.host_numbers import send
from topograd.nn.packed import PackedLinear

STAGE_RULE = DraftRule(0.3, 4)
"""Draft while the likeliest token has more than this probability, at most so many."""


class DraftStageDrafter:
    """The draft stage, with a memory of its own beside the model's cache."""

    exit: int | None = None
    name = "draft"

    def __init__(self, engine: Engine, stage: DraftStage, rule: DraftRule | None = None) -> None:
        if not engine.remembers:
            raise ConfigError("a draft stage needs a model that keeps its states while it decodes")
        self.engine, self.stage, self.rule = engine, stage, rule or STAGE_RULE
        self.vocabulary: Tensor | None = stage.vocabulary
        self.stack = stage.stack.for_decoding()
        relay = stage.relay
        self.join = PackedLinear(torch.cat([relay.token.weight, relay.state.weight], dim=1))
        self._full = engine.exits[-1]
        self._known: list[list[int]] = []
        """The tokens of each row that were read with the model's own states."""
        self._alone = Drafting(engine, [self])

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """It is a drafter by itself too."""
        return self._alone.draft(cache, active, sampling, generators)

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> list[bool]:
        rows = len(cache.tokens)
        if len(self._known) != rows:
            self._memory = self.stack.layers[0].new_state(rows, self.engine.context + 1)  # type: ignore[operator]
            self._known = [[] for _ in range(rows)]
        self._kept = [common(mine, text) for mine, text in zip(self._known, cache.tokens, strict=True)]
        assert not isinstance(cache, RecomputedCache), "the engine remembers"
        pending = cache.pending(self._full)
        able = [on and n == 1 for on, n in zip(active, pending, strict=True)]
        self._at: list[int] | None = None
        self._states = torch.empty(0)
        return able

    def step(self, cache: AnyCache, drafting: Sequence[bool], new: Sequence[Sequence[int]]) -> Tensor:
        if self._at is None:
            return self._catch_up(cache, drafting)
        starts = self._at
        counts = [int(on and bool(tokens)) for on, tokens in zip(drafting, new, strict=True)]
        tokens = [list(t) if n else [] for t, n in zip(new, counts, strict=True)]
        before = [text[-1] if text else None for text in self._chains]
        g = self._run(tokens, starts, self._states[:, None], before)
        self._at = [start + n for start, n in zip(starts, counts, strict=True)]
        for chain, added in zip(self._chains, tokens, strict=True):
            chain.extend(added)
        self._states = g[:, 0]
        return self.stack.readout(self._states, 0)

    def _catch_up(self, cache: AnyCache, drafting: Sequence[bool]) -> Tensor:
        """Read what is new with the model's own states; logits behind the last token of each row."""
        texts = cache.tokens
        kept = [
            min(n, len(text) - 1) if on else len(mine)
            for n, text, mine, on in zip(self._kept, texts, self._known, drafting, strict=True)
        ]
        fresh = [text[n:] if on else [] for text, n, on in zip(texts, kept, drafting, strict=True)]
        before = [
            text[n - 1] if on and n else None for text, n, on in zip(texts, kept, drafting, strict=True)
        ]
        g = self._run(fresh, kept, self._heard(cache, fresh, kept), before)
        counts = send([max(len(tokens), 1) for tokens in fresh], g.device)
        self._states = g[torch.arange(len(g), device=g.device), counts - 1]
        self._known = [
            list(text) if on else mine for text, mine, on in zip(texts, self._known, drafting, strict=True)
        ]
        self._chains = [list(mine[-1:]) for mine in self._known]
        self._at = [len(mine) for mine in self._known]
        return self.stack.readout(self._states, 0)

    def _heard(self, cache: AnyCache, fresh: Sequence[Sequence[int]], kept: Sequence[int]) -> Tensor:
        """(rows, most, width): the model's states of the positions before the fresh ones; 0 at first."""
        wanted = [len(tokens) - (n == 0 and bool(tokens)) for tokens, n in zip(fresh, kept, strict=True)]
        width = max(len(tokens) for tokens in fresh)
        if max(wanted) == 0:
            return next(iter(self.join.buffers()), self.join.matrix).new_zeros(len(fresh), width, self.width)
        states = cache.hidden(self._full, wanted)
        if not any(n == 0 and tokens for tokens, n in zip(fresh, kept, strict=True)):
            return states
        padded = states.new_zeros(len(fresh), width + 1, states.shape[-1])
        padded[:, 1 : 1 + states.shape[1]] = states
        first = send([int(n > 0 or not tokens) for tokens, n in zip(fresh, kept, strict=True)], states.device)
        place = torch.arange(width, device=states.device) + first[:, None]
        return padded[torch.arange(len(fresh), device=states.device)[:, None], place]

    @property
    def width(self) -> int:
        return self.join.matrix.shape[0] // 2

    def _run(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        previous: Tensor,
        before: Sequence[int | None],
    ) -> Tensor:
        """g of some tokens of each row that stand at `starts`, behind a token `before` and states."""
        counts = [len(row) for row in tokens]
        width, device = max(counts), previous.device
        inputs = send([[*row, *[0] * (width - len(row))] for row in tokens], device)
        offset: int | Tensor = starts[0]
        if len(set(starts)) > 1 or len(set(counts)) > 1:  # what a row does not have goes behind the longest
            spare = max(start + n for start, n in zip(starts, counts, strict=True))
            rows = zip(starts, counts, strict=True)
            offset = send(
                [[start + i if i < n else spare for i in range(width)] for start, n in rows], device
            )
        else:
            self._memory.rewind([starts[0]] * len(tokens))  # it may be ahead after ragged rows
        x0 = self._embed(inputs, before)
        bus = self.stack.bus(x0, inputs, offset)
        joined = torch.cat([unit(x0), unit(previous.to(x0.dtype))], dim=-1)
        h = self.join(joined.flatten(0, 1)).view(x0.shape)
        g: Tensor = self.stack.layers[0](h, bus, self._memory)
        return g

    def _embed(self, inputs: Tensor, before: Sequence[int | None]) -> Tensor:
        if all(token is None for token in before):
            return self.stack.embed(inputs)
        if all(token is not None for token in before):
            return self.stack.embed(inputs, send(before, inputs.device))
        each = [None if token is None else send([token], inputs.device) for token in before]
        return torch.cat([self.stack.embed(inputs[i : i + 1], token) for i, token in enumerate(each)])

    @torch.inference_mode()
    def record(self, inputs: Tensor, states: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """What it would guess behind every position of known texts, in each step, and how sure it is."""
        said = [self.stage.readout(g) for g in self.stage.unroll(inputs, states, steps)]
        tokens = torch.stack([self.stage.vocabulary[logits.argmax(-1)] for logits in said])
        return tokens, torch.stack([certainty(logits) for logits in said])

    def scores(self, logits: Tensor) -> Tensor:
        return certainty(logits)

    def pushed(self, row: int) -> int:
        return 0
