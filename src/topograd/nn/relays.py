"""Relays: the two ends of an edge between stages.

`send` runs at the sending stage, on its hidden state and the message that it received itself, if any.
`receive` runs at the receiving stage. Several sources add up after they are received. The soft boundary
D_λ(h) = sg(h) + λ (h - sg(h)) ("Stage-Partitioned Learning" eq. 26) is not a relay: λ belongs to the edge,
acts on the gradient alone, and the executor applies it to any relay's message.

A relay treats every position by itself, unless it is a `CausalRelay`. A stack finds relays by name
(`Stack.relay`): those with parameters are its own modules (`Stack.add_relay`), the rest are in `RELAYS`. The
learned ones of "Stage-Partitioned Learning" §10.5 are in `nn/learned_relays.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from topograd.topology.dag import CANVAS

if TYPE_CHECKING:
    from topograd.nn.interface_config import InterfaceSettings
    from topograd.nn.stack import LayerContext


class Relay(Protocol):
    """The transfer of a hidden state from one stage to another."""

    def send(self, h: Tensor, received: Tensor | None) -> Tensor: ...

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor: ...


class CausalRelay(ABC):
    """A relay whose message at a position depends on earlier ones, such as a bounded interface.

    Over a whole sequence it may use any shape of message. While decoding, messages have one entry for each
    position, and both ends are given all positions so far; `ctx.positions` are the new ones.
    """

    @abstractmethod
    def send_next(self, history: Tensor, received: Tensor, ctx: LayerContext) -> Tensor:
        """The messages at the new positions, from the hidden states of all positions so far."""

    @abstractmethod
    def receive_next(self, history: Tensor, ctx: LayerContext) -> Tensor:
        """The receiver's input at the new positions, from the messages of all positions so far."""

    @abstractmethod
    def needed(self, time: int) -> tuple[int, Tensor | None]:
        """Of `time` positions: how many leading ones `send` reads, and which of those, if not all."""

    @abstractmethod
    def send_pooled(self, pooled: Tensor, received: Tensor | None) -> Tensor:
        """`send`, from hidden states at the positions that `needed` named."""


class BoundedRelay(nn.Module, ABC):
    """A bounded interface: a relay whose message m (batch, states, r) is all that crosses a boundary.

    A scan builds the Jacobians of such messages (`interfaces/jacobian.py`). State s may depend on the states
    up to s of the message that came in, and on the first (s + 1) `segment` positions; a form whose one state
    reads all positions leaves `segment` out.
    """

    settings: InterfaceSettings
    segment: int | None = None

    @abstractmethod
    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        """m_{k+1} from the region's output and m_k; region 0 received the canvas."""

    @abstractmethod
    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        """The region's input."""

    def empty(self, ctx: LayerContext) -> Tensor:
        """The message of regions that add nothing to their canvas."""
        return ctx.x0.new_zeros(())

    def parameters_by_end(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that `send` uses, and those that `receive` uses: on ranks each end keeps its own."""
        every = list(self.parameters())
        return every, every

    def rows(self, context: int) -> int | None:
        """How many rows of a Jacobian a scan must build with this context; None if it is not known."""
        return None

    def tangent(self, m: Tensor) -> Tensor | None:
        """(..., r, q): an orthonormal basis of the directions in which a state m (..., r) can move, in
        float32 or better; None means all r."""
        return None


def at_positions(values: Tensor, positions: Tensor) -> Tensor:
    """values (batch, T, width) at positions (time) or (batch, time)."""
    where = positions.expand(len(values), -1)[..., None]
    return values.gather(1, where.expand(-1, -1, values.shape[-1]))


def fit_rank(m: Tensor, rank: int) -> Tensor:
    """The first `rank` numbers of each state, with zeros where there are fewer."""
    return m if m.shape[-1] == rank else F.pad(m[..., :rank], (0, max(rank - m.shape[-1], 0)))


class Identity:
    """Sends h and receives it."""

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message


class PreNorm:
    """Sends h and receives h / rms(h), the RMSNorm without a gain: the direction alone."""

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return F.rms_norm(message, message.shape[-1:])


RELAYS: Mapping[str, Relay] = {"identity": Identity(), "pre-norm": PreNorm(), CANVAS: Identity()}
