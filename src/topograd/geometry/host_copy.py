"""Values of many tensors in one device-to-host copy: each copy waits for all work that is queued."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from topograd.errors import GeometryError

K = TypeVar("K")


def to_host(numbers: Sequence[Tensor]) -> list[Any]:
    """Tensors of one shape as Python numbers, in one copy; they may be on several devices."""
    if not numbers:
        return []
    dtype = reduce(torch.promote_types, (number.dtype for number in numbers))
    return torch.stack([number.detach().to(numbers[0].device, dtype) for number in numbers]).tolist()


def first_not_finite(tensors: Mapping[K, Tensor]) -> K | None:
    """The key of the first tensor that has a value which is not finite."""
    finite = to_host([torch.isfinite(tensor).all() for tensor in tensors.values()])
    return next((key for key, good in zip(tensors, finite, strict=True) if not good), None)


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raise GeometryError if a parameter has a value that is not finite."""
    if (bad := first_not_finite(parameters)) is not None:
        raise GeometryError(
            f"parameter {bad} has a value that is not finite",
            setting="model",
            given=bad,
            remedy="load weights from before it happened",
        )


def squared_norm(parts: Iterable[Tensor]) -> float:
    """The squared Euclidean norm of all parts together."""
    return float(sum(to_host([part.square().sum() for part in parts])))
