"""KV cache of a stage in the native backend, for new positions of any sequences.

A run is one call, whatever the sequences are: each new position says where its keys and values lie
(`library.ROW`), in the buffers of `nn/slots.py`. Nothing is padded or copied, and rooms may differ. So are
stages that read each other as they are, from the buffers of hidden states to those (`run_chain`).

Limits: float32 on a CPU; for one thread at a time, like any cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from itertools import accumulate, cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from topograd.exec.stage_cache import StageCache
from topograd.nn.array_slots import ArrayBuffer, ArrayKVSlots
from topograd.nn.slots import Place, SlotBuffer, Spans
from topograd.runtime.native import library
from topograd.runtime.native.library import Layer, Run
from topograd.runtime.native.packing import pointers
from topograd.topology.plan import PlannedStage

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.nn.mamba.recurrent import RecurrentState
    from topograd.nn.stack import LayerContext
    from topograd.runtime.native.runtime import NativeRuntime

Array = NDArray[Any]
STATE = "all"
"""What a recurrent state keeps: one tensor."""
Rooms = tuple[tuple[int, int], ...]
"""Room and number of slots of the buffers of a run."""


class Binding:
    """A run of some layers whose buffers, in some rooms, are known: what is left is filled for each run."""

    def __init__(
        self, stages: Sequence[NativeStageCache], rooms: Rooms, states: Sequence[SlotBuffer] = ()
    ) -> None:
        """`states`: hidden states that are read, x0 and what each stage writes; none for packed arrays."""
        runtime, kv = stages[0].runtime, [slots for stage in stages for slots in stage.slots]
        self._stages, self._recurrent = stages, None in kv
        layers = [runtime.layer(i) for stage in stages for i in stage.planned.layers]
        self._kept: list[Any] = [(Layer * len(layers))(*layers)]
        self.run = Run(0, runtime.width, len(layers), len(rooms), runtime.threads, not states)
        self.run.layer = self._kept[0]
        self.run.keys = self._addresses([None if each is None else each.keys for each in kv], rooms)
        self.run.values = self._addresses([None if each is None else each.values for each in kv], rooms)
        if states:
            source, x0, *behind = states
            ends = list(accumulate(len(stage.planned.layers) for stage in stages))
            taps = {end - 1: buffer for end, buffer in zip(ends, behind, strict=True)}
            self.run.h, self.run.x0 = self._addresses([source], rooms), self._addresses([x0], rooms)
            self.run.taps = self._addresses([taps.get(i) for i in range(len(layers))], rooms)
        self.version = ArrayBuffer.version

    def _addresses(self, buffers: Sequence[SlotBuffer | None], rooms: Rooms) -> int:
        """The address of an array of addresses."""
        arrays = [None if buffer is None else buffer.array(*room) for buffer in buffers for room in rooms]
        self._kept.append(pointers(arrays))
        return ctypes.addressof(self._kept[-1])

    def start(self, runtime: NativeRuntime, spans: Spans, reach: int) -> None:
        """Run new positions."""
        run, rows = self.run, runtime.rows_of(spans)
        run.rows, run.row = spans.total, ctypes.addressof(rows)
        run.cosine, run.sine = runtime.turned(max(reach, max(group.stop for group in spans.groups)))
        if not self._recurrent:
            library.run_stage(run)
            return
        import torch

        states = [state for stage in self._stages for state in stage.states(spans.places)]
        before = [None if state is None else state[STATE] for state in states]
        after = [None if each is None else torch.empty_like(each) for each in before]
        both = [_pointers_of(before), _pointers_of(after)]
        run.sequences, (run.before, run.after) = len(spans.places), map(ctypes.addressof, both)
        library.run_stage(run)
        for state, new, count in zip(states, after, cycle(spans.counts), strict=False):
            if state is not None and new is not None:
                state.advance({STATE: new}, count)


class NativeStageCache(StageCache):
    """Keys and values of one stage, run by the kernels."""

    def __init__(self, runtime: NativeRuntime, planned: PlannedStage, capacity: int) -> None:
        super().__init__(runtime.stack if runtime.relays else None, planned, capacity)
        self.runtime = runtime
        shapes = runtime.shapes(planned)
        self.slots = [ArrayKVSlots(*shapes[i]) if i in shapes else None for i in planned.layers]
        self.taps = planned.taps
        self._bindings: dict[tuple[tuple[int, ...], Rooms], Binding] = {}
        """By whether states lie in buffers and the stages behind, and the rooms."""

    def keep_rooms(self, rooms: list[int]) -> None:
        super().keep_rooms(rooms)
        self._bindings.clear()

    def open(self, place: Place) -> None:
        super().open(place)
        own = self._states[place]
        own.layers = [None if each is None else _joined(each) for each in own.layers]

    def states(self, places: Sequence[Place]) -> list[Any]:
        """The recurrent states of sequences, layer by layer; None where a layer attends."""
        return [self._states[place].layers[i] for i in range(len(self.slots)) for place in places]

    # Running

    def layers(self, h: Tensor, ctx: LayerContext) -> dict[int, Tensor]:
        """The hidden states behind the last layer and those whose output is sent, by how many layers."""
        import torch

        assert ctx.spans is not None, "a cache runs spans"
        spans = ctx.spans
        if spans.tokens is None:
            spans.tokens = ctx.inputs[0].tolist()
        between = {tap: np.empty(h.shape[1:], np.float32) for tap in self.taps[:-1]}
        last = self._run(h[0].numpy(), ctx.x0[0].numpy(), spans, between)
        return {tap: torch.from_numpy(a)[None] for tap, a in {**between, self.taps[-1]: last}.items()}

    def run_arrays(self, h: Array, x0: Array, spans: Spans) -> Array:
        """The hidden states (N, width) behind the last layer."""
        return self._run(h, x0, spans, {})

    def _run(self, h: Array, x0: Array, spans: Spans, between: dict[int, Array]) -> Array:
        """Fills `between`, hidden states by how many layers; returns those behind the last."""
        if not self.planned.layers:  # a stage that is a head alone
            return np.array(h, np.float32)
        rooms = _rooms(spans)
        binding = self._bound([], rooms, [])
        h, x0 = (np.ascontiguousarray(each, np.float32) for each in (h, x0))
        after = {**between, self.planned.stage.stop: np.empty_like(h)}
        taps = [after.get(i + 1) for i in self.planned.layers for _ in rooms]
        each = [pointers(arrays) for arrays in ([h], [x0], taps)]
        binding.run.h, binding.run.x0, binding.run.taps = map(ctypes.addressof, each)
        binding.start(self.runtime, spans, self.capacity)
        return after[self.planned.stage.stop]

    def _bound(
        self, behind: Sequence[NativeStageCache], rooms: Rooms, states: Sequence[SlotBuffer]
    ) -> Binding:
        """Addresses are kept until a buffer is replaced."""
        key = (bool(states), *(stage.planned.index for stage in behind)), rooms
        found = self._bindings.get(key)
        if found is None or found.version is not ArrayBuffer.version:
            found = self._bindings[key] = Binding([self, *behind], rooms, states)
        return found


class ChainedStageCache(NativeStageCache):
    """The same, where several stages that read each other as they are run as one call."""

    def run_chain(
        self, behind: Sequence[ChainedStageCache], states: Sequence[SlotBuffer], spans: Spans
    ) -> None:
        """This stage and those behind it; `states`: what this one reads, x0, and what each of them writes."""
        if self.planned.layers:
            self._bound(behind, _rooms(spans), states).start(self.runtime, spans, self.capacity)
        else:
            spans.write_array(states[2], spans.read_array(states[0]))


def _joined(state: Any) -> RecurrentState:
    """The state of a recurrent layer before its first position, zeros, as one tensor (`csrc/mamba.h`)."""
    import torch

    from topograd.nn.mamba.recurrent import RecurrentState

    return RecurrentState({STATE: torch.zeros(1, sum(each.numel() for each in state.tensors()))})


def _pointers_of(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))


def _rooms(spans: Spans) -> Rooms:
    return tuple(dict.fromkeys((group.room, group.slots) for group in spans.groups))
