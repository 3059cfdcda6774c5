"""What is asked of many tensors, read at once: on a device every answer waits for all work before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def read(numbers: Sequence[Tensor]) -> list[Any]:
    """Tensors of one shape as Python's numbers, in one copy; they may lie on several devices."""
    if not numbers:
        return []
    dtype = reduce(torch.promote_types, (number.dtype for number in numbers))
    return torch.stack([number.detach().to(numbers[0].device, dtype) for number in numbers]).tolist()


def first_not_finite(tensors: Mapping[K, Tensor]) -> K | None:
    """The key of the first tensor that has a value which is not finite."""
    fine = read([torch.isfinite(tensor).all() for tensor in tensors.values()])
    return next((key for key, good in zip(tensors, fine, strict=True) if not good), None)


def squared_length(parts: Iterable[Tensor]) -> float:
    """The square of the norm of all parts together."""
    return float(sum(read([part.square().sum() for part in parts])))
