"""DDCMomentum and DDCMuon: momentum SGD and Muon's orthogonal step on invariant components.

Statement. The split of `split.py` gives invariant components y; a base makes steps of them:

    DDCMomentum   B ← μ B + y,               Δy = -η B
    DDCMuon       B ← μ B + (1 - μ) y,       U = μ B + (1 - μ) y,       Δy = -η s O(U)

with O(U) the orthogonal factor of a matrix by K steps of Newton-Schulz, X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X
from X = U / ‖U‖_F, and s = √max(1, rows/cols). A component that is no matrix (a bias, a gain, a radial
number) counts as one column: O(U) is about U / ‖U‖ and s = √numel, so that its coordinates move by about η.
Both are equivariant for the reason that DDCAdam is: nothing that they see depends on the place on the orbit.
Uncovered parameters get the base's step on their own gradients.

With momentum 0 the first is a step of gradient flow for the metric Σ_b ‖X_b‖² / n_b², which the group keeps
(the vertical part of the gradient is zero up to rounding). Plain SGD flows under the Euclidean metric, which
a rescaling does not keep.

Symbols: η lr, μ momentum, B a buffer of the component's shape, (a, b, c) = `COEFFICIENTS`, K = `NS_STEPS`.

Cost: one buffer; for Muon 6 K m² n flops for a matrix (m, n), m ≤ n, more. Newton-Schulz runs in the
component's own dtype, one matrix after another: bfloat16, the usual choice, would break equivariance, because
its rounding hides the group's.

Source: "Dead Directions: Geometric Singular Learning" section 11 names the family; "Muon: An optimizer for
hidden layers in neural networks" (K. Jordan et al.) the step. Their combination is ours.

Limits: the vertical part is frozen or sgd. Embeddings belong to another optimizer than Muon. Muon's step does
not shrink with the gradient: once a run circles a minimum, rounding decides its direction, and two runs from
one orbit part by about a step (in our measurement 1e-15 after 60 steps, 6e-3 after 200).
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge
from topograd.optim.lifted import Group, LiftedOptimizer
from topograd.optim.split import Slot

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
_TINY = 1e-30


class _Conditioned(LiftedOptimizer):
    """A base with one buffer for each component."""

    base = ""

    def __init__(
        self,
        params: ParamsT,
        gauges: Iterable[Gauge] = (),
        lr: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        vertical: Literal["frozen", "sgd"] = "frozen",
        reproject: bool = True,
        retract: bool = False,
        rms: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise OptimError(setting="momentum", given=momentum, allowed="at least 0 and below 1")
        ways = {"vertical": vertical, "reproject": reproject, "retract": retract, "rms": rms}
        super().__init__(
            params, gauges, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **ways}
        )

    @abstractmethod
    def _direction(self, buffers: list[Tensor], components: list[Tensor], momentum: float) -> list[Tensor]:
        """Take the components into the buffers; the step for η = 1."""

    def _advance(self, slots: Sequence[Slot], components: list[Tensor], group: Group) -> list[Tensor]:
        buffers = []
        for (parameter, prefix), component in zip(slots, components, strict=True):
            state, name = self.state[parameter], f"{prefix}momentum_buffer"
            if name not in state:
                state[name] = torch.zeros_like(component)
            buffers.append(state[name])
        steps = self._direction(buffers, components, group["momentum"])
        return list(torch._foreach_mul(steps, -group["lr"]))

    def _plain(self, parameters: list[Tensor], group: Group) -> None:
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moves = self._advance([(parameter, "") for parameter in parameters], gradients, group)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, moves)


class DDCMomentum(_Conditioned):
    """SGD with momentum on invariant components."""

    def _direction(self, buffers: list[Tensor], components: list[Tensor], momentum: float) -> list[Tensor]:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, components)
        return buffers


class DDCMuon(_Conditioned):
    """Muon's orthogonal step on invariant components."""

    def _direction(self, buffers: list[Tensor], components: list[Tensor], momentum: float) -> list[Tensor]:
        torch._foreach_lerp_(buffers, components, 1 - momentum)
        ahead = torch._foreach_lerp(components, buffers, momentum)
        return [orthogonal_step(tensor) for tensor in ahead]


def orthogonal_step(tensor: Tensor) -> Tensor:
    """s O(U), in the shape of U; kernels are matrices of their flattened inputs, vectors are one column.

    >>> small, large = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    >>> torch.equal(orthogonal_step(small), orthogonal_step(large))
    True
    """
    matrix = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    rows, cols = matrix.shape
    X = matrix if rows <= cols else matrix.T
    X = X / torch.linalg.matrix_norm(X).clamp_min(_TINY)
    a, b, c = COEFFICIENTS
    for _ in range(NS_STEPS):
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return math.sqrt(max(1, rows / cols)) * (X if rows <= cols else X.T).reshape(tensor.shape)
