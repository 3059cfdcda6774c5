"""What decoding asks of a runtime, and the one that torch is.

    embed, bus          x0 of new tokens, and what every layer hears beside its hidden state
    memories            for each stage of a plan what it remembers: it runs its layers on R new positions of
                        each row, goes back (`rewind`) and becomes a batch of other rows (`select`)
    readout             logits of a stage's head, on all or some rows of the vocabulary

Torch runs every model on every device, and is what another runtime is tested against. The queues of pending
positions, relays and predictions are the same for all (`depth/cache.py`, `training/forward.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.exec.forward import StageMemory
from topograd.nn.stack import Bus, Stack
from topograd.topology.plan import Plan


@dataclass(frozen=True, eq=False)
class Heard:
    """New positions of one row, from `start` on: tokens (1, S) and x0 (1, S, width)."""

    tokens: NDArray[Any]
    x0: NDArray[Any]
    start: int


@runtime_checkable
class RowMemory(Protocol):
    """A stage's memory that can run one row on arrays: no tensor is made between the stages of a chain."""

    def run_row(self, h: NDArray[Any], heard: Heard) -> NDArray[Any]:
        """The stage's last hidden state (1, S, width); overwritten by the next run."""


@dataclass(frozen=True, eq=False)
class HeardRows:
    """One new position of each of several rows: tokens (rows, 1) and x0 (rows, 1, width)."""

    tokens: NDArray[Any]
    x0: NDArray[Any]
    starts: Sequence[int]


@runtime_checkable
class RowsMemory(RowMemory, Protocol):
    """A stage's memory of one row that can run together with those of other rows."""

    @property
    def together(self) -> bool:
        """Whether it lies where others do; else it runs alone."""

    def run_rows(self, others: Sequence[Any], h: NDArray[Any], heard: HeardRows) -> NDArray[Any] | None:
        """The last hidden states (rows, 1, width) of this row and of others; None where it cannot."""


@runtime_checkable
class RowEmbedding(Protocol):
    """A runtime that embeds the tokens of one row as arrays."""

    def embed_row(self, tokens: NDArray[Any], previous: int | None) -> NDArray[Any]:
        """x0 (1, S, width) of tokens (1, S); `previous` is the token before them."""


class Runtime(Protocol):
    """What runs the stages of a model."""

    @property
    def name(self) -> str:
        """torch or onnx."""

    @property
    def precision(self) -> str:
        """Of its weights: float32 (torch: the stack's own), int8 or int4."""

    @property
    def stack(self) -> Stack:
        """The model, for its relays."""

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        """x0 of tokens (rows, time); `previous` is the token before them in each row."""

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        """The bus of tokens whose first position is `offset`, or whose positions (rows, time) it is."""

    def memories(self, plan: Plan, rows: int, capacity: int) -> Sequence[StageMemory]:
        """The memory of each stage of a plan."""

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        """Logits of h by the head of `stage`, for all of the vocabulary or for `rows` of it."""


class TorchRuntime:
    """Torch: a stack laid out for decoding."""

    name, precision = "torch", "float32"

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.stack.embed(inputs, previous)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        return self.stack.bus(x0, inputs, offset)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return self.stack.readout(h, stage, rows)

    def memories(self, plan: Plan, rows: int, capacity: int) -> Sequence[StageMemory]:
        return [StageMemory(self.stack, planned, rows, capacity) for planned in plan.stages]


@contextmanager
def torch_beside(runtime: Runtime) -> Iterator[None]:
    """Torch in one thread while another runtime writes.

    What torch does between the stages is small (the largest of some logits), and its threads wait for more of
    it by spinning, on the processors that the runtime's own threads need: with two of each on two processors,
    drafts took twice the time of what they saved.
    """
    threads = torch.get_num_threads()
    if runtime.name == "torch" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
