"""Invariant components of a gradient, and their steps carried back to the parameters.

Statement. Let ρ = 1 - η λ be decoupled weight decay, and W stand for ρ W below. Translations:

    components   g_h (, g_v)
    step         θ ← θ + Δ_h - spread(mean(Δ_h)) + spread(Δ_v)      the second term is the re-projection

Rescalings (`rescaling.py`), for blocks b with n_b, γ_b, r, u, τ_b:

    components   τ_b for each tensor, r (, u) for each gauge
    step         D_b ← D_b - W_b ⟨W_b, D_b⟩ / n_b²                  back to the tangent of the sphere
                 Δℓ  = ŵ Δr + U Δu
                 W_b ← e^{Δℓ_b} W_b + s_b D_b,                      s_b = n_b, or n_b / √numel with `rms`
    retracted    W_b ← e^{Δℓ_b} n_b (W_b + s_b D_b) / ‖W_b + s_b D_b‖

    follower     f ← e^{⟨e, Δℓ⟩} f + N D,  N = Π_b s_b^{e_b};  its component is Π_b n_b^{e_b} g_f

Every component is invariant under the group, so that whatever a base optimizer makes of the components is
too, and the step commutes with the group: this is why one split serves Adam, momentum and Muon.

The vertical step Δ_v or Δu is 0 (frozen), -η times the vertical gradient (sgd), or the base optimizer's.

Symbols and shapes. N stands for all channels of all gauges that are split together (gauges with one covector,
dtype and device): n, γ, Δℓ (N, B); r (N, 1); u (N, B-1). Nothing is read back from the device.

Cost. Beside the base optimizer: four passes over W and g for the components, three for the step, two more
with retraction; two temporaries of the size of the tensors.

Source: "Dead Directions: Geometric Singular Learning" algorithm 2. Ours are: re-projecting translations
(without it the step is Adam's own, and drifts as Adam's does), the retraction (without it log-norms move at
second order, since a tangential step leaves the sphere), `rms` (a tangential step is n_b η for each
coordinate, ‖W_b‖_F times Adam's), followers and covectors.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topograd.optim.gauges.base import Parameters
from topograd.optim.gauges.rescaling import Follower, Piece, Rescaling, basis_on
from topograd.optim.gauges.translation import Translation

Vertical = Literal["frozen", "sgd", "base"]
Slot = tuple[Tensor, str]
"""Where a component keeps its state: a parameter, and a prefix of the state's names."""


@dataclass(frozen=True)
class Ways:
    """How vertical parts move, and the options of the step."""

    vertical: Vertical = "frozen"
    reproject: bool = True
    retract: bool = False
    rms: bool = False


class TranslationSplit:
    """One translation gauge: its components, and the step."""

    def __init__(self, gauge: Translation, parameters: Parameters, ways: Ways) -> None:
        self._gauge, self._ways = gauge, ways
        self._tensors = [parameters[name] for name in gauge.names]
        gradients = [gradient(tensor) for tensor in self._tensors]
        self._vertical = gauge.collapse(gradients)
        self.components = list(torch._foreach_sub(gradients, gauge.spread(self._vertical)))
        self.slots: list[Slot] = [(tensor, "") for tensor in self._tensors]
        if ways.vertical == "base":
            self.components.append(self._vertical)
            self.slots.append((self._tensors[0], "vertical_"))

    def apply(self, steps: Sequence[Tensor], lr: float) -> None:
        """Move the parameters by steps of the components."""
        moves = list(steps[: len(self._tensors)])
        if self._ways.reproject:
            torch._foreach_sub_(moves, self._gauge.spread(self._gauge.collapse(moves)))
        torch._foreach_add_(self._tensors, moves)
        if self._ways.vertical != "frozen":
            vertical = steps[-1] if self._ways.vertical == "base" else -lr * self._vertical
            torch._foreach_add_(self._tensors, self._gauge.spread(vertical))


class RescalingSplit:
    """Some rescaling gauges with one covector: their components, and the step."""

    def __init__(
        self, gauges: tuple[Rescaling, ...], parameters: Parameters, keep: float, ways: Ways
    ) -> None:
        self._layout, self._ways, self._keep = layout_of(gauges), ways, keep
        self._blocks = [parameters[piece.name] for piece, _ in self._layout.pieces]
        self._followers = [parameters[one.piece.name] for one, _ in self._layout.followers]
        self.slots: list[Slot] = [(tensor, "") for tensor in self._blocks + self._followers]
        self.slots += [(parameters[gauge.names[0]], "radial_") for gauge in gauges]
        gradients = [gradient(tensor) for tensor in self._blocks + self._followers]
        squares = self._dots(self._blocks)
        self._sizes = [len(squares[index]) for index in self._layout.firsts]
        own = keep * self._gather(self._dots(gradients))
        self._norms = keep * self._gather(squares).sqrt()
        self._radial, self._basis = basis_on(gauges[0].covector, own.device, own.dtype)
        gamma = self._gamma(own, gradients[len(self._blocks) :])
        self._u = gamma @ self._basis
        radial = (gamma @ self._radial).unsqueeze(-1)
        scalars = torch.cat([radial, self._u], -1) if ways.vertical == "base" else radial
        self.components = [*self._tangential(gradients, own), *scalars.split(self._sizes)]

    def apply(self, steps: Sequence[Tensor], lr: float) -> None:
        """Move the parameters by steps of the components."""
        count = len(self._blocks) + len(self._followers)
        moves, scalars = list(steps[: len(self._blocks)]), torch.cat(list(steps[count:]))
        logs = scalars[:, :1] * self._radial
        if self._ways.vertical != "frozen":
            u = scalars[:, 1:] if self._ways.vertical == "base" else -lr * self._u
            logs = logs + u @ self._basis.T
        scales = self._norms / self._numel().sqrt() if self._ways.rms else self._norms
        radial = self._keep * self._gather(self._dots(moves)) / self._norms.square()
        growth = torch.ones_like(logs) if self._ways.retract else logs.exp()
        torch._foreach_mul_(self._blocks, self._scatter(self._keep * (growth - scales * radial)))
        torch._foreach_addcmul_(self._blocks, moves, self._scatter(scales))
        if self._ways.retract:
            moved = self._gather(self._dots(self._blocks)).sqrt()
            torch._foreach_mul_(self._blocks, self._scatter(logs.exp() * self._norms / moved))
        if self._followers:
            self._follow(steps[len(self._blocks) : count], logs, scales)

    def _tangential(self, gradients: list[Tensor], own: Tensor) -> list[Tensor]:
        """τ_b = n_b g_b - W_b γ_b / n_b for the blocks; N g for the followers."""
        tangential = torch._foreach_mul(gradients[: len(self._blocks)], self._scatter(self._norms))
        inward = self._scatter(-self._keep * own / self._norms)
        torch._foreach_addcmul_(tangential, self._blocks, inward)
        followers = gradients[len(self._blocks) :]
        scales = self._follower_factors(self._norms.log())
        return [*tangential, *(g * scale for g, scale in zip(followers, scales, strict=True))]

    def _gamma(self, own: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """∂L/∂ℓ: each block's own part, and what its followers add."""
        if not self._followers:
            return own
        gamma = list(own.split(self._sizes))
        for (follower, gauge), tensor, g in zip(
            self._layout.followers, self._followers, gradients, strict=True
        ):
            dots = self._keep * follower.piece.dots(tensor, g)
            gamma[gauge] = gamma[gauge] + dots.unsqueeze(-1) * _powers(follower, own)
        return torch.cat(gamma)

    def _follow(self, steps: Sequence[Tensor], logs: Tensor, scales: Tensor) -> None:
        factors = self._follower_factors(logs)
        reach = self._follower_factors(scales.log())
        for tensor, step, factor, scale in zip(self._followers, steps, factors, reach, strict=True):
            tensor.mul_(self._keep * factor).addcmul_(step, scale)

    def _follower_factors(self, logs: Tensor) -> list[Tensor]:
        """exp(⟨e, logs⟩) for each follower, ready to multiply it."""
        rows = logs.split(self._sizes)
        factors = []
        for (follower, gauge), tensor in zip(self._layout.followers, self._followers, strict=True):
            factor = (rows[gauge] @ _powers(follower, logs)).exp()
            factors.append(follower.piece.broadcast(factor, tensor.dim()))
        return factors

    def _dots(self, others: Sequence[Tensor]) -> list[Tensor]:
        """⟨W, other⟩ for each tensor of the blocks: (C,) each."""
        pairs = zip(self._layout.pieces, self._blocks, others, strict=False)
        return [piece.dots(tensor, other) for (piece, _), tensor, other in pairs]

    def _gather(self, values: Sequence[Tensor]) -> Tensor:
        """(N, B) from one (C,) for each tensor of the blocks; pieces of a block are added."""
        cells: dict[int, Tensor] = {}
        for (_, cell), value in zip(self._layout.pieces, values, strict=True):
            cells[cell] = cells[cell] + value if cell in cells else value
        return torch.cat([cells[cell] for cell in range(len(cells))]).view(self._layout.count, -1).T

    def _scatter(self, values: Tensor) -> list[Tensor]:
        """What multiplies each tensor of the blocks, from (N, B)."""
        cells = values.T.reshape(-1).split(self._sizes * self._layout.count)
        pairs = zip(self._layout.pieces, self._blocks, strict=True)
        return [piece.broadcast(cells[cell], tensor.dim()) for (piece, cell), tensor in pairs]

    def _numel(self) -> Tensor:
        """How many numbers each block has in each channel: (N, B)."""
        sizes = [self._sizes[cell % self._layout.gauges] for _, cell in self._layout.pieces]
        pairs = zip(self._blocks, sizes, strict=True)
        return self._gather([self._norms.new_full((size,), tensor.numel() / size) for tensor, size in pairs])


@dataclass(frozen=True)
class Layout:
    """Where the tensors of some gauges stand; cell = block · gauges + gauge."""

    gauges: int
    count: int
    """B."""
    firsts: tuple[int, ...]
    """The index of each gauge's first piece."""
    pieces: tuple[tuple[Piece, int], ...]
    followers: tuple[tuple[Follower, int], ...]


@functools.lru_cache(maxsize=256)
def layout_of(gauges: tuple[Rescaling, ...]) -> Layout:
    """Of gauges with one covector."""
    blocks = [gauge.blocks for gauge in gauges]
    count = len(blocks[0])
    pieces = [
        (piece, b * len(gauges) + i) for b in range(count) for i, own in enumerate(blocks) for piece in own[b]
    ]
    followers = [(follower, i) for i, gauge in enumerate(gauges) for follower in gauge.followers]
    cells = [cell for _, cell in pieces]
    firsts = [cells.index(i) for i in range(len(gauges))]
    return Layout(len(gauges), count, tuple(firsts), tuple(pieces), tuple(followers))


def _powers(follower: Follower, like: Tensor) -> Tensor:
    return _constant(follower.powers, like.device, like.dtype)


@functools.lru_cache(maxsize=256)
def _constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


def gradient(tensor: Tensor) -> Tensor:
    """A tensor's gradient; zeros where it has none though others of its gauge have."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
