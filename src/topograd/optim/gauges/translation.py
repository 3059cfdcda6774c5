"""Translation gauges θ → θ + a: the two of softmax cross-entropy, and that of a shared head.

Statement. Cross-entropy does not see a constant added to all logits of a sample, so that for C classes

    CEShiftBias       b → b + c 1         b (C,),    c a number
    CEShiftRowShift   W → W + 1 cᵀ        W (C, d),  c (d,)

leave the loss alone. With g the gradient, or any displacement,

    g_v = mean of g over the classes      vertical, collapsed: one number for each orbit dimension
    g_h = g - 1 g_v                       horizontal

The gradient is the same all along the orbit, and its g_v is zero up to rounding. The invariants are θ_h.

HeadShift, of a shared head with per-stage heads. Stage k has z_k = (W + W_k) x. For any Δ of W's shape,

    W → W + Δ,   W_k → W_k - Δ   for every k = 1..K

changes no z_k: one joint translation of K + 1 tensors, with direction a = (1, -1, ..., -1), ‖a‖² = K + 1:

    g_v = (g_0 - Σ_k g_k) / (K + 1)          vertical, of the head's own shape
    g_h = g - (g_v, -g_v, ..., -g_v)

The sums W + W_k say the same as the invariants. With `rows`, every z_k may also shift by a constant under
softmax cross-entropy: W_i → W_i + 1 c_iᵀ with a c_i for each of the K + 1 tensors. The two projections
commute, because one acts across tensors and the other on the classes, so that the joint vertical part is the
first plus the row means of what the first leaves. This is the joint gauge of HeadShift and CEShiftRowShift,
which share W; its vertical coordinates are g_v (C, d) with the K + 1 row means below it.

Symbols and shapes. `collapse` takes the gauge's tensors to vertical coordinates, `spread` takes these back to
tensors that broadcast against the gauge's: vertical part = spread(collapse(θ)). Both are linear.

Cost: one pass over the tensors each.

Source: "Dead Directions: Geometric Singular Learning" section 11.1, gauges CEShiftBias and CEShiftRowShift.
That plain Adam is equivariant under translations (its state never sees the shift) and that what it breaks
is horizontality, is our correction to the paper: Adam's step has a mean over the classes although its
gradient has none. "Stage-Partitioned Learning" remark 5.3 names the symmetry of one stage's head; the joint
form for K stages and its projections are derived here.

Limits. A logit cap, or a head that is also the embedding, breaks the row shift: `residual` says so. Full
per-stage heads only: a low-rank W_k = U_k V_k cannot take every Δ. Name every stage's head: a stage without
one sees W alone, and Δ would show.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge, Parameters, distinct, find, names_of


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
                f"not shape {tuple(tensor.shape)}",
                setting="gauges",
                given=tuple(tensor.shape),
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


@dataclass(frozen=True)
class HeadShift(Translation):
    """(W + Δ, W_k - Δ), and with `rows` the row shift of every head as well.

    >>> gauge = HeadShift("head.weight", ["head.deltas.0.weight"])
    >>> one, five = torch.ones(2, 1), torch.full((2, 1), 5.0)
    >>> [tensor.tolist() for tensor in gauge.spread(gauge.collapse([one, five]))]
    [[[-2.0], [-2.0]], [[2.0], [2.0]]]
    """

    shared: str
    stages: Sequence[str]
    rows: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", names_of(self.stages))
        distinct(self, minimum=2)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shared, *self.stages)

    @property
    def up_to_softmax(self) -> bool:
        return self.rows

    def check(self, parameters: Parameters) -> None:
        shared, *stages = find(self, parameters)
        for name, tensor in zip(self.stages, stages, strict=True):
            if tensor.shape != shared.shape or shared.dim() != 2:
                raise OptimError(
                    f"{self} needs matrices of one shape: {self.shared!r} has {tuple(shared.shape)} and "
                    f"{name!r} has {tuple(tensor.shape)}",
                    setting="gauges",
                    given=name,
                )

    def collapse(self, tensors: Sequence[Tensor]) -> Tensor:
        shared, *stages = tensors
        across = shared.clone()
        for stage in stages:
            across -= stage
        across /= len(tensors)
        if not self.rows:
            return across
        mean = across.mean(0, keepdim=True)
        rest = [tensor.mean(0, keepdim=True) for tensor in tensors]
        return torch.cat([across, rest[0] - mean, *(row + mean for row in rest[1:])])

    def spread(self, coordinates: Tensor) -> list[Tensor]:
        classes = len(coordinates) - len(self.names) * self.rows
        across = coordinates[:classes]
        moves = [across] + [-across for _ in self.stages]
        if self.rows:
            moves = [move + row for move, row in zip(moves, coordinates[classes:], strict=True)]
        return moves
