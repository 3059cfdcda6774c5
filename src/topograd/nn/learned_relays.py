"""Learned relays: the catalogue R of boundary operators, and the joins of an input bus.

Statement. What the receiving stage computes from the message h, with σ the logistic function, elementwise:

    gate            h ∘ σ(G h + b)                 the multiplicative gate, eq. 43 on the left
    residual-gate   h + (U V h) ∘ σ(G h + b)       eq. 43 on the right, its r_i of low rank
    low-rank        U V h                          what a boundary of r numbers could carry
    linear          A h                            on two edges A h + B e, which is a linear map of [h; e]
    sigmoid         σ(G h + b)                     bounded, no factor h: the negative control of Prop. 10.18

`identity` and `pre-norm` need no parameters and are in `nn/relays.py`.

Symbols and shapes. h (..., d), d the width; G, A (d, d), b (d), V (r, d), U (d, r), r the rank. At first the
first source of a stage passes almost unchanged (σ(b) = 0.88, U V a projector, A the identity) and
additional sources are almost zero (σ(b) = 0.12, U and A zero), so that a relay or a bus starts near the
topology without it. `sigmoid` starts at σ(h) in both places.

Everything here works at the receiving end; the message is h itself. A map at the sending end would be
behind the stop-gradient: with λ = 0 no gradient would ever reach it. So these relays are trained by the loss
of the receiving stage, for every λ, and λ acts on what goes further back. The price: all d numbers travel.

Cost per position, in multiply-adds: d² for gate, linear and sigmoid, 2 r d for low-rank, d² + 2 r d for
residual-gate. Source: "Stage-Partitioned Learning" §8.9 (Prop. 8.16), §10.5.1 (Def. 10.9) and §10.5.5
(Def. 10.17, Prop. 10.18). There g is any learned map; here it is affine.
Limits. The width is the last dimension of h: not for stacks with channels elsewhere. Positions are treated
one by one, so that decoding needs no memory. Prop. 8.16 is not a theorem for every h: σ(h) lowers the
effective rank of normal h (63.8 to 41.0 of 64) and of a trained boundary (39.8 to 34.1), but it raises that
of h of rank 3 and large entries (3.0 to 14.3), whose directions it bends (our measurement).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import Topology

OPEN = 2.0
"""The gates' first bias: σ(2) = 0.88, and σ(-2) = 0.12 for additional sources."""


class LearnedRelay(nn.Module, ABC):
    """Sends h; subclasses define `receive`."""

    def __init__(self, width: int, rank: int, beside: bool) -> None:
        """`beside` is for a source that is not the stage's first."""
        super().__init__()

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h

    @abstractmethod
    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        """The input of the receiving stage."""


class Gate(LearnedRelay):
    """h ∘ σ(G h + b): unbounded in h, so the bounded factor does not compress it."""

    def __init__(self, width: int, rank: int, beside: bool) -> None:
        super().__init__(width, rank, beside)
        self.gate = _affine(width, 0.0, -OPEN if beside else OPEN)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message * torch.sigmoid(self.gate(message))


class LowRank(LearnedRelay):
    """U V h: r directions of h, at first an orthogonal projection onto random ones."""

    def __init__(self, width: int, rank: int, beside: bool) -> None:
        super().__init__(width, rank, beside)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.orthogonal_(self.down.weight)
        with torch.no_grad():
            self.up.weight.copy_(torch.zeros_like(self.up.weight) if beside else self.down.weight.t())

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return self.up(self.down(message))


class ResidualGate(LearnedRelay):
    """h + (U V h) ∘ σ(G h + b): at first h itself, for U is zero."""

    def __init__(self, width: int, rank: int, beside: bool) -> None:
        super().__init__(width, rank, beside)
        self.gate = _affine(width, 0.0, -OPEN if beside else OPEN)
        self.change = LowRank(width, rank, beside=True)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message + self.change.receive(message, ctx) * torch.sigmoid(self.gate(message))


class Linear(LearnedRelay):
    """A h: one block of the matrix behind a concatenation."""

    def __init__(self, width: int, rank: int, beside: bool) -> None:
        super().__init__(width, rank, beside)
        self.map = _affine(width, 0.0 if beside else 1.0, None)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return self.map(message)


class Sigmoid(LearnedRelay):
    """σ(G h + b): all of (0, 1), and nothing of h's size; the negative control."""

    def __init__(self, width: int, rank: int, beside: bool) -> None:
        super().__init__(width, rank, beside)
        self.gate = _affine(width, 1.0, 0.0)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return torch.sigmoid(self.gate(message))


LEARNED: Mapping[str, type[LearnedRelay]] = {
    "gate": Gate,
    "residual-gate": ResidualGate,
    "low-rank": LowRank,
    "linear": Linear,
    "sigmoid": Sigmoid,
}

_NAME = re.compile(rf"({'|'.join(LEARNED)})-\d+(?:-beside-\d+)?")  # as `topology.dag.own_relay` makes them


def add_relays(stack: Stack, topology: Topology) -> None:
    """Add the learned relays of `topology` that the stack lacks."""
    missing = [
        (edge.relay, LEARNED[match[1]], i > 0)
        for stage in topology.stages
        for i, edge in enumerate(stage.sources)
        if (match := _NAME.fullmatch(edge.relay)) and edge.relay not in stack.learned_relays()
    ]
    if not missing:
        return
    width = stack.width
    rank = max(width // 4, 1) if topology.relay_rank is None else topology.relay_rank
    if not 1 <= rank <= width:
        raise ConfigError(setting="relay_rank", given=rank, allowed=f"in 1..{width}, the width")
    like = next(stack.parameters())
    for name, make, beside in missing:
        stack.add_relay(name, make(width, rank, beside=beside).to(like.device, like.dtype))


def _affine(width: int, diagonal: float, bias: float | None) -> nn.Linear:
    """x ↦ diagonal · x + bias at first; without a bias if None."""
    layer = nn.Linear(width, width, bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(diagonal * torch.eye(width))
        if bias is not None:
            layer.bias.fill_(bias)
    return layer
