"""The cache of a stack whose layers keep no memory: it remembers tokens, and the rest is recomputed.

Same methods as `cache.Cache`, so that every mode runs; nothing is saved by leaving early. Ragged rows
are padded behind their end, which a causal model does not see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.decode.cache import check_lengths, check_rows
from topograd.errors import StackError
from topograd.exec.forward import stage_outputs
from topograd.nn.host_numbers import send
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan


class RecomputedCache:
    """Tokens of a batch of rows, and the stages' outputs on them."""

    def __init__(self, stack: Stack, plan: Plan, capacity: int, rows: int = 1) -> None:
        self.stack, self.plan, self.capacity, self.rows = stack, plan, capacity, rows
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._outputs: dict[int, tuple[list[int], Tensor]] = {}

    def lengths(self) -> list[int]:
        return [len(row) for row in self.tokens]

    def push(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row."""
        if max(len(a) + len(b) for a, b in zip(self.tokens, tokens, strict=True)) > self.capacity:
            raise StackError(f"a row would pass {self.capacity} positions; make a cache with more capacity")
        for row, new in zip(self.tokens, tokens, strict=True):
            row.extend(new)

    def run(self, stage: int) -> None:
        """The stage's outputs on all tokens, unless they are there."""
        lengths = self.lengths()
        if stage in self._outputs and self._outputs[stage][0] == lengths:
            return
        longest = max(lengths)
        device = next(self.stack.parameters()).device
        padded = send([[*row, *[row[-1]] * (longest - len(row))] for row in self.tokens], device)
        h = stage_outputs(self.stack, self.plan, padded, [stage])[stage]
        self._outputs[stage] = lengths, h

    def hidden(self, stage: int, counts: Sequence[int] | None = None) -> Tensor:
        """The stage's last outputs, `counts` of them in each row, padded behind: (rows, most, ...)."""
        counts = [1] * self.rows if counts is None else counts
        lengths, h = self._outputs.get(stage, ([0] * self.rows, torch.empty(0)))
        if any(count > n for count, n in zip(counts, lengths, strict=True)):
            raise StackError(f"stage {stage + 1} has not run that many positions; run it first")
        rows = []
        for row, stop, count in zip(h, lengths, counts, strict=True):
            index = torch.arange(stop - count, stop - count + max(counts), device=h.device)
            rows.append(row[index.clamp(max=len(row) - 1)])
        return torch.stack(rows)

    def select(self, rows: Sequence[int]) -> None:
        """Become a batch of these rows, in this order; a row may be taken several times, or not at all."""
        check_rows(rows, self.rows)
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.rows = len(rows)
        self._outputs.clear()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget everything from these positions on, row by row."""
        check_lengths(self.tokens, lengths)
        for tokens, length in zip(self.tokens, lengths, strict=True):
            del tokens[length:]
        self._outputs.clear()
