"""Relays: the two ends of an edge between stages.

`send` runs at the stage that speaks, on its hidden state and the message that it heard itself, if any.
`receive` runs at the stage that listens. Several sources add up after they are received. The soft boundary
D_λ(h) = sg(h) + λ (h - sg(h)) ("Stage-Partitioned Learning" eq. 26) is not a relay: λ belongs to the edge,
acts on the gradient alone, and the executor applies it to any relay's message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from topograd.nn.stack import Bus


class Relay(Protocol):
    """What carries a hidden state from one stage to another."""

    def send(self, h: Tensor, heard: Tensor | None) -> Tensor: ...

    def receive(self, message: Tensor, bus: Bus) -> Tensor: ...


class Identity:
    """Sends h and receives it."""

    def send(self, h: Tensor, heard: Tensor | None) -> Tensor:
        return h

    def receive(self, message: Tensor, bus: Bus) -> Tensor:
        return message


RELAYS: Mapping[str, Relay] = {"identity": Identity()}
