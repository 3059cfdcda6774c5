"""Translation gauges: θ → θ + a, and the two of them that softmax cross-entropy has.

Statement. Cross-entropy does not see a constant added to all logits of a sample, so that for C classes

    CEShiftBias       b → b + c 1         b (C,),    c a number
    CEShiftRowShift   W → W + 1 cᵀ        W (C, d),  c (d,)

leave the loss alone. With g the gradient, or any displacement,

    g_v = mean of g over the classes      vertical, collapsed: one number for each orbit dimension
    g_h = g - 1 g_v                       horizontal

The gradient is the same all along the orbit, and its g_v is zero up to rounding. The invariants are θ_h.

Symbols and shapes. `collapse` takes the gauge's tensors to vertical coordinates, `spread` takes these back to
tensors that broadcast against the gauge's: vertical part = spread(collapse(θ)). Both are linear.

Cost: one pass over the tensors each.

Source: "Dead Directions: Geometric Singular Learning" section 11.1, gauges CEShiftBias and CEShiftRowShift.
That plain Adam is equivariant under translations (its state never sees the shift) and that what it breaks
is horizontality, is our correction to the paper: Adam's step has a mean over the classes although its
gradient has none.

Limits. A logit cap, or a head that is also the embedding, breaks the row shift: `residual` says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge, Parameters, find


class Translation(Gauge):
    """A gauge that adds; its projections are the same everywhere."""

    @abstractmethod
    def collapse(self, tensors: Sequence[Tensor]) -> Tensor:
        """The vertical coordinates of displacements, in the order of the names."""

    @abstractmethod
    def spread(self, coordinates: Tensor) -> list[Tensor]:
        """The displacements with these vertical coordinates, up to broadcasting."""

    def element(self, parameters: Parameters, generator: torch.Generator | None = None) -> Tensor:
        tensors = find(self, parameters)
        noise = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in tensors]
        coordinates = self.collapse(noise)
        return coordinates / coordinates.square().mean().sqrt()

    def act(self, parameters: Parameters, element: Tensor) -> dict[str, Tensor]:
        moves = zip(self.names, find(self, parameters), self.spread(element), strict=True)
        return {name: tensor + move for name, tensor, move in moves}

    def vertical(self, parameters: Parameters, vectors: Parameters) -> dict[str, Tensor]:
        tensors = find(self, vectors)
        moves = zip(self.names, tensors, self.spread(self.collapse(tensors)), strict=True)
        return {name: move.expand_as(tensor) for name, tensor, move in moves}

    def invariants(self, parameters: Parameters) -> dict[str, Tensor]:
        return self.horizontal(parameters, parameters)

    def drift(self, before: Parameters, after: Parameters) -> float:
        moved = {name: after[name] - before[name] for name in self.names}
        along = self.vertical(before, moved)
        return torch.stack([tensor.norm() for tensor in along.values()]).norm().item()


class _Shift(Translation):
    """The same constant on all classes; the classes are dimension 0."""

    @property
    def up_to_softmax(self) -> bool:
        return True

    def collapse(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].mean(0)

    def spread(self, coordinates: Tensor) -> list[Tensor]:
        return [coordinates.unsqueeze(0)]

    def _check_dim(self, parameters: Parameters, dim: int) -> None:
        (tensor,) = find(self, parameters)
        if tensor.dim() != dim or tensor.shape[0] < 2:
            raise OptimError(
                f"{self} needs {dim} dimension{'s' * (dim > 1)} with 2 classes or more in the first, "
                f"not shape {tuple(tensor.shape)}"
            )


@dataclass(frozen=True)
class CEShiftBias(_Shift):
    """b → b + c 1 on the bias of an output layer.

    >>> gauge = CEShiftBias("bias")
    >>> gauge.horizontal({}, {"bias": torch.tensor([1.0, 2.0, 6.0])})["bias"].tolist()
    [-2.0, -1.0, 3.0]
    """

    bias: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.bias,)

    def check(self, parameters: Parameters) -> None:
        self._check_dim(parameters, 1)


@dataclass(frozen=True)
class CEShiftRowShift(_Shift):
    """W → W + 1 cᵀ on an output matrix (classes, width)."""

    weight: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,)

    def check(self, parameters: Parameters) -> None:
        self._check_dim(parameters, 2)
