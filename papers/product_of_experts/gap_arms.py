"""Ways to learn six layers in stages, between backprop and stages that hear nothing of one another.

Every arm has the partition 2,2,2 unless it says otherwise, one shared head unless it says otherwise, and
predicts by its last stage. What an arm changes is a point of the topology's space (`topology/dag.py`), the
same over a training or not, its size, and settings of the optimizer; so each is trained by the one executor.

    staged           λ = 0: no gradient crosses a border; or another λ
    hierarchical     λ = 1: a loss at every stage, all gradient
    next             λ = 1, and a loss is heard by its own stage and the one before it (`Topology.reach`)
    ×0.3             early losses weigh 0.3 of the last one's
    every 4th        early losses count a quarter of the tokens
    own heads        the stages share no head; at half the rate
    low-rank heads   one head and for each stage a change of rank 8
    decoders         early stages have one layer of their own before the head, or two
    overlapping      stages of three layers that share one with the next: two losses teach it
    residual         a stage corrects the sum of those before it, and all of them predict together
    λ 1 → 0          falls linearly over the first half; λ last quarter: 1 there, 0 before
    late             backprop for the first half, stages after it
    taught           early stages follow the last one (a second forward), or an average of past weights
    rates            stages 1, 2, 3 learn at 0.7, 1 and 1.4 of the rates
    warmdown 0.9     rates fall over nine tenths of the steps instead of half
    batch × 2        twice the rows, in memory that stages do not need
    width × 4/3      wider layers, in that memory
    2 × steps        twice as long, beside backprop that is: what a larger budget does to the gap
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from topograd.runs.config import OptimizerConfig, StageOptimizer
from topograd.topology.dag import Topology

LAYERS = 6
PARTITION = "2,2,2"
BACKPROP, STAGED, LONGER = "backprop", "staged", "staged, 2 × steps"
LIGHT = {weight: f"hierarchical ×{weight:g}, every 4th" for weight in (0.1, 0.02)}
"""All gradient, and early losses that cost next to nothing."""
HEAD_RANK = 8
LENGTHS = (0.75, 1.0, 1.4, 2.0)
"""Lengths of backprop, over that of the arms: its curve, by which equal times are compared."""
At = Callable[[Topology, float], Topology]
"""What becomes of a topology when a share of the training is done."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    topology: Topology
    at: At | None = None
    """How the topology changes over the training, if it does."""
    settings: Callable[[OptimizerConfig], OptimizerConfig] | None = None
    """How the optimizer's settings differ."""
    taught: Literal["self", "average"] | None = None
    batch: int = 1
    """Rows over backprop's."""
    width: Fraction = Fraction(1)
    """Width over backprop's."""
    length: float = 1.0
    """Steps over those of the others."""
    micro: int = 1
    """Parts of a batch that are run one after another."""
    recompute: bool = False
    """Whether every layer runs again in the backward (activation checkpointing)."""
    core: bool = True
    """Whether it is trained with every seed; the others have the first alone, to see whether they promise."""

    def topology_at(self, share: float) -> Topology:
        return self.topology if self.at is None else self.at(self.topology, share)


def early(topology: Topology, **changes: object) -> Topology:
    """With other settings of every stage but the last."""
    *before, last = topology.stages
    return replace(topology, stages=(*(replace(stage, **changes) for stage in before), last))  # type: ignore[arg-type]


def own_head_rate(config: OptimizerConfig) -> OptimizerConfig:
    return replace(config, lr_head=0.5 * config.lr_head)


def rates_by_stage(config: OptimizerConfig) -> OptimizerConfig:
    rates = (0.7, 1.0, 1.4)
    return replace(
        config, stages=tuple(StageOptimizer(stage=k, rate=rate) for k, rate in enumerate(rates, start=1))
    )


def long_warmdown(config: OptimizerConfig) -> OptimizerConfig:
    return replace(config, warmdown=0.9)


def cooling(topology: Topology, share: float) -> Topology:
    """λ falls from 1 to 0 over the first half."""
    return topology.with_grad_scale(max(0.0, 1.0 - 2.0 * share))


def opened(topology: Topology, share: float) -> Topology:
    """λ is 1 in the last quarter."""
    return topology.with_grad_scale(1.0 if share >= 0.75 else 0.0)


def late(topology: Topology, share: float) -> Topology:
    """One loss and all gradient in the first half, then losses for all and none."""
    return topology if share >= 0.5 else early(topology.with_grad_scale(1.0), weight=0.0)


def _arms() -> tuple[Arm, ...]:
    chain = Topology.chain(PARTITION)
    whole = chain.with_grad_scale(1.0)
    ahead = replace(whole, reach="next")
    own = replace(chain, heads="per-stage", own_heads=True)
    overlapping = replace(Topology.cover([(0, 3), (2, 5), (4, 6)]), prediction="last")
    lengths = [
        Arm(
            BACKPROP if length == 1 else f"{BACKPROP}, {length:g} × steps",
            Topology.chain("6"),
            length=length,
            core=length in (1.0, 1.4),  # steps of most arms take 1 to 1.4 times backprop's
        )
        for length in LENGTHS
    ]
    return (
        *sorted(lengths, key=lambda arm: abs(arm.length - 1)),
        Arm(STAGED, chain),
        Arm(LONGER, chain, length=2.0, core=False),
        Arm("hierarchical", whole),
        Arm("next", ahead),
        Arm("next ×0.3", early(ahead, weight=0.3), core=False),
        Arm("next ×0.1", early(ahead, weight=0.1), core=False),
        Arm("hierarchical ×0.1", early(whole, weight=0.1)),
        *(Arm(name, early(whole, weight=weight, every=4)) for weight, name in LIGHT.items()),
        Arm("staged, λ = 0.3", chain.with_grad_scale(0.3), core=False),
        Arm("staged ×0.3", early(chain, weight=0.3), core=False),
        Arm("staged, every 4th", early(chain, every=4), core=False),
        Arm("staged, own heads", own, core=False),
        Arm("staged, own heads at half", own, settings=own_head_rate, core=False),
        Arm("staged, low-rank heads", replace(chain, heads="per-stage", head_rank=HEAD_RANK), core=False),
        Arm("staged, decoders", chain.with_decoders(1, last=False)),
        Arm("staged, decoders of 2", chain.with_decoders(2, last=False), core=False),
        Arm("staged, overlapping", overlapping, core=False),
        Arm("staged, residual", Topology.chain(PARTITION, objective="residual"), core=False),
        Arm("staged, λ 1 → 0", chain, at=cooling, core=False),
        Arm("staged, λ last quarter", chain, at=opened),
        Arm("staged, late", chain, at=late, core=False),
        Arm("staged, taught by itself", early(chain, objective="distillation"), taught="self", core=False),
        Arm(
            "staged, taught by an average",
            early(chain, objective="distillation"),
            taught="average",
            core=False,
        ),
        Arm("staged, rates", chain, settings=rates_by_stage, core=False),
        Arm("staged, warmdown 0.9", chain, settings=long_warmdown, core=False),
        Arm("staged, batch × 2", chain, batch=2, core=False),
        Arm("staged, width × 4/3", chain, width=Fraction(4, 3), core=False),
        Arm("staged 3,3", Topology.chain("3,3"), core=False),
        Arm("staged 1,1,1,1,1,1", Topology.chain("1,1,1,1,1,1"), core=False),
        Arm(
            "next 1,1,1,1,1,1",
            replace(Topology.chain("1,1,1,1,1,1").with_grad_scale(1.0), reach="next"),
            core=False,
        ),
    )


ARMS = _arms()
TINY = tuple(
    arm
    for arm in ARMS
    if arm.length in (1.0, 2.0)
    and arm.name
    in (
        *(BACKPROP, f"{BACKPROP}, 2 × steps", STAGED, "next", "staged, decoders", "staged, λ 1 → 0"),
        *("staged, taught by an average", "staged, batch × 2"),
    )
)
"""Those of the preset tiny: one of each kind."""
DECIDING = tuple(
    arm
    for arm in ARMS
    if arm.name
    in (
        *(BACKPROP, f"{BACKPROP}, 1.4 × steps", STAGED),
        *("next", "hierarchical ×0.1", "staged, decoders"),
    )
)
"""Those of the preset long: backprop, plain stages, and three that promise."""
DEMO = tuple(
    arm
    for arm in ARMS
    if (arm in DECIDING and arm.name != "staged, decoders")
    or arm.name in (*LIGHT.values(), "staged, λ last quarter")
)
"""Those of the preset demo: in the place of decoders, which cost most time, three that cost little."""
SAVING = (
    Arm("backprop, recomputed", Topology.chain("6"), recompute=True),
    Arm("backprop, 2 parts", Topology.chain("6"), micro=2),
    Arm("backprop, 4 parts", Topology.chain("6"), micro=4),
)
"""Ways to run backprop in less memory. Their gradients are backprop's, so only their costs are measured."""
