"""ONNX Runtime for few rows and torch for many, over one memory of each text.

A row alone is faster in ONNX Runtime. Rows of unlike texts are faster together in torch, which reads a matrix
once for all of them (`depth/rows.py`); above FEW rows that wins (LOG.md, `benchmarks/serve_rows.py`).

Of each text and stage both have keys and values, each up to a position of its own: what one has run, the
other copies when it is its turn, and no more than it lacks. They differ in form alone (`nn/decoding.py`):

    K_torch[..., i] = key_scale · K_onnx[..., pair_order[i]]

Equal to either runtime to rounding in float32 (`tests/runtime/test_mixed.py`). Cost: the weights of both
forms are in memory, and the keys and values of a text twice. Limits: float32; several rows run together only
as caches of one row each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from topograd.nn.decoding import pair_order
from topograd.nn.stack import Stack
from topograd.runtime.onnx_memory import OnnxStage
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.topology.plan import Plan
from topograd.training.forward import StageMemory

FEW = 4
"""Rows up to which each runs alone."""


class MixedStage(OnnxStage):
    """A stage that both run; see the module."""

    make: Callable[[], StageMemory]
    """Torch's memory of it, empty."""
    _torch: StageMemory | None = None
    _held = 0
    """Positions whose keys and values ONNX Runtime has."""

    def together(self) -> StageMemory:
        """Torch's memory, with all that is remembered; a run of torch follows."""
        if self._torch is None:
            self._torch = self.make()
        start, stop = self._torch_held(), self._held
        if start < stop:
            for state, layer, keys, values in self._pairs():
                k, v = (torch.from_numpy(each[:, :, start:stop]) for each in (keys, values))
                state.append(_paired(k, layer) * layer.key_scale, v)
        return self._torch

    def _catch_up(self) -> None:
        """Give ONNX Runtime what torch has run."""
        start, stop = self._held, self._torch_held()
        if start < stop:
            super()._reserve(stop)
            for state, layer, keys, values in self._pairs():
                new = torch.from_numpy(keys[:, :, start:stop])
                _paired(new, layer, state.keys[:, :, start:stop] / layer.key_scale)
                values[:, :, start:stop] = state.values[:, :, start:stop].numpy()
            self._held = stop

    def _pairs(self) -> list[tuple[Any, Any, Any, Any]]:
        """Of each layer: torch's state and layer, ONNX Runtime's keys and values."""
        assert self._torch is not None
        names = [(f"keys.{i}", f"values.{i}") for i in self.indices]
        arrays = [(self.states[keys], self.states[values]) for keys, values in names]
        return [
            (state, layer, *pair)
            for state, layer, pair in zip(self._torch.layers, self.twins, arrays, strict=True)
        ]

    def pair_with(self, many: Stack, indices: Sequence[int], make: Callable[[], StageMemory]) -> None:
        """Remember how torch runs the same layers."""
        self.indices, self.make = list(indices), make
        self.twins = [many.layers[i] for i in indices]

    def _torch_held(self) -> int:
        held: int = 0 if self._torch is None else self._torch.layers[0].length
        return held

    def _reserve(self, stop: int) -> None:  # before every run, and before a copy
        self._catch_up()
        super()._reserve(stop)
        self._held = stop

    def rewind(self, marks: Sequence[int]) -> list[int]:
        reached = super().rewind(marks)
        self._held = min(self._held, max(reached))
        if self._torch is not None:
            self._torch.rewind(reached)
        return reached

    def copy(self, source: StageMemory, length: int) -> None:
        assert isinstance(source, MixedStage)
        source._catch_up()
        super().copy(source, length)

    def select(self, rows: Tensor) -> None:
        self._catch_up()
        self._torch = None
        super().select(rows)


def _paired(keys: Tensor, layer: Any, put: Tensor | None = None) -> Tensor:
    """Keys in the order that torch has them in; or, with `put`, written from that order."""
    if not layer.key_pairs:
        return keys if put is None else keys.copy_(put)
    order = pair_order(keys.shape[-1])
    if put is None:
        return keys[..., order]
    keys[..., order] = put
    return keys


class MixedRuntime(OnnxRuntime):
    """ONNX Runtime, and torch beside it."""

    stage_type = MixedStage
    few = FEW

    @cached_property
    def many(self) -> Stack:
        """The model as torch decodes it."""
        return self.stack.for_decoding()

    def memories(self, plan: Plan, rows: int, capacity: int) -> Sequence[StageMemory]:
        made = super().memories(plan, rows, capacity)
        for memory, planned in zip(made, plan.stages, strict=True):
            assert isinstance(memory, MixedStage)
            make = partial(StageMemory, self.many, planned, rows, capacity)
            memory.pair_with(self.many, planned.layers, make)
        return made

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        if h.shape[:-1].numel() > self.few:
            return self.many.readout(h, stage, rows)
        return super().readout(h, stage, rows)
