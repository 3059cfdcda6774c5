"""Peak memory of a piece of code, counted exactly, on any device.

A dispatch mode sees every operator. Each new storage is counted until it dies. What existed before is not
counted, so with gradients already allocated the peak of a training step is its activations, its logits and
whatever it holds for a moment. Limits: scratch space inside a kernel is not seen; the code runs slower.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in known:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = _key(tensor), storage.nbytes()
        if key in self.seen or not size:
            return

        def gone(_: Any) -> None:
            self.live -= size
            self.seen.pop(key, None)

        self.seen[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest number of bytes that `run` has allocated and not yet freed, at any moment."""
    counter = _Counter()
    with counter:
        run()
    return counter.peak


def peak_step_bytes(step: Callable[[], object], parameters: list[torch.nn.Parameter]) -> int:
    """Peak of a training step beyond parameters and gradients, which are allocated first."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return peak_bytes(step)
