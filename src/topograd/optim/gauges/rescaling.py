"""Rescaling gauges: a positive factor for each block of weights, of which the network sees one product.

Statement. Blocks W_b, b = 1..B, are scaled by c_b > 0, and the network sees only Π_b c_b^{w_b}, which the
group keeps at 1. With n_b = ‖W_b‖_F and log-norms ℓ_b = log n_b the group is the translations of ℓ that are
orthogonal to w. For a loss that is invariant, with g_b its gradient,

    γ_b = ⟨W_b, g_b⟩ = ∂L/∂ℓ_b                      invariant
    r   = ⟨ŵ, γ⟩,  ŵ = w / ‖w‖                      radial: the one invariant direction of ℓ
    u   = Uᵀ γ                                      vertical: U (B, B-1) an orthonormal basis of w^⊥
    τ_b = n_b (g_b - W_b γ_b / n_b²)                tangential: orthogonal to W_b, and invariant

and u = 0 up to rounding. For w = 1, U_bj = √(2/B) cos(π (b - ½) j / B); for another w, U is this basis under
the reflection that takes 1/√B to ŵ. For B = 2 and w = (1, 1), u = (γ_1 - γ_2) / √2.

Followers. A bias inside a chain scales as everything in front of it does: f → Π_b c_b^{e_b} f. Its own norm
may be zero, so it takes the norms of the blocks: f / N with N = Π_b n_b^{e_b} is invariant, N g_f is the
invariant gradient, and it adds e_b ⟨f, g_f⟩ to γ_b. Derived here.

Channels. A gauge may be C copies of the same group, one for each channel; every norm, γ, r and u then has a
leading dimension (C,). A gauge on whole tensors has C = 1.

Symbols and shapes. `Piece` is a tensor, the dimension that counts its channels (None for whole tensors);
a block is some pieces that scale together. A group element is log c: (C, B), with Σ_b w_b log c_b = 0.
Vertical and horizontal parts are those of the metric Σ_b ‖X_b‖² / n_b², which the group keeps.

Cost: one pass for norms, two for γ. Source: "Dead Directions: Geometric Singular Learning" section 11.1,
proposition 83; w other than 1 and followers are derived here.

Limits. A block of norm zero has no direction: `check_norms` raises OptimError.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge, Parameters

_Following = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """A tensor of a block, and the dimension that counts its channels."""

    name: str
    dim: int | None = None

    def sums(self, tensor: Tensor) -> Tensor:
        """(C,): the sum of a tensor of the piece's shape over everything but the channels."""
        if self.dim is None:
            return tensor.sum().reshape(1)
        return tensor.sum([d for d in range(tensor.dim()) if d != self.dim]) if tensor.dim() > 1 else tensor

    def dots(self, one: Tensor, other: Tensor) -> Tensor:
        """(C,): inner products in each channel."""
        if self.dim is None:
            return torch.dot(one.reshape(-1), other.reshape(-1)).reshape(1)
        return self.sums(one * other)

    def broadcast(self, values: Tensor, dims: int) -> Tensor:
        """Values (C,) in a shape that multiplies the piece's tensor, which has `dims` dimensions."""
        if self.dim is None:
            return values.reshape(())
        return values.reshape([-1 if d == self.dim else 1 for d in range(dims)])


@dataclass(frozen=True)
class Follower:
    """A tensor without a norm of its own, and the powers e_b of the blocks' factors that scale it."""

    piece: Piece
    powers: tuple[float, ...]


class Rescaling(Gauge):
    """A gauge that multiplies. Subclasses have its blocks and the product that the network sees."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each block."""

    @property
    @abstractmethod
    def covector(self) -> tuple[float, ...]:
        """w: the network sees Π_b c_b^{w_b}."""

    @property
    def followers(self) -> tuple[Follower, ...]:
        """Tensors that scale with the blocks."""
        return ()

    @property
    def names(self) -> tuple[str, ...]:
        blocks = [piece.name for block in self.blocks for piece in block]
        return (*blocks, *(follower.piece.name for follower in self.followers))

    def log_norms(self, parameters: Parameters) -> Tensor:
        """ℓ: (C, B)."""
        return self._dots(parameters, parameters).log() / 2

    def check_norms(self, parameters: Parameters) -> None:
        """Raise OptimError where a block has no direction."""
        for block, logs in zip(self.blocks, self.log_norms(parameters).unbind(-1), strict=True):
            if not logs.isfinite().all():
                names = ", ".join(repr(piece.name) for piece in block)
                where = "" if block[0].dim is None else f" in channel {int((~logs.isfinite()).nonzero()[0])}"
                raise OptimError(
                    f"{self}: {names} has norm zero or not finite{where}",
                    setting="gauges",
                    given=block[0].name,
                    remedy="start it elsewhere, or leave the gauge out",
                )

    def element(self, parameters: Parameters, generator: torch.Generator | None = None) -> Tensor:
        like = self.log_norms(parameters)
        _, U = basis(self.covector)
        steps = torch.randn(len(like), U.shape[1], generator=generator, dtype=torch.float64)
        return (steps @ U.T).to(like)

    def act(self, parameters: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self._scaled(parameters, element.exp(), lambda powers: (element @ powers).exp())

    def vertical(self, parameters: Parameters, vectors: Parameters) -> dict[str, Tensor]:
        _, U = basis(self.covector)
        # ⟨W_b, X_b⟩ / n_b² (C, B): the change of log-norms by displacements X
        U = U.to(steps := self._dots(parameters, vectors) / self._dots(parameters, parameters))
        along = steps @ U @ U.T
        return self._scaled(parameters, along, lambda powers: along @ powers)

    def invariants(self, parameters: Parameters) -> dict[str, Tensor]:
        """Each tensor over its norm, and ⟨ŵ, ℓ⟩ (C,) under the name "radial"."""
        logs = self.log_norms(parameters)
        w, _ = basis(self.covector)
        normed = self._scaled(parameters, (-logs).exp(), lambda powers: (-logs @ powers).exp())
        return {**normed, "radial": logs @ w.to(logs)}

    def drift(self, before: Parameters, after: Parameters) -> float:
        _, U = basis(self.covector)
        moved = self.log_norms(after) - self.log_norms(before)
        return (moved @ U.to(moved)).norm().item()

    def _scaled(self, parameters: Parameters, factors: Tensor, following: _Following) -> dict[str, Tensor]:
        """Each tensor times its block's factor (C, B); a follower's factor is `following` of its powers."""
        scaled = {}
        for block, factor in zip(self.blocks, factors.unbind(-1), strict=True):
            for piece in block:
                tensor = parameters[piece.name]
                scaled[piece.name] = tensor * piece.broadcast(factor, tensor.dim())
        for follower in self.followers:
            tensor = parameters[follower.piece.name]
            factor = following(factors.new_tensor(follower.powers))
            scaled[follower.piece.name] = tensor * follower.piece.broadcast(factor, tensor.dim())
        return scaled

    def _dots(self, one: Parameters, other: Parameters) -> Tensor:
        """⟨X_b, Y_b⟩: (C, B)."""
        dots = [
            torch.stack([piece.dots(one[piece.name], other[piece.name]) for piece in block]).sum(0)
            for block in self.blocks
        ]
        return torch.stack(dots, dim=-1)


@functools.cache
def basis_on(covector: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`basis` where an optimizer needs it, made once: a copy at every step would wait for the device."""
    w, U = (part.to(device, dtype) for part in basis(covector))
    return w, U


@functools.cache
def basis(covector: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """ŵ (B,) and U (B, B-1): orthonormal together; float64, on the CPU.

    >>> w, U = basis((1.0, 1.0))
    >>> [[round(x, 3) for x in row] for row in (w.tolist(), U[:, 0].tolist())]
    [[0.707, 0.707], [0.707, -0.707]]
    """
    B = len(covector)
    one = torch.full((B,), B**-0.5, dtype=torch.float64)
    w = torch.tensor(covector, dtype=torch.float64)
    w = w / w.norm()
    b = torch.arange(1, B + 1, dtype=torch.float64)[:, None] - 0.5
    U = math.sqrt(2 / B) * torch.cos(math.pi / B * b * torch.arange(1, B, dtype=torch.float64))
    normal = one - w
    if normal.norm() > 1e-12:  # reflect 1/√B onto ŵ, and the basis with it
        normal = normal / normal.norm()
        return w, U - 2 * torch.outer(normal, normal @ U)
    return one, U
