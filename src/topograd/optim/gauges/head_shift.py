"""The gauge of a shared head with per-stage heads: (W + Δ, W_k - Δ).

Statement. Stage k says z_k = (W + W_k) x. For any Δ of the head's shape,

    W → W + Δ,   W_k → W_k - Δ   for every k = 1..K

changes no z_k: one joint translation of K + 1 tensors, with direction a = (1, -1, ..., -1), ‖a‖² = K + 1:

    g_v = (g_0 - Σ_k g_k) / (K + 1)          vertical, of the head's own shape
    g_h = g - (g_v, -g_v, ..., -g_v)

The gradient has g_0 = Σ_k g_k, so its g_v is zero. The invariants are θ_h; the sums W + W_k say the same.

With `rows`, every z_k may also shift by a constant under softmax cross-entropy: W_i → W_i + 1 c_iᵀ with a c_i
for each of the K + 1 tensors. The two projections commute, because one acts across tensors and the other on
the classes, so that the joint vertical part is the first plus the row means of what the first leaves. This is
the joint gauge of HeadShift and CEShiftRowShift, which share W.

Symbols and shapes. W, W_k (C, d). Vertical coordinates: g_v (C, d), and with `rows` the K + 1 row means
below it: (C + K + 1, d).

Cost: two passes over the heads. Source: "Stage-Partitioned Learning" remark 5.3 names the symmetry of one
stage; the joint form for K stages and its projections are derived here. The rest is as in "Dead Directions:
Geometric Singular Learning" section 11.1.

Limits. Full per-stage heads only: a low-rank W_k = U_k V_k cannot take every Δ. Name every stage's head: a
stage without one sees W alone, and Δ would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from topograd.errors import OptimError
from topograd.geometry.symmetries import collapse_heads, spread_heads
from topograd.optim.gauges.base import Parameters, distinct, find, names_of
from topograd.optim.gauges.translation import Translation


@dataclass(frozen=True)
class HeadShift(Translation):
    """(W + Δ, W_k - Δ), and with `rows` the row shift of every head as well.

    >>> import torch
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
                    f"{name!r} has {tuple(tensor.shape)}"
                )

    def collapse(self, tensors: Sequence[Tensor]) -> Tensor:
        return collapse_heads(tensors, self.rows)

    def spread(self, coordinates: Tensor) -> list[Tensor]:
        return spread_heads(coordinates, len(self.names), self.rows)
