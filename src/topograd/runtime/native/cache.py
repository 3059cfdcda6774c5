"""KV cache of a stage in the native backend, for new positions of any sequences.

A run is one call, whatever the sequences are: each new position says where its keys and values lie
(`library.ROW`), in the buffers of `nn/slots.py`. Nothing is padded or copied, and rooms may differ.

Limits: float32 on a CPU; for one thread at a time, like any cache.
"""

from __future__ import annotations

import ctypes
from ctypes import cast
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from topograd.exec.stage_cache import StageCache
from topograd.nn.slots import ArrayKVSlots, Spans
from topograd.runtime.native import library
from topograd.runtime.native.library import Layer, Run
from topograd.runtime.native.packing import pointers
from topograd.topology.plan import PlannedStage

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.nn.stack import LayerContext
    from topograd.runtime.native.runtime import NativeRuntime

Array = NDArray[Any]
Rooms = tuple[tuple[int, int], ...]
"""Room and number of slots of the buffers of a run."""


class Buffers:
    """Addresses of a stage's keys and values in some rooms."""

    def __init__(self, slots: list[ArrayKVSlots], rooms: Rooms) -> None:
        self.first = _first(slots, rooms)
        """Those of the first layer; all layers' buffers are replaced together."""
        self.keys = pointers([kv.keys.array(*room) for kv in slots for room in rooms])
        self.values = pointers([kv.values.array(*room) for kv in slots for room in rooms])


def _first(slots: list[ArrayKVSlots], rooms: Rooms) -> list[Array]:
    return [slots[0].keys.array(*room) for room in rooms]


class NativeStageCache(StageCache):
    """Keys and values of one stage, run by the kernels."""

    def __init__(self, runtime: NativeRuntime, planned: PlannedStage, capacity: int) -> None:
        super().__init__(runtime.stack if runtime.relays else None, planned, capacity)
        self.runtime = runtime
        shapes = runtime.shapes(planned)
        kv = [ArrayKVSlots(*shapes[i]) for i in planned.layers]
        self.slots = [*kv]
        self._kv = kv
        self.taps = planned.taps
        self._layers: ctypes.Array[Layer] | None = None
        self._untapped = pointers([None] * len(planned.layers))
        self._buffers: dict[Rooms, Buffers] = {}

    def keep_rooms(self, rooms: list[int]) -> None:
        super().keep_rooms(rooms)
        self._buffers.clear()

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
        runtime = self.runtime
        if self._layers is None:
            self._layers = (Layer * len(self.planned.layers))(*map(runtime.layer, self.planned.layers))
        rows, out = runtime.rows_of(spans), np.array(h, np.float32, order="C")
        x0 = np.ascontiguousarray(x0, np.float32)
        buffers = self._bound(spans)
        taps = self._untapped
        if between:
            taps = pointers([between.get(index + 1) for index in self.planned.layers])
        run = Run(
            len(out), out.shape[1], len(self._layers), len(buffers.first), runtime.threads, self._layers
        )
        run.h, run.x0, run.row = out.ctypes.data, x0.ctypes.data, rows.ctypes.data
        run.keys, run.values = (cast(each, ctypes.c_void_p) for each in (buffers.keys, buffers.values))
        run.cosine, run.sine = runtime.turned(max(self.capacity, max(group.stop for group in spans.groups)))
        run.taps = cast(taps, ctypes.c_void_p)
        library.run_stage(run)
        return out

    def _bound(self, spans: Spans) -> Buffers:
        """The buffers of a run; addresses are kept until a buffer is replaced."""
        rooms = tuple(dict.fromkeys((group.room, group.slots) for group in spans.groups))
        found = self._buffers.get(rooms)
        if found is None or any(
            a is not b for a, b in zip(found.first, _first(self._kv, rooms), strict=True)
        ):
            found = self._buffers[rooms] = Buffers(self._kv, rooms)
        return found
