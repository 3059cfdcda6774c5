"""What a soft partition is on average: depths of its stages, number of boundaries, capability.

Statement. Let there be a boundary after layer i with probability 1 - λ_i, independently, i = 1..L-1. With
P_i(m) the probability of m boundaries after layers 1..i,

    P_0 = (1, 0, ...),        P_i(m) = λ_i P_{i-1}(m) + (1 - λ_i) P_{i-1}(m - 1)
    d̂_k = E[d_k] = Σ_{i=0}^{L-1} P_i(k)                  layer i+1 is in stage k after k boundaries
    R_stage = Σ_{k<K} max(0, d_min - d̂_k)²                                                   (eq. 32)

A stage that does not exist counts with depth 0. So the sum over k goes to the number K of stages that are
wanted; the paper leaves it open, and over all L it would punish every partition of fewer stages.

    N = Σ_{b-a ≥ d_min} (1-λ_a) (1-λ_b) Π_{a<i<b} λ_i - Π_i λ_i,      λ_0 = λ_L = 0,      Û = N / ⌊L/d_min⌋

is the expectation of `utility.structural_capability`. All is differentiable in λ, and exact at a vertex.

Symbols and shapes. λ (L-1,), d̂ (K,). Cost: O(L K) for the depths, O(L²) for the capability.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.2.1; the recursion is derived here.
Limits. d̂_k is an average over partitions: half (3, 1) and half (1, 2, 1) has d̂_0 = 2, yet
neither begins with a stage of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_depths(transmissivities: Tensor, stages: int) -> Tensor:
    """d̂ (K,) of the first `stages` stages, from λ (L-1,).

    >>> expected_depths(torch.tensor([1.0, 0.0, 1.0]), 3).tolist()
    [2.0, 2.0, 0.0]
    """
    reached = transmissivities.new_zeros(stages)
    reached = torch.cat((reached.new_ones(1), reached[1:]))
    depths = reached
    for lam in transmissivities:
        reached = lam * reached + (1 - lam) * torch.cat((reached.new_zeros(1), reached[:-1]))
        depths = depths + reached
    return depths


def length_penalty(transmissivities: Tensor, stages: int, min_depth: float) -> Tensor:
    """R_stage (eq. 32), a scalar."""
    return (min_depth - expected_depths(transmissivities, stages)).clamp(min=0).square().sum()


def expected_boundaries(transmissivities: Tensor) -> Tensor:
    """Σ (1 - λ_i), a scalar."""
    return (1 - transmissivities).sum()


def expected_capability(transmissivities: Tensor, min_depth: int) -> Tensor:
    """Û, a scalar from 0 to 1; 0 where L layers hold no stage of `min_depth`."""
    layers = len(transmissivities) + 1
    if layers < min_depth:
        return transmissivities.new_zeros(())
    one = transmissivities.new_ones(1)
    ends = torch.cat((one, 1 - transmissivities, one))  # the probability of a boundary at 0..L
    total = -transmissivities.prod()  # the one partition without a boundary
    for a in range(layers - min_depth + 1):
        inside = torch.cat((one, transmissivities[a:].cumprod(0)))  # none after a+1..b-1, for b = a+1..L
        stops = ends[a + 1 :] * inside
        total = total + ends[a] * stops[min_depth - 1 :].sum()
    return total / (layers // min_depth)
