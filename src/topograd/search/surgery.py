"""Periodic boundary surgery: train under a hard partition, and change one boundary every so often.

Statement. Every N steps one validation pass (`salience.py`) gives J of the partition π and of its neighbours:
one boundary removed, added, or moved by a layer, with no stage below d_min layers. Then

    greedy        the neighbour of least J replaces π if its J is smaller
    stochastic    a neighbour drawn at random replaces π with probability min(1, exp(-(J' - J)/T))

Layers, optimizer state and the shared head stay; heads of new stages start from the nearest old head
(`carry.py`). Nothing is retrained from the start, and the learning-rate schedule goes on.

Symbols. N `every`, d_min `min_depth`, T `temperature` in bits per byte. Cost: a step of the partition at each
step; a pass over `eval_bytes` of held-out text every N steps.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.2.2; the acceptance is that of Metropolis and others, "Equation of state calculations by fast computing
machines".
Limits. The neighbours are proposed with equal chance and differ in number, so the stochastic rule has no
exact stationary distribution. The last operation should leave steps to train what it made: none is done in
the last N steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig
from topograd.search.carry import carry_heads, nearest_heads
from topograd.search.dynamic import stage_counts
from topograd.search.learner import Learner
from topograd.search.salience import Costs, Measured, measure, merge_pressures, split_pressures, terms
from topograd.search.utility import deployment, utility
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology


@dataclass(frozen=True, kw_only=True)
class SurgeryConfig:
    """When boundaries change, and by which rule."""

    every: int = 100
    """N: steps between operations."""
    acceptance: Literal["greedy", "stochastic"] = "greedy"
    temperature: float = 0.01
    """T of the stochastic rule, in bits per byte."""
    deployment: str = "on-device"
    """The weights of J: datacenter, on-device, serving or modular."""
    min_depth: int = 2
    """d_min: no stage becomes shorter, and stages of this depth count as capable."""
    floor: float = 0.25
    """r_min: a boundary where the effective rank is a smaller share of the width costs."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.min_depth < 1:
            raise ConfigError(f"every is {self.every}, min_depth {self.min_depth}; both must be at least 1")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"the temperature is {self.temperature}; it must be positive")
        if self.acceptance not in ("greedy", "stochastic"):
            raise ConfigError(f"acceptance {self.acceptance!r} is unknown; choose 'greedy' or 'stochastic'")
        deployment(self.deployment)


@dataclass(frozen=True)
class Operation:
    """One look at the boundaries, and what came of it."""

    step: int
    before: Composition
    after: Composition
    utility: float
    """J before."""
    gain: float
    """J before less J after, as the pass estimated it; 0 if nothing changed."""
    merge: dict[int, float]
    split: dict[int, float]
    usefulness: Sequence[float | None]


@dataclass(frozen=True)
class SurgeryResult:
    """The partition that was reached, and how."""

    composition: Composition
    operations: tuple[Operation, ...]
    readings: dict[str, Any]
    """`training.evaluation.evaluate` of the model under the last partition."""


OnSurgeryStep = Callable[[int, int, list[float], Composition], None]
"""Called after each step with (step, steps, losses, partition)."""


def neighbours(composition: Composition, min_depth: int) -> list[Composition]:
    """One boundary removed, added or moved by one layer, with every stage of at least `min_depth` layers."""
    near = [*composition.coarsenings(), *composition.refinements(), *composition.moves()]
    return [pi for pi in near if min(pi.parts) >= min_depth]


def choose(
    here: Composition,
    scores: dict[Composition, float],
    config: SurgeryConfig,
    generator: np.random.Generator,
) -> Composition:
    """The partition to go on with, from J of `here` and of its neighbours."""
    others = [pi for pi in scores if pi != here]
    if not others:
        return here
    if config.acceptance == "greedy":
        best = min(others, key=scores.__getitem__)
        return best if scores[best] < scores[here] else here
    drawn = others[int(generator.integers(len(others)))]
    rise = scores[drawn] - scores[here]
    accepted = rise <= 0 or generator.random() < math.exp(-rise / config.temperature)
    return drawn if accepted else here


def operate(
    learner: Learner,
    configuration: Configuration,
    config: SurgeryConfig,
    generator: np.random.Generator,
) -> tuple[Configuration, Operation]:
    """Measure, choose, and carry the heads over; the configuration to go on with."""
    here = configuration.composition
    model = learner.config.model
    costs = Costs(
        weights=deployment(config.deployment),
        heads=configuration.heads.value,
        vocab=model.vocab,
        width=model.width,
        rank=model.head_rank,
        min_depth=config.min_depth,
        floor=config.floor,
    )
    found = measure(learner.stack, here, neighbours(here, config.min_depth), learner.text)
    scores = {pi: utility(terms(found, pi, costs), costs.weights) for pi in found.bpb}
    after = choose(here, scores, config, generator)
    if after != here and configuration.heads == "per-stage":
        carry_heads(learner.stack, nearest_heads(here, after), learner.optimizers)
    done = _operation(learner.step, found, costs, scores, after)
    return Configuration(after, configuration.heads), done


def _operation(
    step: int, found: Measured, costs: Costs, scores: dict[Composition, float], after: Composition
) -> Operation:
    here = found.composition
    merge, split = merge_pressures(found, costs), split_pressures(found, costs)
    gain = scores[here] - scores[after]
    return Operation(step, here, after, scores[here], gain, merge, split, found.usefulness)


def train_with_surgery(
    train: TrainConfig, config: SurgeryConfig, on_step: OnSurgeryStep | None = None
) -> SurgeryResult:
    """Train for `train.steps`, from the partition and with the heads that `train` names."""
    partition = str(train.model.layers) if train.partition.strip() in ("L", "l") else train.partition
    configuration = Configuration.parse(partition, heads=train.stage_heads)
    if min(configuration.composition.parts) < config.min_depth:
        stage_counts(configuration.composition.layers, None, 1, None, config.min_depth)
        raise ConfigError(
            f"partition {configuration.composition} has a stage below {config.min_depth} layers; "
            "begin with deeper stages or lower the least depth"
        )
    learner = Learner(train, _topology(train, configuration))
    generator = np.random.default_rng(train.seed)
    operations: list[Operation] = []
    while learner.step < train.steps:
        losses = learner.advance(_topology(train, configuration))
        if on_step:
            on_step(learner.step, train.steps, losses.tolist(), configuration.composition)
        if learner.step % config.every == 0 and train.steps - learner.step >= config.every:
            configuration, done = operate(learner, configuration, config, generator)
            operations.append(done)
    readings = learner.read(_topology(train, configuration))
    return SurgeryResult(configuration.composition, tuple(operations), readings)


def _topology(train: TrainConfig, configuration: Configuration) -> Topology:
    return Topology.chain(
        configuration,
        transmissivity=train.transmissivity,
        objective=train.objective,
        bus=train.bus,
        reduction=train.reduction,
    )
