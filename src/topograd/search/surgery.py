"""Periodic boundary surgery: train under a hard partition, and change one boundary every so often.

Statement. Every N steps one validation pass (`salience.py`) gives J of the partition π and of its neighbours:
one boundary removed, added, or moved by a layer, with no stage below d_min layers; with K given they are only
moved. Then

    greedy        the neighbour of least J replaces π if its J is smaller
    stochastic    a neighbour drawn at random replaces π with probability min(1, exp(-(J' - J)/T))

Layers, optimizer state and the shared head stay; heads of new stages start from the nearest old head
(`change_topology.py`). Nothing is retrained from the start, and the learning-rate schedule continues.

Symbols. N `every`, d_min `min_depth`, K `stages`, T `temperature` in bits per byte. Cost: a step of the
partition at each step; a pass over `eval_bytes` of held-out text every N steps.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.2.2; the acceptance is that of Metropolis and others, "Equation of state calculations by fast computing
machines".
Limits. The neighbours are proposed with equal chance and differ in number, so the stochastic rule has no
exact stationary distribution. The last operation should leave steps to train what it made: none is done in
the last N steps, and none while a stage is halted. The chance of the stochastic rule is drawn from the seed
and the step.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from topograd.data import Prepared
from topograd.errors import ConfigError
from topograd.runs.checkpoint import Checkpoint
from topograd.runs.config import SearchConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.search_config import SurgeryConfig
from topograd.search.change_topology import change_topology, check_searchable, nearest_heads
from topograd.search.dynamic import stage_counts
from topograd.search.salience import Costs, measure, merge_pressures, split_pressures, terms
from topograd.search.utility import deployment, utility
from topograd.topology.composition import Composition
from topograd.training.runs import RunTask


def surgery_run(config: TrainConfig, surgery: SurgeryConfig) -> TrainConfig:
    """The settings of a run that moves its boundaries; partition and heads at first are those of `config`."""
    return config.changed(search=SearchConfig(kind="surgery", surgery=surgery))


def partition_of(config: TrainConfig) -> Composition:
    """The partition of a chain that settings name."""
    return Composition.of(stage.stop - stage.start for stage in config.build_topology().stages)


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
    merge: Mapping[int, float]
    """M_i by boundary; negative: merge."""
    split: Mapping[int, float]
    """S_i by layer; positive: split."""
    usefulness: tuple[float | None, ...]
    """U_k of each stage before; the first has none."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, as JSON keeps them."""
        return asdict(self) | {
            "before": list(self.before.parts),
            "after": list(self.after.parts),
            "merge": {str(i): value for i, value in self.merge.items()},
            "split": {str(i): value for i, value in self.split.items()},
            "usefulness": list(self.usefulness),
        }


def neighbours(composition: Composition, min_depth: int, stages: int | None = None) -> list[Composition]:
    """One boundary removed, added or moved by one layer, with every stage of at least `min_depth` layers; of
    those with `stages` stages, if it is given."""
    near = [*composition.coarsenings(), *composition.refinements(), *composition.moves()]
    return [pi for pi in near if min(pi.parts) >= min_depth and stages in (None, pi.stages)]


def choose(
    here: Composition,
    scores: Mapping[Composition, float],
    config: SurgeryConfig,
    generator: np.random.Generator,
) -> Composition:
    """The partition to continue with, from J of `here` and of its neighbours."""
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


class SurgeryTask(RunTask):
    """A run whose boundaries are moved every so often."""

    def __init__(self, run: Run, config: TrainConfig, data: Prepared) -> None:
        check_searchable(config, "chain")
        if "residual" in {stage.objective for stage in config.build_topology().stages}:
            raise ConfigError(
                setting="objective",
                given="residual",
                allowed="one whose stages predict alone, as cross-entropy",
            )
        composition = partition_of(config)
        least = config.search.surgery.min_depth
        if min(composition.parts) < least:
            stage_counts(composition.layers, None, 1, None, least)
            raise ConfigError(
                setting="partition", given=str(composition), allowed=f"of stages of at least {least} layers"
            )
        wanted = config.search.surgery.stages
        if wanted not in (None, composition.stages):
            raise ConfigError(
                f"stages is {wanted}, which surgery keeps, and partition is {composition}, of "
                f"{composition.stages}",
                setting="stages",
                given=wanted,
                remedy="begin with as many, or leave the number out",
            )
        super().__init__(run, config, data)
        self.operations: list[dict[str, Any]] = []
        """What was done so far, as `Operation.as_dict` gives it."""

    def load_extra(self, loaded: Checkpoint) -> None:
        super().load_extra(loaded)
        self.operations = loaded.extra["search"]["operations"]

    def extra_state(self) -> dict[str, Any]:
        search = {"operations": self.operations}
        return super().extra_state() | {"topology": asdict(self.config.topology), "search": search}

    def after_step(self, step: int) -> None:
        super().after_step(step)
        every, left = self.config.search.surgery.every, self.config.steps - step
        if step % every == 0 and left >= every and not self.loop.halted:
            done = self.operate(step)
            self.operations.append(done.as_dict())
            self.run.log({"kind": "operation", **done.as_dict()})

    def operate(self, step: int) -> Operation:
        """Measure, choose, and apply the choice."""
        here, config = partition_of(self.config), self.config.search.surgery
        near = neighbours(here, config.min_depth, config.stages)
        measured = measure(self.stack, here, near, self.text)
        costs = self._costs()
        scores = {pi: utility(terms(measured, pi, costs), costs.weights) for pi in measured.bpb}
        generator = np.random.default_rng([self.config.seed, step])
        after = choose(here, scores, config, generator)
        if after != here:
            table = replace(self.config.topology, partition=str(after))
            change_topology(self, table, nearest_heads(here, after))
        merge, split = merge_pressures(measured, costs), split_pressures(measured, costs)
        gain = scores[here] - scores[after]
        return Operation(step, here, after, scores[here], gain, merge, split, tuple(measured.usefulness))

    def _costs(self) -> Costs:
        model, config = self.config.model, self.config.search.surgery
        return Costs(
            weights=deployment(config.deployment),
            heads=self.plan.topology.heads,
            vocab=model.vocab,
            width=model.width,
            rank=self.plan.topology.head_rank or getattr(model, "head_rank", None),
            min_depth=config.min_depth,
            floor=config.floor,
        )


def surgery_outcome(config: TrainConfig, extra: dict[str, Any]) -> dict[str, Any]:
    """The boundaries in a checkpoint of a surgery run."""
    return {
        "partition": list(partition_of(config).parts),
        "operations": extra["search"]["operations"],
    }
