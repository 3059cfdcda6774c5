"""The `Runtime` protocol of decoding backends, and its PyTorch implementation.

    embed, ctx          x0 of new tokens, and what every layer reads beside its hidden state
    stage_caches        for each stage of a plan its cache, which runs the stage's layers on new positions of
                        any sequences (`exec/stage_cache.py`)
    readout             logits of a stage's head, on all or some rows of the vocabulary

PyTorch runs every model on every device, and is what another runtime is tested against. Pending positions,
relays and predictions are the same for all (`decode/cache.py`, `exec/forward.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from numpy.typing import NDArray

from topograd.topology.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from topograd.exec.stage_cache import StageCache
    from topograd.nn.slots import SlotBuffer, Spans
    from topograd.nn.stack import LayerContext, Stack


P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class ArrayStageCache(Protocol):
    """A stage's cache that runs on arrays: no tensor is made between the stages of a chain."""

    def run_arrays(self, h: NDArray[Any], x0: NDArray[Any], spans: Spans) -> NDArray[Any]:
        """The stage's last hidden states (N, width) of packed positions; overwritten by the next run."""


@runtime_checkable
class ChainStageCache(Protocol):
    """A stage's cache that runs the stages behind it too, as one call."""

    def run_chain(self, behind: Sequence[Any], states: Sequence[SlotBuffer], spans: Spans) -> None:
        """Run this stage and those `behind` it, each of which reads the last hidden states of the one before.

        `states` are float32 hidden states: what this stage reads, x0, and what each of them writes.
        """


@runtime_checkable
class ArrayRuntime(Protocol):
    """A runtime that embeds packed tokens and reads hidden states as arrays."""

    def embed_array(self, tokens: Sequence[int], previous: Sequence[int]) -> NDArray[Any]:
        """x0 (N, width); `previous` is the token before each of them, -1 where there is none."""

    def readout_array(self, h: NDArray[Any], stage: int) -> NDArray[Any]:
        """Logits (N, vocab) of hidden states (N, width) by the head of `stage`."""


class Runtime(Protocol):
    """What runs the stages of a model."""

    @property
    def name(self) -> str:
        """torch, onnx or native."""

    @property
    def precision(self) -> str:
        """Of its weights: float32 (torch: the stack's own), bfloat16, int8 or int4."""

    @property
    def ready(self) -> bool:
        """Whether nothing is left to be made when a stage or a head first runs."""

    @property
    def stack(self) -> Stack:
        """The model, for its relays."""

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        """x0 of tokens (rows, time); `previous` is the token before them in each row."""

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        """The context of tokens whose first position is `offset`, or whose positions (rows, time) it is."""

    def stage_caches(self, plan: Plan, capacity: int) -> Sequence[StageCache]:
        """A cache for each stage of a plan."""

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        """Logits of h by the head of `stage`, for all of the vocabulary or for `rows` of it."""


class TorchRuntime:
    """PyTorch: a stack laid out for decoding."""

    name, precision, ready = "torch", "float32", True

    def __init__(self, stack: Stack) -> None:
        from topograd.exec.stage_cache import StageCache

        self.stack, self.stage_cache = stack, StageCache
        self.embed, self.readout = stack.embed, stack.readout
        self.layer_context = stack.layer_context

    def stage_caches(self, plan: Plan, capacity: int) -> Sequence[StageCache]:
        return [self.stage_cache(self.stack, planned, capacity) for planned in plan.stages]


def device_of(stack: Stack) -> torch.device:
    """Where a stack's numbers are."""
    import torch

    owned = next(iter(stack.buffers()), next(iter(stack.parameters()), torch.empty(0)))
    return owned.device


def inference(work: Callable[P, T]) -> Callable[P, T]:
    """`torch.inference_mode` as a decorator, where torch was imported; there are no tensors before that."""

    @wraps(work)
    def inside(*args: P.args, **settings: P.kwargs) -> T:
        torch = sys.modules.get("torch")
        if torch is None:
            return work(*args, **settings)
        with torch.inference_mode():
            return work(*args, **settings)

    return inside


@contextmanager
def single_threaded_torch(runtime: Runtime) -> Iterator[None]:
    """PyTorch in one thread while another runtime decodes.

    What PyTorch does between the stages is small (the largest of some logits), and its threads wait for more
    of it by spinning, on the processors that the runtime's own threads need: with two of each on two
    processors, drafts took twice the time of what they saved.
    """
    torch = sys.modules.get("torch")  # where nothing has imported it, nothing spins
    threads = 1 if torch is None else torch.get_num_threads()
    if torch is None or runtime.name == "torch" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
