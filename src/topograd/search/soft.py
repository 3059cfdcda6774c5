"""Boundaries that are learned with the weights, and harden as a temperature falls.

Statement. λ_i = sigmoid(a_i / T) after layer i, with T falling geometrically from T_0 to T_∞. Weights θ and
logits a descend, the multiplier μ ascends, on

    Σ_i τ_i CE(z_i, y) + β Σ_i λ_i + γ R_stage(λ) - η Û(λ) + μ g + (c/2) g²               (eqs. 29, 31)
    τ_i = 1 - λ_i,   τ_L = 1,   g = Σ_i (1 - λ_i) - (K - 1)

Forward values do not depend on λ. So the derivative of the soft loss by λ_i is -CE(z_i, y), the loss of layer
i itself, and the executor's losses are all that the boundaries need. Every layer is a stage of
`Topology.soft` with its own λ, and its head is a low-rank delta of the shared one. In the end the partition
is the vertex nearest to λ among those with K stages of at least d_min layers: the least Σ λ_i over its
boundaries, found by `dynamic.best_partition`; stage k keeps the head of its last layer.

a moves along its natural gradient, dL/dλ (a boundary has Fisher information λ (1 - λ)/T², λ has the slope
λ (1 - λ)/T), by Adam: the plain one vanishes where λ is near 0 or 1, and the count could not be mended there.
Under the constraint a common level of the losses means nothing, and it falls fast as the model learns; so μ
is the mean of dL/dλ now plus ν, and ν is what ascends. The term in g² damps the see-saw of λ and ν and moves
no stationary point.

Symbols and shapes. a, λ (L-1,); CE (L,) in nats; K `stages`, d_min `min_depth`, β `coupling`, γ `length`,
η `capability`. Cost: a step of backprop, and a vocabulary projection for every layer instead of one.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§9.2-9.3 (eqs. 26-29), §10.2.1 (eqs. 31-32), §10.7 (Experiment D: the count as a constraint, also with U_cap);
Platt and Barr, "Constrained differential optimization", for μ and the damping.
Limits. Under the constraint only differences of the CE(z_i, y) count, whatever boundaries do to the weights.
Where deeper layers predict better, boundaries drift to the end of the stack without η, which would be the
collapse that the paper predicts; in our runs they did not (`studies/experiment_d.py`). A small model (six
layers of width 32, 200 steps) has losses within 0.03 nats of each other at every layer, and noise decides.
R_stage sees expected depths, and a mixture of partitions can satisfy it: then some λ stay between 0 and 1 in
the cold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig
from topograd.search.carry import carry_heads
from topograd.search.dynamic import best_partition, stage_counts
from topograd.search.expectation import expected_boundaries, expected_capability, length_penalty
from topograd.search.learner import Learner
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration, Heads
from topograd.topology.dag import Topology

SATURATION = 10.0
"""|a / T| counts up to this: every layer keeps a loss, and a boundary that has hardened can still open."""
HEAD_RANK = 4
"""Rank of the layers' heads where the settings name none."""
OnSoftStep = Callable[[int, int, list[float]], None]
"""Called after each step with (step, steps, transmissivities)."""


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    """How boundaries are learned."""

    stages: int = 2
    """K: there shall be K - 1 boundaries."""
    min_depth: int = 1
    """d_min: the least number of layers in a stage."""
    hot: float = 2.0
    """T_0, the temperature at first."""
    cold: float = 0.1
    """T_∞, the temperature in the end."""
    travel: float = 15.0
    """How far a logit may go in all: Adam's learning rate is this over the number of steps."""
    multiplier_travel: float = 5.0
    """How far ν goes in all when the count is wrong by one throughout."""
    damping: float = 1.0
    """c, the weight of half the squared error of the count."""
    coupling: float = 0.0
    """β: the cost of gradient that crosses."""
    length: float = 1.0
    """γ: the cost of stages that are too short."""
    capability: float = 0.0
    """η: the worth of stages of at least `min_depth` layers; 0 looks at the losses alone."""

    def __post_init__(self) -> None:
        if not 0 < self.cold <= self.hot < math.inf:
            raise ConfigError(f"the temperature goes from {self.hot} to {self.cold}; let it fall, above 0")
        if self.capability and self.min_depth < 2:
            raise ConfigError(
                f"capability with a least depth of {self.min_depth} rewards every boundary; "
                "set min_depth to 2 or more"
            )
        for name in ("travel", "multiplier_travel", "damping", "coupling", "length", "capability"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")

    def temperature(self, progress: float) -> float:
        """T at `progress` from 0 to 1."""
        return self.hot * (self.cold / self.hot) ** progress


@dataclass(frozen=True)
class SoftResult:
    """The partition that was found, and how sure it is."""

    composition: Composition
    transmissivities: list[float]
    multiplier: float
    expected_boundaries: float
    losses: list[float]
    """The last step's loss of every layer, in nats."""
    readings: dict[str, Any]
    """The hard partition with the weights as they are: `training.evaluation.evaluate`."""


class SoftBoundaries:
    """The logits a, the multiplier μ, and their step."""

    def __init__(self, layers: int, config: SoftConfig, steps: int) -> None:
        stage_counts(layers, config.stages, 1, None, config.min_depth)
        if layers < 2:
            raise ConfigError("one layer has no place for a boundary; use at least 2 layers")
        self.layers, self.config, self.steps = layers, config, steps
        share = min(max((config.stages - 1) / (layers - 1), 0.01), 0.99)
        start = config.hot * math.log((1 - share) / share)
        self.logits = torch.full((layers - 1,), start, dtype=torch.float64, requires_grad=True)
        self.multiplier = 0.0
        self.ahead = 0.0
        """ν, the part of μ that is learned."""
        self._optimizer = torch.optim.Adam([self.logits], lr=config.travel / steps)

    def transmissivities(self, progress: float) -> Tensor:
        """λ (L-1,) at `progress` from 0 to 1, with its graph."""
        heat = self.logits / self.config.temperature(progress)
        return torch.sigmoid(heat.clamp(-SATURATION, SATURATION))

    def topology(self, progress: float) -> Topology:
        """The stage DAG of one step: a soft boundary after every layer, the losses summed (eq. 29)."""
        soft = Topology.soft(self.transmissivities(progress).tolist(), heads="per-stage")
        return replace(soft, reduction="sum")

    def update(self, losses: Tensor, progress: float) -> None:
        """One step of a and μ, from the layers' losses (L,)."""
        config = self.config
        lam = self.transmissivities(progress).detach().requires_grad_()
        heard = losses[:-1].detach().to(lam)
        rest = config.coupling * lam.sum() + config.length * length_penalty(
            lam, config.stages, config.min_depth
        )
        if config.capability:
            rest = rest - config.capability * expected_capability(lam, config.min_depth)
        value = ((1 - lam) * heard).sum() + rest
        error = expected_boundaries(lam) - (config.stages - 1)
        (slope,) = torch.autograd.grad(value, lam)
        self.multiplier = self.ahead + slope.mean().item()
        # dg/dλ = -1; this is the natural gradient in a, times T
        self.logits.grad = slope - self.multiplier - config.damping * error.detach()
        self._optimizer.step()
        with torch.no_grad():
            bound = SATURATION * config.temperature(progress)
            self.logits.clamp_(-bound, bound)
        self.ahead += config.multiplier_travel / self.steps * error.item()

    def harden(self) -> Composition:
        """The vertex nearest to λ at the coldest, among those with K stages of at least d_min layers."""
        open_ = [*self.transmissivities(1.0).tolist(), 0.0]  # layer L always ends a stage
        costs = {(a, b): open_[b - 1] for b in range(1, self.layers + 1) for a in range(b)}
        config = self.config
        found = best_partition(costs, self.layers, stages=config.stages, min_depth=config.min_depth)
        return found.composition


def learn_boundaries(train: TrainConfig, config: SoftConfig, on_step: OnSoftStep | None = None) -> SoftResult:
    """Train a model with soft boundaries for `train.steps`, harden it, and read the partition.

    Of `train` the topology is not used: the boundaries are what is looked for.
    """
    boundaries = SoftBoundaries(train.model.layers, config, train.steps)
    rank = train.model.head_rank or min(HEAD_RANK, train.model.width)
    train = replace(train, model=replace(train.model, head_rank=rank))
    learner = Learner(train, boundaries.topology(0.0))
    losses = torch.empty(0)
    for step in range(train.steps):
        progress = step / max(train.steps - 1, 1)
        losses = learner.advance(boundaries.topology(progress)).cpu()
        boundaries.update(losses, progress)
        if on_step:
            on_step(step + 1, train.steps, boundaries.transmissivities(progress).tolist())
    composition = boundaries.harden()
    carry_heads(learner.stack, [end - 1 for end in composition.terminals], learner.optimizers)
    topology = Topology.chain(Configuration(composition, Heads.PER_STAGE))
    lam = boundaries.transmissivities(1.0).detach()
    return SoftResult(
        composition,
        lam.tolist(),
        boundaries.multiplier,
        expected_boundaries(lam).item(),
        losses.tolist(),
        learner.read(topology),
    )
