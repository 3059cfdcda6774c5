"""Soft boundaries, learned with the weights and hardened by a falling temperature.

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

Expectations. Let there be a boundary after layer i with probability 1 - λ_i, independently, i = 1..L-1. With
P_i(m) the probability of m boundaries after layers 1..i,

    P_0 = (1, 0, ...),        P_i(m) = λ_i P_{i-1}(m) + (1 - λ_i) P_{i-1}(m - 1)
    d̂_k = E[d_k] = Σ_{i=0}^{L-1} P_i(k)                  layer i+1 is in stage k after k boundaries
    R_stage = Σ_{k<K} max(0, d_min - d̂_k)²                                                   (eq. 32)

A stage that does not exist counts with depth 0. So the sum over k goes to the number K of stages that are
wanted; the paper leaves it open, and over all L it would punish every partition of fewer stages.

    N = Σ_{b-a ≥ d_min} (1-λ_a) (1-λ_b) Π_{a<i<b} λ_i - Π_i λ_i,      λ_0 = λ_L = 0,      Û = N / ⌊L/d_min⌋

is the expectation of `utility.structural_capability`. All is differentiable in λ, and exact at a vertex.

Symbols and shapes. a, λ (L-1,); d̂ (K,); CE (L,) in nats; K `stages`, d_min `min_depth`, β `coupling`,
γ `length`, η `capability`. Cost: a step of backprop, and a vocabulary projection for every layer instead of
one; O(L K) for the depths, O(L²) for the capability.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§9.2-9.3 (eqs. 26-29), §10.2.1 (eqs. 31-32), §10.7 (Experiment D: the count as a constraint, also with U_cap);
Platt and Barr, "Constrained differential optimization", for μ and the damping. The recursion of d̂ is derived
here.
Limits. Under the constraint only differences of the CE(z_i, y) count, whatever boundaries do to the weights.
Where deeper layers predict better, boundaries drift to the end of the stack without η, which would be the
collapse that the paper predicts; in our runs they did not (study `experiment-d`). A small model (six
layers of width 32, 200 steps) has losses within 0.03 nats of each other at every layer, and noise decides.
R_stage sees expected depths, and a mixture of partitions can satisfy it (half (3, 1) and half (1, 2, 1) has
d̂_0 = 2, yet neither begins with a stage of 2): then some λ stay between 0 and 1 in the cold.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from topograd.data import Prepared
from topograd.errors import ConfigError
from topograd.runs.checkpoint import Checkpoint
from topograd.runs.config import SearchConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.search_config import SoftConfig
from topograd.runs.topology_config import TopologyConfig
from topograd.search.change_topology import change_topology, check_searchable
from topograd.search.dynamic import best_partition, stage_counts
from topograd.topology.composition import Composition
from topograd.topology.plan import Plan
from topograd.training.runs import RunTask

SATURATION = 10.0
"""|a / T| counts up to this: every layer keeps a loss, and a boundary that has hardened can still open."""
HEAD_RANK = 4
"""Rank of the layers' heads where the settings name none."""


def soft_run(config: TrainConfig, soft: SoftConfig) -> TrainConfig:
    """The settings of a run that learns its boundaries: a head of low rank at every layer, and every
    boundary equally likely, so that their expected number is right at first."""
    layers, width = config.model.layers, config.model.width
    stage_counts(layers, soft.stages, 1, None, soft.min_depth)
    if layers < 2:
        raise ConfigError(
            setting="layers", given=layers, allowed="at least 2, to have a place for a boundary"
        )
    open_ = 1 - min(max((soft.stages - 1) / (layers - 1), 0.01), 0.99)
    table = TopologyConfig(
        graph="soft",
        grad_scales=(open_,) * (layers - 1),
        heads="low-rank",
        head_rank=getattr(config.model, "head_rank", None) or min(HEAD_RANK, width),
        reduction="sum",
    )
    return config.changed(topology=table, search=SearchConfig(kind="soft", soft=soft))


class SoftBoundaries:
    """The logits a, the multiplier μ, and their step; `grad_scales` are λ (L-1,) at first."""

    def __init__(self, grad_scales: Sequence[float], config: SoftConfig, steps: int) -> None:
        self.layers, self.config, self.steps = len(grad_scales) + 1, config, steps
        inside = [min(max(lam, 0.01), 0.99) for lam in grad_scales]
        start = [config.hot * math.log(lam / (1 - lam)) for lam in inside]
        self.logits = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        self.multiplier = 0.0
        self.ahead = 0.0
        """ν, the part of μ that is learned."""
        self._optimizer = torch.optim.Adam([self.logits], lr=config.travel / steps)

    def grad_scales(self, progress: float) -> Tensor:
        """λ (L-1,) at `progress` from 0 to 1, with its graph."""
        heat = self.logits / self.config.temperature(progress)
        return torch.sigmoid(heat.clamp(-SATURATION, SATURATION))

    def update(self, losses: Tensor, progress: float) -> None:
        """One step of a and μ, from the layers' losses (L,)."""
        config = self.config
        lam = self.grad_scales(progress).detach().requires_grad_()
        known = losses[:-1].detach().to(lam)
        rest = config.coupling * lam.sum() + config.length * length_penalty(
            lam, config.stages, config.min_depth
        )
        if config.capability:
            rest = rest - config.capability * expected_capability(lam, config.min_depth)
        value = ((1 - lam) * known).sum() + rest
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
        open_ = [*self.grad_scales(1.0).tolist(), 0.0]  # layer L always ends a stage
        costs = {(a, b): open_[b - 1] for b in range(1, self.layers + 1) for a in range(b)}
        config = self.config
        best = best_partition(costs, self.layers, stages=config.stages, min_depth=config.min_depth)
        return best.composition

    def state(self) -> dict[str, Any]:
        """Everything that changes, as JSON keeps it exactly."""
        adam = self._optimizer.state.get(self.logits, {})
        return {
            "logits": self.logits.tolist(),
            "multiplier": self.multiplier,
            "ahead": self.ahead,
            "adam": {name: value.tolist() for name, value in adam.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        with torch.no_grad():
            self.logits.copy_(torch.tensor(state["logits"], dtype=torch.float64))
        self.multiplier, self.ahead = state["multiplier"], state["ahead"]
        dtypes = {"step": torch.float32}  # as torch counts
        self._optimizer.state[self.logits] = {
            name: torch.tensor(value, dtype=dtypes.get(name, torch.float64))
            for name, value in state["adam"].items()
        }


class SoftTask(RunTask):
    """A run whose boundaries are learned: a soft topology until its last step, and a chain from then on."""

    def __init__(self, run: Run, config: TrainConfig, data: Prepared) -> None:
        layers, soft = config.model.layers, config.search.soft
        hardened = config.topology.graph != "soft" and bool(run.store.names())
        if not hardened:
            check_searchable(config, "soft")
            stage_counts(layers, soft.stages, 1, None, soft.min_depth)
        super().__init__(run, config, data)
        start = (0.5,) * (layers - 1) if hardened else config.topology.grad_scales
        self.boundaries = SoftBoundaries(start, soft, config.steps)
        self.losses: list[float] = []
        """The last step's loss of every layer, in nats."""

    def load_extra(self, loaded: Checkpoint) -> None:
        super().load_extra(loaded)
        saved = loaded.extra["search"]
        self.boundaries.restore(saved)
        self.losses = saved["losses"]

    def extra_state(self) -> dict[str, Any]:
        search = self.boundaries.state() | {"losses": self.losses}
        return super().extra_state() | {"topology": asdict(self.config.topology), "search": search}

    def current_plan(self, step: int) -> Plan:
        lam = self.boundaries.grad_scales(self._progress(step)).tolist()
        self.config = self.config.changed(grad_scales=tuple(lam))
        self.plan = Plan.of(self.config.build_topology(), len(self.stack.layers))
        return self.plan

    def after_step(self, step: int) -> None:
        super().after_step(step)
        progress = self._progress(step - 1)
        self.losses = self.last.losses.tolist()
        self.boundaries.update(self.last.losses, progress)
        lam = self.boundaries.grad_scales(progress).tolist()
        self.run.log({"kind": "boundaries", "step": step, "grad_scales": lam})

    def finish(self) -> None:
        """Harden; stage k keeps the head of its last layer."""
        composition = self.boundaries.harden()
        table = replace(self.config.topology, graph="chain", partition=str(composition), grad_scales=())
        change_topology(self, table, [end - 1 for end in composition.terminals])

    def _progress(self, step: int) -> float:
        return step / max(self.config.steps - 1, 1)


def soft_outcome(config: TrainConfig, extra: dict[str, Any]) -> dict[str, Any]:
    """The boundaries in a checkpoint of a soft run; the partition is None until they harden."""
    table = config.topology
    boundaries = SoftBoundaries((0.5,) * (config.model.layers - 1), config.search.soft, config.steps)
    boundaries.restore(extra["search"])
    lam = boundaries.grad_scales(1.0).detach()
    hard = table.graph == "chain"
    return {
        "partition": list(Composition.parse(table.partition).parts) if hard else None,
        "grad_scales": lam.tolist(),
        "expected_boundaries": expected_boundaries(lam).item(),
        "multiplier": boundaries.multiplier,
        "losses": extra["search"]["losses"],
    }


def expected_depths(grad_scales: Tensor, stages: int) -> Tensor:
    """d̂ (K,) of the first `stages` stages, from λ (L-1,).

    >>> expected_depths(torch.tensor([1.0, 0.0, 1.0]), 3).tolist()
    [2.0, 2.0, 0.0]
    """
    reached = grad_scales.new_zeros(stages)
    reached = torch.cat((reached.new_ones(1), reached[1:]))
    depths = reached
    for lam in grad_scales:
        reached = lam * reached + (1 - lam) * torch.cat((reached.new_zeros(1), reached[:-1]))
        depths = depths + reached
    return depths


def length_penalty(grad_scales: Tensor, stages: int, min_depth: float) -> Tensor:
    """R_stage (eq. 32), a scalar."""
    return (min_depth - expected_depths(grad_scales, stages)).clamp(min=0).square().sum()


def expected_boundaries(grad_scales: Tensor) -> Tensor:
    """Σ (1 - λ_i), a scalar."""
    return (1 - grad_scales).sum()


def expected_capability(grad_scales: Tensor, min_depth: int) -> Tensor:
    """Û, a scalar from 0 to 1; 0 where L layers hold no stage of `min_depth`."""
    layers = len(grad_scales) + 1
    if layers < min_depth:
        return grad_scales.new_zeros(())
    one = grad_scales.new_ones(1)
    ends = torch.cat((one, 1 - grad_scales, one))  # the probability of a boundary at 0..L
    total = -grad_scales.prod()  # the one partition without a boundary
    for a in range(layers - min_depth + 1):
        inside = torch.cat((one, grad_scales[a:].cumprod(0)))  # none after a+1..b-1, for b = a+1..L
        stops = ends[a + 1 :] * inside
        total = total + ends[a] * stops[min_depth - 1 :].sum()
    return total / (layers // min_depth)
