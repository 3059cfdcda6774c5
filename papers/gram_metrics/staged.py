"""Tangent kernel of a staged network: no gradient between stages, a readout at the end of each.

Statement. Stage k holds consecutive layers, ends with N_k neurons, reads out Y_k = mean of them, and descends
mean((Y_k - y)²), which reaches its own layers only. Let z_{l,k} be the conjugate field of layer l under
readout k (b = 1 at the end of stage k, carried back through all layers below, across the borders too). Then

    K_{kj} = Σ_{l in stage j} ⟨u_{l-1} u_{l-1}⟩_{N_k} ∘ ⟨z_{l,k} z_{l,j}⟩_{N_j},   j ≤ k        exact
    Δr_k = -(2η/M) Σ_{j≤k} K_{kj} r_j                                                  first order, O(η²)

where ⟨x y⟩_N divides by N. The blocks form a lower triangle:

    K_kk    the kernel of stage k as a network by itself, on its inputs
    K_kj    j < k: the stages below learn by their own losses, and so move the inputs of stage k

Only K_kk is under the control of stage k: the gradient of its loss is zero outside its layers. Its residual
follows K_kk alone, to first order, if the stages below stand still; while they learn, the other blocks are of
the same order in η, and a prediction without them is wrong at O(η). Derived here.

Symbols and shapes. K_{kj} (M, M), not symmetric for j < k; own parts (layers of the stage, M, M). Stages are
numbered from 1 in words and from 0 as positions. Cost: for s stages one forward, s backwards, and L M² N Gram
products for Q and s L M² N for the others, at most.

Source: Q, S and the layer-wise form are those of "Learning Dynamics Reveal a Hierarchy of Weight-Induced
Layerwise Gram Metrics" (C. Nordio), equation 172, which has one readout and no stages.
Limits. A chain of stages, one target for all of them, the mean as every readout, plain gradient descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from papers.gram_metrics.field_state import Fields, State, state_of
from papers.gram_metrics.kernel import Kernel, kernel
from papers.gram_metrics.network import FieldError, Network, weights_of


@dataclass(frozen=True)
class StagedKernel:
    """The blocks of a staged network."""

    own: tuple[Kernel, ...]
    """K_kk with its layer-wise parts, for each stage."""
    below: tuple[tuple[Tensor, ...], ...]
    """K_{kj} (M, M) for j < k: position k holds k blocks."""
    outputs: Tensor
    """Y_k (stages, M)."""

    def drift(self, targets: Tensor, eta: float) -> Tensor:
        """Δr_k (stages, M) of one step of all stages together, to first order."""
        r, M = self._residuals(targets), targets.shape[0]
        driven = [
            own.total @ r[k] + sum(K @ r[j] for j, K in enumerate(self.below[k]))
            for k, own in enumerate(self.own)
        ]
        return -(2 * eta / M) * torch.stack(driven)

    def own_drift(self, targets: Tensor, eta: float) -> Tensor:
        """Δr_k (stages, M) if stage k alone learns, to first order."""
        r = self._residuals(targets)
        return torch.stack([own.drift(r[k], eta).sum(0) for k, own in enumerate(self.own)])

    def _residuals(self, targets: Tensor) -> Tensor:
        M = self.outputs.shape[1]
        if targets.shape != (M,):
            shape = tuple(targets.shape)
            raise FieldError(setting="targets", given=shape, allowed=f"({M},): every stage has the same")
        return self.outputs - targets


def staged_kernel(network: Network, inputs: Tensor, stages: Sequence[int]) -> StagedKernel:
    """All blocks, for stages of so many layers each.

    >>> K = staged_kernel([torch.eye(2), torch.eye(2)], torch.tensor([[1.0, 2.0]]), [1, 1])
    >>> [own.total.tolist() for own in K.own], K.below[1][0].tolist(), K.outputs.tolist()
    ([[[2.5]], [[2.5]]], [[2.5]], [[1.5], [1.5]])
    """
    weights = weights_of(network)
    spans = _spans(stages, len(weights))
    state = state_of(weights, inputs)
    conjugates = [_carried_back(weights, state, stop) for _, stop in spans]
    own, below = [], []
    for k, (start, stop) in enumerate(spans):
        own.append(kernel(weights[start:stop], state.u[start]))
        blocks = [_block(state, span, conjugates[k], conjugates[j]) for j, span in enumerate(spans[:k])]
        below.append(tuple(blocks))
    outputs = torch.stack([state.u[stop].mean(-1) for _, stop in spans])
    return StagedKernel(tuple(own), tuple(below), outputs)


def _spans(stages: Sequence[int], depth: int) -> list[tuple[int, int]]:
    """Stage k has the layers start + 1, ..., stop."""
    if not stages or min(stages) < 1 or sum(stages) != depth:
        raise FieldError(
            setting="stages", given=list(stages), allowed=f"at least 1 layer each, {depth} together"
        )
    spans, start = [], 0
    for size in stages:
        spans.append((start, start + size))
        start += size
    return spans


def _carried_back(weights: tuple[Tensor, ...], state: State, last: int) -> Fields:
    """z_l for l = 1..last under a readout at layer `last`."""
    z = {last: state.a[last].to(state.v[last].dtype)}
    for layer in range(last - 1, 0, -1):
        z[layer] = state.a[layer] * (z[layer + 1] @ weights[layer])
    return z


def _block(state: State, span: tuple[int, int], reader: Fields, learner: Fields) -> Tensor:
    """K_{kj}: how the steps of stage j, over its span, move readout k."""
    start, stop = span
    widths = reader[max(reader)].shape[1] * learner[max(learner)].shape[1]
    parts = [
        (state.u[layer - 1] @ state.u[layer - 1].T) * (reader[layer] @ learner[layer].T)
        for layer in range(start + 1, stop + 1)
    ]
    return torch.stack(parts).sum(0) / widths
