"""Rows that come and go: each has a cache of its own, and any of them run together.

`Rows` is a choice of such caches with the methods of `cache.Cache`, so every mode runs on it. Rows that are
not chosen are not touched: one may stop after its first stage while another goes through all of them.

    Rows([a, b]).run(stage)     the pending positions of a and b, one behind the other, as one batch
    Rows([a]).truncate([0])     a is empty, and may begin another text
    copy_prefix(a, b, n)        b begins as a does: n positions, computed once

Several rows run as one, in torch, where every layer of the stage says `takes_packed`: matrices are then read
once for all rows, and only attention goes row by row, over each row's own length. Nothing is padded. In ONNX
Runtime those run as one that have one new position each (`runtime/joined.py`). Other stages (recurrent
mixers, relays that look back, stacks without a memory) run row by row: same results, no gain.

Cost: of a run, one pass over the stage's weights and Σ lengths of attention. Limits: in float32 the last bits
of a matrix product depend on how many rows it has, so near-ties may fall differently in company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from topograd.decode.cache import Cache
from topograd.decode.recompute import RecomputedCache
from topograd.errors import StackError
from topograd.exec.forward import StageMemory, run_stage
from topograd.nn.host_numbers import send
from topograd.nn.layer_state import PackedStates
from topograd.nn.relays import CausalRelay
from topograd.nn.stack import Bus, Stack
from topograd.runtime.protocol import HeardRows
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Port

OneRow = Cache | RecomputedCache
"""A cache with one row."""


class Rows:
    """Some single-row caches of one plan as a batch."""

    def __init__(self, caches: Sequence[OneRow]) -> None:
        if not caches or any(cache.rows != 1 for cache in caches):
            raise StackError("rows that come and go are caches of one row each, at least one; give such")
        self.caches = list(caches)
        self.rows = len(self.caches)
        self.capacity = min(cache.capacity for cache in self.caches)

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row."""
        return [cache.tokens[0] for cache in self.caches]

    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def push(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row; rows may be ragged, or get none."""
        for cache, new in zip(self.caches, tokens, strict=True):
            if new:
                cache.push([new])

    def pending(self, stage: int) -> list[int]:
        """How many positions wait before a stage, row by row; all where nothing is remembered."""
        return [c.pending(stage)[0] if isinstance(c, Cache) else len(c.tokens[0]) for c in self.caches]

    def run(self, stage: int) -> None:
        """Empty the queues of `stage` and of the stages that it hears, each as one batch."""
        together = [cache for cache in self.caches if isinstance(cache, Cache)]
        if len(together) < 2:
            for cache in self.caches:
                cache.run(stage)
            return
        for index in together[0].needed(stage):
            waiting = [cache for cache in together if cache.pending(index)[0]]
            if len(waiting) > 1 and packable(waiting[0], index):
                _run_packed(waiting, index)
            else:
                _run_next(waiting, index)
                for cache in waiting:
                    cache.run(index)

    def hidden(self, stage: int, counts: Sequence[int] | None = None) -> Tensor:
        """The stage's last outputs, `counts` of them in each row (by default one): (rows, most, ...)."""
        if counts is None:
            return torch.cat([cache.hidden(stage) for cache in self.caches])
        each = [cache.hidden(stage, [count])[0] for cache, count in zip(self.caches, counts, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget everything from these positions on, row by row."""
        for cache, length in zip(self.caches, lengths, strict=True):
            if length != len(cache.tokens[0]):
                cache.truncate([length])


class _PackedMemory(StageMemory):
    """The memories of one stage in several rows, as one."""

    def __init__(self, memories: Sequence[StageMemory], buses: Sequence[Bus]) -> None:
        columns = zip(*(memory.layers for memory in memories), strict=True)
        self.layers = [PackedStates(column, buses) for column in columns]
        self.histories = {}


def packable(cache: Cache, stage: int) -> bool:
    """Whether several rows can go through a stage of torch as one batch."""
    planned, stack = cache.plan.stages[stage], cache.runtime.stack
    ports = (*(port for port, _ in planned.inputs), *planned.sends)
    looks_back = any(isinstance(stack.relay(port.relay), CausalRelay) for port in ports)
    return (
        type(cache.memories[stage]) is StageMemory
        and not looks_back
        and all(getattr(stack.layers[i], "takes_packed", False) for i in planned.layers)
    )


def _run_next(caches: Sequence[Cache], stage: int) -> None:
    """Run the rows that have one position before a stage as one batch, where the runtime can."""
    each = [(cache, heard) for cache in caches if (heard := cache.hear_next(stage)) is not None]
    if len(each) < 2:
        return
    memories, states, heard = zip(*(found for _, found in each), strict=True)
    tokens, x0 = (np.concatenate(found) for found in ([h.tokens for h in heard], [h.x0 for h in heard]))
    together = HeardRows(tokens, x0, [h.start for h in heard])
    found = memories[0].run_rows(memories[1:], np.concatenate(states), together)
    if found is not None:
        for i, (cache, _) in enumerate(each):
            cache.keep_row(stage, found[i : i + 1])


def _run_packed(caches: Sequence[Cache], stage: int) -> None:
    """Empty the queue of one stage in several rows that all have one; those before it are empty."""
    stack = caches[0].runtime.stack
    planned = caches[0].plan.stages[stage]
    spans = [(cache.marks[stage][0], len(cache.tokens[0])) for cache in caches]
    for cache, (start, _) in zip(caches, spans, strict=True):
        cache.memories[stage].rewind([start])

    def gathered(key: Port | int) -> Tensor:
        each = zip(caches, spans, strict=True)
        return torch.cat([cache.outputs[key][:, start:stop] for cache, (start, stop) in each], dim=1)

    bus, buses = _buses(stack, caches, spans, gathered(EMBEDDING))
    received = [bus.x0 if port.source == EMBEDDING else gathered(port) for port, _ in planned.inputs]
    memory = _PackedMemory([cache.memories[stage] for cache in caches], buses)
    h, sent = run_stage(stack, planned, received, bus, memory)
    kept: list[tuple[Port | int, Tensor]] = [(stage, h), *sent.items()]
    widths = [stop - start for start, stop in spans]
    for key, values in kept:
        for cache, part in zip(caches, values.split(widths, dim=1), strict=True):
            if values is h and key != stage:
                cache.outputs[key] = cache.outputs[stage]
            else:
                cache.keep(key, part, len(cache.tokens[0]))
    for cache, (_, stop) in zip(caches, spans, strict=True):
        cache.marks[stage] = [stop]


def _buses(
    stack: Stack, caches: Sequence[Cache], spans: Sequence[tuple[int, int]], x0: Tensor
) -> tuple[Bus, list[Bus]]:
    """The bus of all positions one behind the other, and for each row where its own are."""
    device = x0.device
    tokens = [cache.tokens[0][start:stop] for cache, (start, stop) in zip(caches, spans, strict=True)]
    inputs = send([[token for row in tokens for token in row]], device)
    positions = send([[p for start, stop in spans for p in range(start, stop)]], device)
    bus = stack.bus(x0, inputs, positions)
    each = positions[0].split([stop - start for start, stop in spans])
    return bus, [replace(bus, positions=own, extras={"masks": {}, "visible": {}}) for own in each]


def copy_prefix(source: OneRow, target: OneRow, length: int) -> int:
    """Make an empty row begin as another does; returns how many positions it has now.

    What each stage has run of them is copied, not computed. Rows whose states cannot be copied in part
    (recurrent layers, relays that look back) stay empty: 0.
    """
    if not isinstance(source, Cache) or not isinstance(target, Cache) or not length:
        return 0
    if not all(memory.copies for memory in source.memories):
        return 0
    if target.tokens[0] or not 0 < length <= len(source.tokens[0]):
        raise StackError(f"{length} positions cannot be copied from a row of {len(source.tokens[0])}")
    target.push([source.tokens[0][:length]])
    for stage, memory in enumerate(target.memories):
        mark = min(source.marks[stage][0], length)
        memory.copy(source.memories[stage], mark)
        target.marks[stage] = [mark]
        keys: list[Port | int] = [stage, *target.plan.stages[stage].sends]
        for key in keys:
            if mark:
                target.keep(key, source.outputs[key][:, :mark], mark)
    return length
