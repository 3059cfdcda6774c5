"""Eigenbases of K-FAC factors with corrected eigenvalues (EK-FAC), and products with the inverse Fisher.

Statement. With A = Q_A diag(a) Q_Aᵀ and G = Q_G diag(g) Q_Gᵀ of a layer (`factors.py`), K-FAC takes g_i a_j
for the Fisher's diagonal in the basis Q_G ⊗ Q_A. The diagonal itself is

    S_ij = (1/N) Σ_m (Q_Gᵀ δ_m)_i² (Q_Aᵀ h_m)_j²

which makes the approximation the best one in that basis. Products with a damped inverse and inner products:

    F⁻¹ V ≈ Q_G [ (Q_Gᵀ V Q_A) / (S + γ) ] Q_Aᵀ,        ⟨U, V⟩ = Σ (Q_Gᵀ U Q_A) (Q_Gᵀ V Q_A) / (S + γ).

Symbols and shapes. Q_A (d_in, d_in), Q_G (d_out, d_out), S and V (d_out, d_in), float64; rows m and terms N
as in `factors.py`. Cost: two eigendecompositions a layer, and a second pass over the batches with
M d_in d_out multiply-adds more.
Source: George, Laurent, Bouthillier, Ballas and Vincent, "Fast Approximate Natural Gradient Descent in a
Kronecker-factored Eigenbasis"; influence by such products after Grosse et al., "Studying Large Language Model
Generalization with Influence Functions".
Limits. Rows count as independent ("expand"). A layer whose calls do not all get a gradient is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, Factors, Outputs, reduce_batches
from topograd.geometry.layers import Call
from topograd.geometry.losses import Loss, OwnLoss, loss_named


@dataclass(frozen=True)
class Eigenbasis:
    """Of one layer."""

    inputs: Tensor
    """Q_A, columns by rising eigenvalue."""
    gradients: Tensor
    """Q_G"""
    scales: Tensor
    """S"""

    def solve(self, direction: Tensor, damping: float) -> Tensor:
        """(F + γ)⁻¹ of a matrix (d_out, d_in)."""
        turned = self._turned(direction) / (self.scales + _positive(damping))
        return self.gradients @ turned @ self.inputs.mT

    def inner(self, first: Tensor, second: Tensor, damping: float) -> float:
        """⟨first, (F + γ)⁻¹ second⟩."""
        weights = self.scales + _positive(damping)
        return float((self._turned(first) * self._turned(second) / weights).sum())

    def _turned(self, direction: Tensor) -> Tensor:
        if direction.shape != self.scales.shape:
            given, allowed = tuple(direction.shape), f"{tuple(self.scales.shape)}, the layer's (d_out, d_in)"
            raise GeometryError(setting="direction", given=given, allowed=allowed)
        return self.gradients.mT @ direction.double() @ self.inputs


def eigenbases(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    factors: Factors,
    loss: str | Loss | OwnLoss = "cross-entropy",
    *,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Eigenbasis]:
    """The bases of the factors, with S of these batches (those of the factors, as a rule).

    >>> from topograd.geometry.factors import kfac_factors
    >>> _ = torch.manual_seed(0)
    >>> model, batch = nn.Sequential(nn.Linear(3, 2)), (torch.randn(50, 3), torch.randn(50, 2))
    >>> factors = kfac_factors(model, batch, "squared-error")
    >>> eigenbases(model, batch, factors, "squared-error")["0"].scales.shape
    torch.Size([2, 3])
    """
    turns = {
        name: (torch.linalg.eigh(one.A).eigenvectors, torch.linalg.eigh(one.G).eigenvectors)
        for name, one in factors.items()
    }
    seen = _Squares(turns)
    _, samples = reduce_batches(
        model, batches, seen, loss_named(loss), factors.fisher, outputs=outputs, generator=generator
    )
    missing = [name for name in turns if name not in seen.sums]
    if missing or seen.waiting():
        name = (missing or seen.waiting())[0]
        raise GeometryError(
            f"no gradient reaches all calls of {name}",
            setting="factors",
            given=name,
            remedy="give the batches and the loss that the factors were made with",
        )
    return {name: Eigenbasis(*turns[name], seen.sums[name] / samples) for name in turns}


class _Squares:
    """A reducer that pairs the rows h and δ of every call: gradients arrive in the reverse order of calls."""

    def __init__(self, turns: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._turns = turns
        self._inputs: dict[str, list[Tensor]] = {}
        self._arrived: dict[str, int] = {}
        self.sums: dict[str, Tensor] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None if layer in self._turns else "it has no factors"

    def see_inputs(self, layer: str, call: Call) -> None:
        if self._arrived.pop(layer, 0):  # the next forward pass
            self._inputs.pop(layer, None)
        rows = call.inputs(call.source.detach()).double()
        self._inputs.setdefault(layer, []).append((rows @ self._turns[layer][0]).square())

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        inputs, count = self._inputs[layer], self._arrived.get(layer, 0)
        squares = (rows.double() @ self._turns[layer][1]).square()
        product = squares.mT @ inputs[-1 - count % len(inputs)]
        self.sums[layer] = self.sums[layer] + product if layer in self.sums else product
        self._arrived[layer] = count + 1

    def waiting(self) -> list[str]:
        """Layers of which a call had no gradient."""
        return [name for name, rows in self._inputs.items() if self._arrived.get(name, 0) % len(rows)]


def _positive(damping: float) -> float:
    if not damping > 0:
        raise GeometryError(setting="damping", given=damping, allowed="above 0")
    return damping
