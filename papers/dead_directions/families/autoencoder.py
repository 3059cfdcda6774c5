"""A two-layer autoencoder as one hidden unit vanishes: G₁ and H₁ by a freeze probe, with K and Fisher exact.

Statement. x̂ = W₂ σ(W₁ x), x ~ N(0, I). All rows of W₁ and columns of W₂ but the last are Gaussian; the
last are t a and t b, |a| = |b| = 1. The gradients are those of ½ |x̂ - x|²: with fewer hidden units than
inputs the residual stays O(1), and so plays the part of label noise. With δ₁ = σ'(W₁x) ⊙ W₂ᵀ (x̂ - x), H₁
the activations,

    λ_min(G₁) ~ t²        σ_min(H₁) ~ t

for σ linear, ReLU, GELU and tanh. Between the networks at t and at 0, with output noise of variance 1, only
the last unit differs, by t b σ(t a·x): K and F are those of a dead unit, k = 2.

Symbols and shapes. t: (n,); W₁ (hidden, inputs), W₂ (inputs, hidden); δ₁, H₁ (samples, hidden). Both
bottoms are singular values of these per-sample matrices, so they are resolved to 1e-16 of the largest, and
squares to 1e-32.
Cost: O(samples · hidden · (inputs + hidden)) for each t.
Source: "Dead Directions: Geometric Singular Learning", §B.1 and Table 7.
Limits. For t in [0.1, 0.5] the slopes of smooth activations drift (GELU up, tanh down): that is no
asymptotic window. Rates only: the constants depend on seed and sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from papers.dead_directions.families.two_layer import DeadUnit, activation
from papers.dead_directions.quadrature import points
from topograd.errors import GeometryError


@dataclass(frozen=True)
class Autoencoder:
    """inputs - hidden - inputs, the last hidden unit at distance t from dead; all drawn from one seed."""

    activation: str = "linear"
    inputs: int = 12
    hidden: int = 6
    seed: int = 42
    samples: int = 4000

    order = 2

    def __post_init__(self) -> None:
        activation(self.activation)
        if not 2 <= self.hidden < self.inputs <= self.samples:
            raise GeometryError(
                f"{self.inputs} inputs, {self.hidden} hidden units, {self.samples} samples: "
                "give 2 <= hidden < inputs <= samples",
                setting="hidden",
                given=self.hidden,
            )

    @property
    def name(self) -> str:
        return f"autoencoder {self.inputs}-{self.hidden}, {self.activation}"

    @property
    def direction(self) -> str:
        return "the row in and the column out of one hidden unit together"

    def fisher(self, t: Tensor) -> Tensor:
        return DeadUnit(self.activation).fisher(t)

    def kl(self, t: Tensor) -> Tensor:
        return DeadUnit(self.activation).kl(t)

    def gradient_bottom(self, t: Tensor) -> Tensor:
        """(n,): λ_min(G₁)."""
        return self._each(t, lambda h, delta: _bottom(delta).square() / self.samples)

    def activation_bottom(self, t: Tensor) -> Tensor:
        """(n,): σ_min(H₁)."""
        return self._each(t, lambda h, delta: _bottom(h))

    def weights(self, t: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """W₁ (hidden, inputs) and W₂ (inputs, hidden) at t."""
        W1, W2, _ = self.draw(device)
        W1[-1], W2[:, -1] = t * W1[-1] / W1[-1].norm(), t * W2[:, -1] / W2[:, -1].norm()
        return W1, W2

    def _each(self, t: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`read` of H₁ and δ₁ at every t."""
        kind, x = activation(self.activation), self.draw(t.device)[2]
        results = []
        for value in points(t).tolist():
            W1, W2 = self.weights(value, t.device)
            z = x @ W1.mT
            h = kind.function(z)
            results.append(read(h, (h @ W2.mT - x) @ W2 * kind.derivative(z)))
        return torch.stack(results)

    def draw(self, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """W₁, W₂ with entries of variance 1 / fan-in, and the inputs; the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((self.hidden, self.inputs), (self.inputs, self.hidden), (self.samples, self.inputs))
        W1, W2, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return (W1 / self.inputs**0.5).to(device), (W2 / self.hidden**0.5).to(device), x.to(device)


def _bottom(rows: Tensor) -> Tensor:
    """The smallest singular value."""
    return torch.linalg.svdvals(rows)[-1]
