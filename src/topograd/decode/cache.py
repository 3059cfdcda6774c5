"""The decode cache of a plan: states of every sequence and stage, and watermarks of what has run.

Each sequence has its tokens 0..n. A stage k has run positions 0..n_k of it, its watermark, and the stages
that it reads have run at least as many. Everything between is pending: what the stages before it sent is
kept, nothing else is. So a token that exits early costs nothing more, and the next one that goes deeper
pushes all that is pending through the stage as one batch (`run`). Its keys and values are then those that the
full model would have.

    new(sampling)              a sequence without tokens; `free` gives its place back
    push(batch, tokens)        new tokens, embedded; they are pending before every stage
    run(batch, stage)          run what is pending before `stage` (and first before the stages that it reads)
    hidden(batch, stage, n)    the stage's last n outputs of each sequence
    truncate(batch, lengths)   go back: every watermark becomes at most the new length; a stage whose layers
                               are recurrent goes back to its last snapshot, and runs the rest again
    fork(sequence, length)     a sequence that begins as another does, with what was computed of it

A batch is any sequences of the cache, of any lengths: their pending positions run packed, one pass over the
weights for all (`nn/slots.py`). Where a runtime takes arrays and stages pass hidden states on as they are,
no tensor is made between them: in a small model that costs as much as a stage. Where it can, stages that have
run equally far are one call.

Cost: beside the states, one hidden state per position and port. Use it inside `torch.inference_mode()`.
Limits: in float32 the last bits of a product depend on how many rows it has, so near-ties may fall
differently in company.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from topograd.decode.sampling import Sampling
from topograd.decode.sequence import Sequence
from topograd.errors import StackError
from topograd.nn.array_slots import ArrayBuffer
from topograd.nn.host_numbers import send
from topograd.nn.slots import Group, Place, PlaceTable, SlotBuffer, Spans
from topograd.runtime.protocol import (
    ArrayRuntime,
    ArrayStageCache,
    ChainStageCache,
    Runtime,
    TorchRuntime,
    device_of,
)
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import EdgeOutput, Plan, PlannedStage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from topograd.exec.stage_cache import StageCache
    from topograd.nn.stack import LayerContext, Stack

Batch = abc.Sequence[Sequence]
Key = EdgeOutput | int
"""A port's messages, a stage's last outputs, or x0 (EMBEDDING)."""


class Cache:
    """The sequences of one plan; `capacity` positions each."""

    def __init__(
        self, runtime: Runtime | Stack, plan: Plan, capacity: int, device: torch.device | None = None
    ) -> None:
        """On the device of the stack's parameters, unless another is given."""
        is_stack = not hasattr(runtime, "stage_caches")
        self.runtime: Runtime = TorchRuntime(cast("Stack", runtime)) if is_stack else cast("Runtime", runtime)
        self.plan, self.capacity = plan, capacity
        self.stages: abc.Sequence[StageCache] = self.runtime.stage_caches(plan, capacity)
        self._embeds_arrays = self.runtime if isinstance(self.runtime, ArrayRuntime) else None
        self.device = device
        if device is None and self._embeds_arrays is None:
            self.device = device_of(self.runtime.stack)
        """None is the CPU."""
        self.outputs: dict[Key, SlotBuffer] = {}
        self._reads = [[p.index for p in plan.needed(k)] for k in range(len(plan.stages))]
        position_bytes = sum(stage.position_bytes for stage in self.stages)
        self._table = PlaceTable(capacity + 1, position_bytes)  # one more, for what runs beside others
        self._dirty: set[tuple[int, int]] = set()
        self._last: Spans | None = None
        self._ctx: tuple[Spans, LayerContext] | None = None
        sources = [_plain_source(self.runtime, planned) for planned in plan.stages]
        self._arrays = [
            (stage, source) if isinstance(stage, ArrayStageCache) and source is not None else None
            for stage, source in zip(self.stages, sources, strict=True)
        ]
        self._chains = all(isinstance(stage, ChainStageCache) for stage in self.stages)
        self._chained = [
            self._chain_source(planned, source) for planned, source in zip(plan.stages, sources, strict=True)
        ]
        """Of each stage, the one that it may run as one call with."""

    @property
    def stack(self) -> Stack:
        """The model."""
        return self.runtime.stack

    # Sequences

    def new(self, sampling: Sampling | None = None, index: int = 0) -> Sequence:
        """A sequence without tokens."""
        place = self._take(1)
        for stage in self.stages:
            stage.open(place)
        return Sequence(self, place, len(self.plan.stages), sampling or Sampling(), index)

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's place back."""
        sequence.close_drafters()
        for stage in self.stages:
            stage.close(sequence.place)
        self._leave(sequence.place)

    def fork(self, source: Sequence, length: int | None = None, sampling: Sampling | None = None) -> Sequence:
        """A sequence with the first `length` tokens of another, by default all; they are not run again.

        Where a state cannot be cut at `length`, the stage runs a part of them again.
        """
        length = len(source) if length is None else length
        if not 0 <= length <= len(source):
            allowed = f"0 to {len(source)}, the positions of the sequence"
            raise StackError(setting="length", given=length, allowed=allowed)
        place = self._take(length + 1)
        slots = self._table.slots[place.room]
        twin = Sequence(self, place, len(self.plan.stages), sampling or source.sampling, source.index)
        twin.tokens = source.tokens[:length]
        for k, stage in enumerate(self.stages):
            twin.marks[k] = stage.copy(source.place, place, min(source.marks[k], length), slots)
        for buffer in self._buffers():
            buffer.copy(source.place, place, length, slots)
        return twin

    def _take(self, positions: int) -> Place:
        place = self._table.take(positions)
        if place.key in self._dirty:  # another sequence's numbers; they may be no numbers at all
            self._dirty.remove(place.key)
            empty, slots = Place(place.room, -1), self._table.slots[place.room]
            for buffer in self._buffers():
                if place.room in buffer.rooms:
                    buffer.copy(empty, place, 0, slots)
            for stage in self.stages:
                stage.move(empty, place, 0, slots)
        return place

    def _leave(self, place: Place) -> None:
        self._table.free(place)
        self._dirty.add(place.key)
        if place.room not in self._table.slots:
            rooms = list(self._table.slots)
            self._dirty = {key for key in self._dirty if key[0] in rooms}
            for buffer in self._buffers():
                buffer.keep_rooms(rooms)
            for stage in self.stages:
                stage.keep_rooms(rooms)

    def _reserve(self, sequence: Sequence, stop: int) -> None:
        """Room for `stop` positions and one behind them, in another place if need be."""
        place = sequence.place
        if stop < place.room:
            return
        if stop > self.capacity:
            problem = f"a sequence would pass {self.capacity} positions"
            remedy = "make a cache with more capacity"
            raise StackError(problem, setting="stop", given=stop, remedy=remedy)
        self._last = self._ctx = None
        room = self._table.growth(place, stop + 1)
        if room is not None:
            old_room = place.room
            self._table.grow(room)
            self._dirty = {(room if key[0] == old_room else key[0], key[1]) for key in self._dirty}
            for buffer in self._buffers():
                buffer.grow(old_room, room)
            for stage in self.stages:
                stage.grow(old_room, room)
            return
        new = self._take(stop + 1)
        old = self._table.move(place, new)
        slots = self._table.slots[new.room]
        for stage, mark in zip(self.stages, sequence.marks, strict=True):
            stage.move(old, place, mark, slots)
        for buffer in self._buffers():
            buffer.copy(old, place, len(sequence), slots)
        self._leave(old)

    def computed(self, sequence: Sequence, stage: int, start: int, stop: int) -> dict[str, Tensor]:
        """What a stage has computed of some positions, as it lies in the cache: views, by their names.

        Only where states can be cut anywhere (`StageCache.cuts_anywhere`).
        """
        slots = self._table.slots[sequence.place.room]
        found = {
            f"{name}.{i}": buffer
            for i, kv in enumerate(self.stages[stage].slots)
            if kv is not None
            for name, buffer in (("keys", kv.keys), ("values", kv.values))
        }
        ports = self.plan.stages[stage].outputs
        sent = {f"sent.{i}": self.outputs[port] for i, port in enumerate(ports) if port in self.outputs}
        own = {"output": self.outputs[stage]} if stage in self.outputs else {}
        found |= {name: buffer for name, buffer in sent.items() if buffer is not own.get("output")} | own
        return {name: each.positions(sequence.place, start, stop, slots) for name, each in found.items()}

    def restore(self, sequence: Sequence, stage: int, start: int, tensors: abc.Mapping[str, Tensor]) -> None:
        """Give a stage what it has computed before (`computed`) of the positions behind its watermark.

        The tokens of these positions were pushed. StackError where the tensors are not such ones.
        """
        stop = start + len(tensors.get("output", ()))
        known = self.computed(sequence, stage, start, stop)
        ports = {f"sent.{i}": port for i, port in enumerate(self.plan.stages[stage].outputs)}
        fits = all(
            name in tensors and (tensors[name].shape, tensors[name].dtype) == (each.shape, each.dtype)
            for name, each in known.items()
        )
        if not fits or sequence.marks[stage] != start or not start < stop <= len(sequence):
            raise StackError(f"these are no states of stage {stage + 1}", setting="tensors")
        for name, key in ({"output": stage} | ports).items():
            if name in tensors:
                self._buffer(key, tuple(tensors[name].shape[1:]), tensors[name].dtype)
            else:
                self.outputs.setdefault(key, self.outputs[stage])
        for name, each in self.computed(sequence, stage, start, stop).items():
            each.copy_(tensors[name])
        sequence.marks[stage] = stop

    def _buffers(self) -> list[SlotBuffer]:
        """Each once: a stage that sends its output as it is shares the buffer with its port."""
        return list({id(buffer): buffer for buffer in self.outputs.values()}.values())

    # Running

    def push(self, batch: Batch, tokens: abc.Sequence[abc.Sequence[int]]) -> None:
        """Append tokens to each sequence; there may be unlike many, or none."""
        pairs = [(sequence, new) for sequence, new in zip(batch, tokens, strict=True) if new]
        if not pairs:
            return
        for sequence, new in pairs:
            self._reserve(sequence, len(sequence) + len(new))
        pairs.sort(key=lambda pair: pair[0].place.key)
        self._last = None  # other tokens may have stood at these positions
        spans = self._spans([s for s, _ in pairs], [len(s) for s, _ in pairs], [len(new) for _, new in pairs])
        if self._embeds_arrays is not None:
            packed = [token for _, new in pairs for token in new]
            before = [t for s, new in pairs for t in (s.tokens[-1] if s.tokens else -1, *new[:-1])]
            values = self._embeds_arrays.embed_array(packed, before)
            spans.write_array(self._array_buffer(EMBEDDING, values.shape[1:]), values)
        else:
            first = 0
            for group in spans.groups:
                some = pairs[first : first + group.rows]
                first += group.rows
                x0 = self._embed([list(new) for _, new in some], [s.tokens[-1:] for s, _ in some])
                group.write(self._buffer(EMBEDDING, x0.shape[2:], x0.dtype), x0)
        for sequence, new in pairs:
            sequence.tokens.extend(new)
        self._ctx = None

    def pending(self, sequence: Sequence, stage: int) -> int:
        """How many positions are pending before a stage, once the stages that it reads have run."""
        return len(sequence) - sequence.marks[stage]

    def _embed(self, new: list[list[int]], last: list[list[int]]) -> Tensor:
        """x0 (rows, time, ...) of the next tokens of each sequence, which may have none before them."""
        inputs = send(new, self.device)
        if all(last):
            return self.runtime.embed(inputs, send(last, self.device)[:, 0])
        if not any(last):
            return self.runtime.embed(inputs)
        import torch

        return torch.cat([self._embed([row], [before]) for row, before in zip(new, last, strict=True)])

    def run(self, batch: Batch, stage: int) -> None:
        """Run what is pending before `stage` and before the stages that it reads, each as one batch."""
        reads, at = self._reads[stage], 0
        while at < len(reads):
            index = reads[at]
            waiting = [s for s in batch if s.marks[index] < len(s.tokens)]
            stop = at + 1
            while stop < len(reads) and self._follows(reads[stop - 1], reads[stop], batch):
                stop += 1
            if waiting:
                self._run(waiting, index, reads[at + 1 : stop])
            at = stop

    def _chain_source(self, planned: PlannedStage, source: Key | None) -> int | None:
        """The stage that a stage may run as one call with: both have layers and send states as they are."""
        if not self._chains or not isinstance(source, EdgeOutput) or self._arrays[source.source] is None:
            return None
        return source.source if planned.layers and self.plan.stages[source.source].layers else None

    def _follows(self, stage: int, behind: int, batch: Batch) -> bool:
        """Whether a stage may run as one call with the one before it: both have run equally far."""
        return self._chained[behind] == stage and all(s.marks[stage] == s.marks[behind] for s in batch)

    def _run(self, batch: list[Sequence], stage: int, behind: abc.Sequence[int]) -> None:
        """A stage, and those `behind` it that run as one call with it."""
        if len(batch) > 1:
            batch.sort(key=lambda sequence: sequence.place.key)
        whole = self.stages[stage].from_start
        starts = [0 if whole else sequence.marks[stage] for sequence in batch]
        stops = [len(sequence.tokens) for sequence in batch]
        spans = self._spans(batch, starts, [b - a for a, b in zip(starts, stops, strict=True)])
        arrays = self._arrays[stage]
        if arrays is not None:
            if spans.tokens is None:
                spans.tokens = _tokens_of(batch, spans)
            self._run_arrays([stage, *behind], spans, *arrays)
        elif whole:
            self._run_from_start(batch, stage, spans)
        else:
            self._run_tensors(stage, self._bus_of(batch, spans), spans)
        for sequence, stop in zip(batch, stops, strict=True):
            for index in (stage, *behind):
                sequence.marks[index] = stop

    def _run_from_start(self, batch: list[Sequence], stage: int, spans: Spans) -> None:
        """A stage that keeps nothing: its whole prefix, for sequences of one length at a time."""
        first = 0
        for group in spans.groups:
            rows = batch[first : first + group.rows]
            first += group.rows
            inputs = send([sequence.tokens for sequence in rows], self.device)
            ctx = self.runtime.layer_context(group.read(self.outputs[EMBEDDING]), inputs)
            self._run_tensors(stage, ctx, group)

    def _run_tensors(self, stage: int, ctx: LayerContext, new: Spans | Group) -> None:
        """A stage on these new positions, from what the stages before it sent."""
        from topograd.exec.forward import run_stage

        planned = self.plan.stages[stage]
        received = [
            ctx.x0 if port.source == EMBEDDING else new.read(self.outputs[port]) for port, _ in planned.inputs
        ]
        h, sent = run_stage(self.stack, planned, received, ctx, self.stages[stage])
        self._keep(stage, h, sent, new.write)

    def _run_arrays(self, stages: list[int], spans: Spans, cache: Any, source: Key) -> None:
        """A chain of stages, of which the first reads another as it is, in a runtime that takes arrays."""
        embedding, read = self.outputs[EMBEDDING], self.outputs[source]
        buffers = [self._array_buffer(stage, embedding.tail) for stage in stages]
        if self._chains:
            behind: abc.Sequence[Any] = [self.stages[stage] for stage in stages[1:]]
            cache.run_chain(behind, [read, embedding, *buffers], spans)
        else:
            x0 = spans.read_array(embedding)
            h = x0 if source == EMBEDDING else spans.read_array(read)
            spans.write_array(buffers[0], cache.run_arrays(h, x0, spans))
        for stage, buffer in zip(stages, buffers, strict=True):
            for port in self.plan.stages[stage].outputs:
                self.outputs[port] = buffer

    def _keep(self, stage: int, h: Tensor, sent: dict[EdgeOutput, Tensor], write: Any) -> None:
        write(self._buffer(stage, h.shape[2:], h.dtype), h)
        for port, message in sent.items():
            if message is h:
                self.outputs[port] = self.outputs[stage]
            else:
                write(self._buffer(port, message.shape[2:], message.dtype), message)

    def _buffer(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> SlotBuffer:
        if self._embeds_arrays is not None:
            return self._array_buffer(key, shape)
        if key not in self.outputs:
            assert self.device is not None
            self.outputs[key] = SlotBuffer((), tuple(shape), dtype, self.device)
        return self.outputs[key]

    def _array_buffer(self, key: Key, shape: tuple[int, ...]) -> SlotBuffer:
        if key not in self.outputs:
            self.outputs[key] = ArrayBuffer((), tuple(shape))
        return self.outputs[key]

    def hidden(self, batch: Batch, stage: int, counts: abc.Sequence[int] | None = None) -> Tensor:
        """The stage's last outputs, `counts` of each sequence (by default one), packed: (N, ...)."""
        import torch

        if self._embeds_arrays is not None:
            return torch.from_numpy(self.hidden_array(batch, stage, counts))
        order, spans = self._last_positions(batch, stage, counts)
        hidden = spans.read(self.outputs[stage])[0]
        if order == sorted(order):
            return hidden
        parts = dict(zip(order, hidden.split(list(spans.counts)), strict=True))
        return torch.cat([parts[i] for i in range(len(batch))])

    def hidden_array(self, batch: Batch, stage: int, counts: abc.Sequence[int] | None = None) -> NDArray[Any]:
        """`hidden` of a runtime that takes arrays."""
        order, spans = self._last_positions(batch, stage, counts)
        hidden = spans.read_array(self.outputs[stage])
        if order == sorted(order):
            return hidden
        parts = dict(zip(order, np.split(hidden, np.cumsum(spans.counts)[:-1]), strict=True))
        return np.concatenate([parts[i] for i in range(len(batch))])

    def _last_positions(
        self, batch: Batch, stage: int, counts: abc.Sequence[int] | None
    ) -> tuple[list[int], Spans]:
        """The last positions that a stage ran, in the order of their places, and whose they are."""
        counts = [1] * len(batch) if counts is None else counts
        for sequence, count in zip(batch, counts, strict=True):
            if sequence.marks[stage] < count:
                problem = f"stage {stage + 1} has not run that many positions"
                raise StackError(problem, setting="counts", given=count, remedy="run it first")
        order = sorted(range(len(batch)), key=lambda i: batch[i].place.key) if len(batch) > 1 else [0]
        rows = [batch[i] for i in order]
        starts = [batch[i].marks[stage] - counts[i] for i in order]
        return order, self._spans(rows, starts, [counts[i] for i in order], keep=False)

    def truncate(self, batch: Batch, lengths: abc.Sequence[int]) -> None:
        """Forget everything from these positions on."""
        for sequence, length in zip(batch, lengths, strict=True):
            if not 0 <= length <= len(sequence):
                allowed = f"0 to {len(sequence)}, the positions of the sequence"
                raise StackError(setting="lengths", given=length, allowed=allowed)
        for sequence, length in zip(batch, lengths, strict=True):
            if length == len(sequence):
                continue
            del sequence.tokens[length:]
            for k, stage in enumerate(self.stages):
                if sequence.marks[k] > length:
                    sequence.marks[k] = stage.truncate(sequence.place, length)
        self._last = self._ctx = None

    def _spans(self, batch: list[Sequence], starts: list[int], counts: list[int], keep: bool = True) -> Spans:
        """Some positions of sequences; the next stage mostly wants the same."""
        places = [sequence.place for sequence in batch]
        last = self._last
        if last is not None and last.matches(places, starts, counts):
            return last
        spans = Spans(places, starts, counts, self._table, self.device)
        if keep:
            self._last = spans
        return spans

    def _bus_of(self, batch: list[Sequence], spans: Spans) -> LayerContext:
        """The layer context of these positions; the next stage mostly wants the same."""
        if self._ctx is None or self._ctx[0] is not spans:
            x0, inputs = spans.read(self.outputs[EMBEDDING]), send([_tokens_of(batch, spans)], self.device)
            ctx = self.runtime.layer_context(x0, inputs, spans.offset)
            self._ctx = spans, spans.bind(ctx, self.stack)
        return self._ctx[1]


def _tokens_of(batch: Batch, spans: Spans) -> list[int]:
    """The tokens at these positions, packed."""
    each = zip(batch, spans.starts, spans.counts, strict=True)
    return [token for s, start, n in each for token in s.tokens[start : start + n]]


def _plain_source(runtime: Runtime, planned: PlannedStage) -> Key | None:
    """What a stage reads, where it reads one hidden state as it is and sends its own so; else None."""
    ports = (*(port for port, _ in planned.inputs), *planned.outputs)
    if len(planned.inputs) > 1 or not all(_is_plain(runtime, port.relay) for port in ports):
        return None
    if any(port.layer != planned.stage.stop for port in planned.outputs):
        return None
    port, _ = planned.inputs[0]
    return EMBEDDING if port.source == EMBEDDING else port


def _is_plain(runtime: Runtime, relay: str) -> bool:
    if relay == "identity":
        return True
    from topograd.nn.relays import Identity

    return isinstance(runtime.stack.relay(relay), Identity)
