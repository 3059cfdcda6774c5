"""Rows and what is left in them: a new text takes the row that begins most like it.

A row that is done keeps its memory. The next text takes the free row with the longest common prefix, and goes
on from there; where a busy row shares more, that part is copied from it (`depth.rows.copy_prefix`). So the
same system prompt is computed once. Every plan (the model's own, one for each set of paths or specialists)
has its own rows, since a row's memory is that of its plan.

At least one token of a prompt is read again: what follows it is predicted from its hidden state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from topograd.decode.cache import Cache
from topograd.decode.engine import Engine
from topograd.decode.rows import OneRow, Rows, copy_prefix

WORTH = 8
"""A common prefix shorter than this is not worth copying."""


class Row:
    """A place for a text."""

    def __init__(self, cache: OneRow) -> None:
        self.cache = cache
        self.busy = False
        self.used = 0


class Pool:
    """The rows of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rows: list[Row] = []
        self._clock = itertools.count(1)

    @torch.inference_mode()
    def take(self, prompt: Sequence[int], stages: Sequence[int], grow: bool = True) -> tuple[Row, int]:
        """A row for a prompt, and how many tokens of it the row holds already, run by all of `stages`.

        With `grow`, a new one rather than one whose text is of no use; else there must be a free one.
        """
        limit = len(prompt) - 1
        ready = {id(row): min(_ready(row.cache, prompt, stages), limit) for row in self.rows}
        free = [row for row in self.rows if not row.busy]
        best = max(free, key=lambda row: (ready[id(row)], -row.used), default=None)
        have = 0 if best is None else ready[id(best)]
        if (best is None or have < WORTH) and grow:
            best, have = self._new(), 0
            ready[id(best)] = 0
        assert best is not None, "whoever admits a text knows of a free row"
        donor = max(self.rows, key=lambda row: ready[id(row)])
        best.busy, best.used = True, next(self._clock)
        if ready[id(donor)] >= have + WORTH:
            Rows([best.cache]).truncate([0])
            copied = copy_prefix(donor.cache, best.cache, ready[id(donor)])
            if copied:
                return best, copied
            have = 0
        Rows([best.cache]).truncate([have])
        return best, len(best.cache.tokens[0])

    def _new(self) -> Row:
        cache = self.engine.start([[0]])
        assert not isinstance(cache, Rows)
        cache.truncate([0])
        row = Row(cache)
        self.rows.append(row)
        return row

    def drop(self, row: Row) -> None:
        """Forget a row whose memory can no longer be trusted."""
        self.rows.remove(row)


def _ready(cache: OneRow, prompt: Sequence[int], stages: Sequence[int]) -> int:
    """How many leading tokens of `prompt` all of `stages` have run in a row."""
    marks = [cache.marks[stage][0] for stage in stages] if isinstance(cache, Cache) else []
    most = min([len(prompt), len(cache.tokens[0]), *marks])
    mine = cache.tokens[0]
    return next((i for i in range(most) if mine[i] != prompt[i]), most)
