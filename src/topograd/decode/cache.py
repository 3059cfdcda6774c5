"""What decoding remembers: for every stage its own states, and how far it has come.

Each row of the batch has its tokens 0..n. A stage k has run positions 0..n_k of a row, its watermark, and the
stages that it hears have run at least as many. Everything between is its queue of pending positions: what
the stages before it sent is kept, nothing else is. So a token that leaves early costs nothing more, and the
next one that goes deeper pushes the whole queue through the stage as one batch (`run`). Its keys and values
are then those that the full model would have.

    push(tokens)         new tokens, embedded; every stage's queue grows
    run(stage)           empty the stage's queue (and first those of the stages that it hears)
    hidden(stage, n)     the stage's last n outputs in each row
    select(rows)         become a batch of these rows: a prompt read once is continued in many ways
    truncate(lengths)    go back: every watermark becomes at most the new length; a stage whose layers are
                         recurrent goes back to its last snapshot, and replays the rest when it runs next

Rows may differ in length: then a batch is as wide as its longest queue, and the columns that a row does not
need go to the slot behind the longest row, which no row has come to yet.

One row whose stages hear each other as they are goes through them on arrays, where the runtime can
(`RowMemory`): in a small model the steps between the stages cost as much as a stage.

Cost: beside the states, one hidden state per position and port. Use it inside `torch.inference_mode()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.errors import StackError
from topograd.exec.forward import run_stage
from topograd.nn.host_numbers import largest, send
from topograd.nn.layer_state import grown, selected
from topograd.nn.relays import Identity
from topograd.nn.stack import Bus, Stack
from topograd.runtime.protocol import Heard, RowEmbedding, RowMemory, RowsMemory, Runtime, TorchRuntime
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan, PlannedStage, Port


class Cache:
    """The memory of a batch of rows that one plan decodes; `capacity` positions a row."""

    def __init__(self, runtime: Runtime | Stack, plan: Plan, capacity: int, rows: int = 1) -> None:
        self.runtime = TorchRuntime(runtime) if isinstance(runtime, Stack) else runtime
        stack = self.runtime.stack
        self.stack, self.plan = stack, plan
        if not can_decode(stack):
            raise StackError(
                f"{type(stack.layers[0]).__name__} layers lack new_state, so they keep no memory"
            )
        self.capacity, self.rows = capacity, rows
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.marks = [[0] * rows for _ in plan.stages]
        """Watermarks: how many positions each stage has run, row by row."""
        self.memories = self.runtime.memories(plan, rows, capacity + 1)
        self._hears = [[p.index for p in plan.needed(k)] for k in range(len(plan.stages))]
        self.device = next(iter(stack.buffers()), next(iter(stack.parameters()), torch.empty(0))).device
        self._ids = torch.zeros(rows, capacity + 1, dtype=torch.long, device=self.device)
        self.outputs: dict[Port | int, Tensor] = {}
        """Messages of each port and last outputs of each stage, by position: (rows, positions, ...)."""
        self._bus: tuple[object, Bus] | None = None
        self._last: _Where | None = None
        self._sources = [_plain_source(stack, planned) for planned in plan.stages]
        self._alone = [memory if isinstance(memory, RowMemory) else None for memory in self.memories]
        """Memories that can run one row on arrays."""
        self._joined = [memory if isinstance(memory, RowsMemory) else None for memory in self.memories]
        """Memories that can run one row together with other rows."""
        self._embedding = self.runtime if isinstance(self.runtime, RowEmbedding) else None
        self._heard: Heard | None = None

    def lengths(self) -> list[int]:
        return [len(row) for row in self.tokens]

    def push(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row; rows may be ragged, or get none."""
        starts, counts = self.lengths(), [len(row) for row in tokens]
        if max(a + n for a, n in zip(starts, counts, strict=True)) > self.capacity:
            raise StackError(f"a row would pass {self.capacity} positions; make a cache with more capacity")
        width = max(counts)
        if width == 0:
            return
        if self.rows == 1 and self._embedding is not None:
            self._push_row(self._embedding, tokens[0])
            return
        padded = send([[*row, *[0] * (width - len(row))] for row in tokens], self.device)
        where = self._where(starts, counts)
        where.write(self._ids, padded)
        self._keep(EMBEDDING, where, self._embed(padded))
        for row, new in zip(self.tokens, tokens, strict=True):
            row.extend(new)
        self._bus = None

    def _push_row(self, runtime: RowEmbedding, tokens: Sequence[int]) -> None:
        """`push` of one row, on arrays."""
        row, new = self.tokens[0], np.array([tokens])
        start, stop = len(row), len(row) + len(tokens)
        self._ids.numpy()[:, start:stop] = new
        x0 = runtime.embed_row(new, row[-1] if row else None)
        self._keep_row(EMBEDDING, start, stop, x0)
        row.extend(tokens)
        self._bus = self._heard = None

    def _keep_row(self, key: Port | int, start: int, stop: int, values: NDArray[Any]) -> None:
        if key not in self.outputs:
            self.outputs[key] = torch.zeros(1, 0, *values.shape[2:])
        self.outputs[key] = grown(self.outputs[key], 1, stop, self.capacity + 1)
        self.outputs[key].numpy()[:, start:stop] = values

    def _embed(self, inputs: Tensor) -> Tensor:
        """x0 of the next tokens of each row, which may have none before them."""
        last = [row[-1:] for row in self.tokens]
        if all(last):
            same = len(set(self.lengths())) == 1
            before = self._ids[:, len(self.tokens[0]) - 1] if same else send(last, self.device)[:, 0]
            return self.runtime.embed(inputs, before)
        if not any(last):
            return self.runtime.embed(inputs)
        each = [send(token, self.device) if token else None for token in last]
        rows = [self.runtime.embed(inputs[i : i + 1], token) for i, token in enumerate(each)]
        return torch.cat(rows)

    def pending(self, stage: int) -> list[int]:
        """How many positions wait before a stage, row by row, once the stages that it hears have run."""
        return [len(row) - mark for row, mark in zip(self.tokens, self.marks[stage], strict=True)]

    def run(self, stage: int) -> None:
        """Empty the queues of `stage` and of the stages that it hears, each as one batch."""
        for index in self._hears[stage]:
            counts = self.pending(index)
            if any(counts):
                source, memory = self._sources[index], self._alone[index]
                if source is not None and memory is not None and self.rows == 1:
                    self._run_row(index, source, memory)
                else:
                    self._run(index, counts)

    def _run(self, stage: int, counts: list[int]) -> None:
        planned = self.plan.stages[stage]
        where = self._where(self.marks[stage], counts)
        bus = self._bus_of(where)
        if where.slots is None:
            self.memories[stage].rewind([where.start] * self.rows)  # it may be ahead after ragged rows
        received = [
            bus.x0 if port.source == EMBEDDING else where.read(self.outputs[port])
            for port, _ in planned.inputs
        ]
        h, sent = run_stage(self.stack, planned, received, bus, self.memories[stage])
        self._keep(stage, where, h)
        for port, message in sent.items():
            if message is h:
                self.outputs[port] = self.outputs[stage]
            else:
                self._keep(port, where, message)
        self.marks[stage] = self.lengths()

    def _run_row(self, stage: int, source: Port | int, memory: RowMemory) -> None:
        """`_run` of one row through a stage that hears another as it is, on arrays."""
        h, heard = self._hear_row(stage, source)
        self.keep_row(stage, memory.run_row(h, heard))

    def _hear_row(self, stage: int, source: Port | int) -> tuple[NDArray[Any], Heard]:
        start, stop = self.marks[stage][0], len(self.tokens[0])
        x0 = self.outputs[EMBEDDING].numpy()[:, start:stop]
        if self._heard is None or self._heard.start != start:
            self._heard = Heard(self._ids.numpy()[:, start:stop], x0, start)
        return x0 if source == EMBEDDING else self.outputs[source].numpy()[:, start:stop], self._heard

    def hear_next(self, stage: int) -> tuple[RowsMemory, NDArray[Any], Heard] | None:
        """What can run the one position that waits before a stage together with other rows, the hidden state
        that the stage hears, and what else; None where it has to run by itself."""
        source, memory = self._sources[stage], self._joined[stage]
        if source is None or self.rows > 1 or memory is None or not memory.together:
            return None
        return (memory, *self._hear_row(stage, source)) if self.pending(stage) == [1] else None

    def keep_row(self, stage: int, values: NDArray[Any]) -> None:
        """What a stage gave (1, S, width) at the S positions that waited before it."""
        start, stop = self.marks[stage][0], len(self.tokens[0])
        self._keep_row(stage, start, stop, values)
        for port in self.plan.stages[stage].sends:
            self.outputs[port] = self.outputs[stage]
        self.marks[stage] = [stop]

    def hidden(self, stage: int, counts: Sequence[int] | None = None) -> Tensor:
        """The stage's last outputs, `counts` of them in each row (by default one): (rows, most, ...).

        A row's outputs come first; what follows in a row that has fewer of them means nothing.
        """
        counts = [1] * self.rows if counts is None else counts
        starts = [mark - count for mark, count in zip(self.marks[stage], counts, strict=True)]
        if min(starts) < 0:
            raise StackError(f"stage {stage + 1} has not run that many positions; run it first")
        return self._where(starts, counts).read(self.outputs[stage])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget everything from these positions on, row by row."""
        check_lengths(self.tokens, lengths)
        for tokens, length in zip(self.tokens, lengths, strict=True):
            del tokens[length:]
        for marks, memory in zip(self.marks, self.memories, strict=True):
            kept = [min(mark, length) for mark, length in zip(marks, lengths, strict=True)]
            marks[:] = memory.rewind(kept)
        self._bus = self._heard = None

    def select(self, rows: Sequence[int]) -> None:
        """Become a batch of these rows, in this order; a row may be taken several times, or not at all."""
        check_rows(rows, self.rows)
        index = send(rows, self.device)
        for memory in self.memories:
            memory.select(index)
        self._ids = self._ids[index]
        # A stage that sends its output as it is shares the buffer with its port, and goes on sharing it.
        length, room = max(self.lengths()), self.capacity + 1
        once = {
            id(values): selected(values, index, 1, min(length, values.shape[1]), room)
            for values in self.outputs.values()
        }
        self.outputs = {key: once[id(values)] for key, values in self.outputs.items()}
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.marks = [[marks[row] for row in rows] for marks in self.marks]
        self.rows, self._bus, self._heard = len(rows), None, None

    def _where(self, starts: Sequence[int], counts: Sequence[int]) -> _Where:
        """Some positions of every row; the next stage mostly wants the same."""
        key = tuple(starts), tuple(counts)
        if self._last is None or self._last.key != key:
            self._last = _Where(*key, self.device)
        return self._last

    def _bus_of(self, where: _Where) -> Bus:
        """The bus of these positions; the next stage mostly wants the same."""
        if self._bus is None or self._bus[0] != where.key:
            x0 = where.read(self.outputs[EMBEDDING])
            bus = self.runtime.bus(x0, where.read(self._ids), where.offset)
            self._bus = where.key, replace(bus, counts=where.counts)
        return self._bus[1]

    def needed(self, stage: int) -> list[int]:
        """The stages that `stage` hears, and itself, in the order in which they run."""
        return self._hears[stage]

    def keep(self, key: Port | int, values: Tensor, stop: int) -> None:
        """Values (rows, positions, ...) that a stage or port gave at the positions before `stop`."""
        start = stop - values.shape[1]
        self._keep(key, self._where([start], [stop - start]), values)

    def _keep(self, key: Port | int, where: _Where, values: Tensor) -> None:
        if key not in self.outputs:
            self.outputs[key] = values.new_zeros(self.rows, 0, *values.shape[2:])
        room = min(where.end + 1, self.capacity + 1)  # ragged rows read one slot behind the longest
        self.outputs[key] = grown(self.outputs[key], 1, room, self.capacity + 1)
        where.write(self.outputs[key], values)


class _Where:
    """Positions in every row: one slice where the rows agree, else a matrix (rows, width) of slots."""

    def __init__(self, starts: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> None:
        self.key = starts, counts
        self.start, self.stop = starts[0], starts[0] + counts[0]
        self.slots: Tensor | None = None
        self.counts: Tensor | None = None
        if len(set(starts)) > 1 or len(set(counts)) > 1:
            width, spare = max(counts), max(a + n for a, n in zip(starts, counts, strict=True))
            rows = zip(starts, counts, strict=True)
            self.slots = send([[a + i if i < n else spare for i in range(width)] for a, n in rows], device)
            self.counts = send(counts, device)

    @property
    def end(self) -> int:
        """How many positions a buffer needs to hold them."""
        return self.stop if self.slots is None else largest(self.slots) + 1

    @property
    def offset(self) -> int | Tensor:
        return self.start if self.slots is None else self.slots

    def read(self, buffer: Tensor) -> Tensor:
        if self.slots is None:
            return buffer[:, self.start : self.stop]
        return buffer[torch.arange(len(buffer), device=buffer.device)[:, None], self.slots]

    def write(self, buffer: Tensor, values: Tensor) -> None:
        if self.slots is None:
            buffer[:, self.start : self.stop] = values
        else:
            buffer[torch.arange(len(buffer), device=buffer.device)[:, None], self.slots] = values


def _plain_source(stack: Stack, planned: PlannedStage) -> Port | int | None:
    """What a stage hears, where it hears one hidden state as it is and sends its own so; else None."""
    ports = (*(port for port, _ in planned.inputs), *planned.sends)
    if len(planned.inputs) > 1 or not all(isinstance(stack.relay(port.relay), Identity) for port in ports):
        return None
    if any(port.layer != planned.stage.stop for port in planned.sends):
        return None
    port, _ = planned.inputs[0]
    return EMBEDDING if port.source == EMBEDDING else port


def check_lengths(tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    """Whether every row can go back to its new length."""
    for row, (here, length) in enumerate(zip(tokens, lengths, strict=True), 1):
        if not 0 <= length <= len(here):
            raise StackError(f"cannot go back to {length}: row {row} has {len(here)} positions")


def check_rows(rows: Sequence[int], count: int) -> None:
    """Whether these are rows of a batch of `count`."""
    if not rows or not all(0 <= row < count for row in rows):
        raise StackError(f"rows {list(rows)} cannot be selected; give at least one of 0 to {count - 1}")


def can_decode(stack: Stack) -> bool:
    """Whether every layer keeps a memory, so that a token costs one position."""
    return all(hasattr(layer, "new_state") for layer in stack.layers)
