"""Predictions of a plan: weighted sums of its stages' logits, at full depth and at each exit.

    last     z_K                               the deepest stage with a loss
    sum      Σ_j z_j                           where stages correct the sum of those before (Log-OP)
    pool     Σ_j w_j z_j                       branches of a forest, experts of a cover, a mean of stages
    path     z of the last stage of a path     stages on the way that are skipped do not run

An exit after stage k uses stages up to k: its own logits, the sum or the pool so far.

What `auto` means. A stage whose objective is `residual` was trained as the sum of all stages up to it, and
predicts so; so do stages of `diversity`, which is about their product, and of `forward-forward`. Any other
stage predicts alone. The model predicts by its leaves, the stages whose end no stage reads: by the one leaf
of a chain, by the mean of the branches of a forest and of the experts of a cover.

Everything that runs a plan uses this: the engine, exits, speculation, evaluation, reports, the search and a
distillation teacher. Pure data; adding a constant to logits changes no probability, so pooling
logits is pooling log-probabilities. Source: "Stage-Partitioned Learning" eq. 42 and §10.4; "Product of
Experts" eqs. 2, 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from topograd.errors import TopologyError

if TYPE_CHECKING:
    from topograd.topology.dag import Topology

Terms = tuple[tuple[int, float], ...]
"""Stages and the weights of their logits."""
KINDS = ("auto", "last", "sum", "mean")
SUMMED = ("residual", "diversity", "forward-forward")
"""Objectives of stages that predict as a sum."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The terms of a prediction."""

    kind: Literal["last", "sum", "pool", "path"]
    full: Terms
    """At full depth."""
    exits: Mapping[int, Terms]
    """After each stage that predicts."""
    path: tuple[int, ...] | None = None
    """The stages of a path, where the model predicts by one; `full` is then that of its last stage."""

    def after(self, stage: int) -> Terms:
        """The terms of an exit after `stage`; the last exit predicts as the model does."""
        return self.exits[stage]

    @property
    def alone(self) -> bool:
        """Whether every exit reads one stage only."""
        return all(len(terms) == 1 for terms in (self.full, *self.exits.values()))


def prediction_of(topology: Topology, predicting: Sequence[int]) -> Prediction:
    """How a topology predicts whose stages `predicting` have logits."""
    if not predicting:
        return Prediction("last", (), {})
    how = topology.prediction
    last = predicting[-1]
    exits: dict[int, Terms]
    if isinstance(how, tuple):
        return _weighted(topology, predicting, how)
    if how.startswith("path:"):
        path = _path(topology, predicting, how)
        return Prediction("path", ((path[-1], 1.0),), _auto(topology, predicting).exits, path)
    if how not in KINDS:
        raise TopologyError(
            setting="prediction",
            given=how,
            allowed=f"{', '.join(KINDS)}, path:1,3 or give a weight for each stage",
        )
    if how == "last":
        exits = {k: ((k, 1.0),) for k in predicting}
        return Prediction("last", exits[last], exits)
    if how in ("sum", "mean"):
        exits = {k: _equal([j for j in predicting if j <= k], how == "mean") for k in predicting}
        return Prediction("sum" if how == "sum" else "pool", exits[last], exits)
    return _auto(topology, predicting)


def _auto(topology: Topology, predicting: Sequence[int]) -> Prediction:
    residual = {k: topology.stages[k].objective in SUMMED for k in predicting}
    exits: dict[int, Terms] = {
        k: _equal([j for j in predicting if j <= k], False) if residual[k] else ((k, 1.0),)
        for k in predicting
    }
    last = predicting[-1]
    if residual[last]:
        return Prediction("sum", exits[last], exits)
    leaves = [k for k in topology.leaves() if k in exits] or [last]
    if len(leaves) == 1:
        return Prediction("last", exits[leaves[0]], exits | {last: exits[leaves[0]]})
    full = _equal(leaves, True)
    return Prediction("pool", full, exits | {last: full})


def _weighted(topology: Topology, predicting: Sequence[int], weights: tuple[float, ...]) -> Prediction:
    """Σ w_j z_j; an exit shares the whole weight out over the stages up to it."""
    if len(weights) != len(topology.stages):
        problem = f"{len(weights)} weights for {len(topology.stages)} stages"
        remedy = "a prediction needs one for each"
        raise TopologyError(problem, setting="prediction", given=weights, remedy=remedy)
    total = math.fsum(weights)
    if not all(0 <= w < math.inf for w in weights) or not total > 0:
        raise TopologyError(
            setting="prediction", given=weights, allowed="finite weights of at least 0, not all 0"
        )
    silent = [k for k, w in enumerate(weights) if w and k not in predicting]
    if silent:
        raise TopologyError(
            setting="prediction", given=weights, allowed=f"0 for stage {silent[0] + 1}, which has no loss"
        )
    exits: dict[int, Terms] = {}
    for k in predicting:
        some = [(j, weights[j]) for j in predicting if j <= k and weights[j]]
        scale = total / math.fsum(w for _, w in some) if some else 1.0
        exits[k] = tuple((j, w * scale) for j, w in some) if some else ((k, total),)
    full = tuple((j, weights[j]) for j in predicting if weights[j])
    return Prediction("pool", full, exits | {predicting[-1]: full})


def _equal(stages: Sequence[int], mean: bool) -> Terms:
    return tuple((j, 1 / len(stages) if mean else 1.0) for j in stages)


def _path(topology: Topology, predicting: Sequence[int], how: str) -> tuple[int, ...]:
    from topograd.topology.branches import parse_path

    path = parse_path(how.removeprefix("path:"))
    if max(path) >= len(topology.stages):
        problem = f"prediction {how} names stage {max(path) + 1}"
        remedy = f"the topology has stages 1 to {len(topology.stages)}"
        raise TopologyError(problem, setting="prediction", given=how, remedy=remedy)
    if path[-1] not in predicting:
        problem = f"prediction {how} ends at stage {path[-1] + 1}, which has no loss"
        raise TopologyError(problem, setting="prediction", given=how, remedy="end elsewhere")
    return path
