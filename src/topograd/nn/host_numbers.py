"""Small integer tensors that are made on the host, whose values stay known there.

Token numbers, positions and counts of a decoding step begin on the host. Reading one back would
wait for all work that is queued on the device, and so would torch's usual copy to it.

    send(numbers, device)     the tensor on the device; on CUDA the copy is not waited for: it has taken the
                              numbers in when the call returns
    largest(tensor)           the largest of the numbers that were sent, else of those read from the device

Limits: what was sent must not be changed in place. Other devices than CUDA wait for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(x: Tensor, device: torch.device | None) -> Tensor:
    """x on a device, without waiting for it on CUDA; None is where x is."""
    if device is None:
        return x
    return x.to(device, non_blocking=device.type == "cuda")


def send(numbers: Sequence[Any], device: torch.device | None) -> Tensor:
    """Whole numbers in nested lists as a tensor on a device."""
    import torch

    sent = to_device(torch.tensor(numbers), device)
    sent.sent_numbers = numbers  # type: ignore[attr-defined]
    return sent


def largest(x: Tensor) -> int:
    """The largest number of a tensor (rows, columns)."""
    sent = getattr(x, "sent_numbers", None)
    return int(x.max()) if sent is None else max(map(max, sent))
