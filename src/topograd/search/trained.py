"""Candidates of a Pareto study as runs: trained in their folder, resumed from it, read as objectives.

| objective             | better | what it is                                                          |
|-----------------------|--------|---------------------------------------------------------------------|
| bpb                   | less   | bits per byte of the last stage, on held-out text                   |
| prefix_bpb            | less   | the same of the first stage: what an early exit gives               |
| calibration           | less   | mean calibration error of the stages                                |
| gradient_depth        | less   | most layers that a gradient passes through (P2)                     |
| activation_layers     | less   | most layers whose activations are held at once (P4)                 |
| projections           | less   | vocabulary projections of a training step                           |
| pipeline_granularity  | more   | groups of stages that train without exchanging gradients (P5)       |
| capability            | more   | `utility.structural_capability` at d_min                            |

The schedule of the learning rate is that of the full budget at every rung. A run saves itself as its settings
say, so a kill costs at most the steps since the last checkpoint, and they are the same steps again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig
from topograd.search.candidates import Candidate
from topograd.search.pareto import Direction, Train
from topograd.search.utility import calibration_cost, structural_capability
from topograd.topology.closed_forms import activation_layers, gradient_depth, pipeline_granularity
from topograd.topology.plan import Plan
from topograd.training.trainer import resume, start

OBJECTIVES: Mapping[str, Direction] = {
    "bpb": "minimize",
    "prefix_bpb": "minimize",
    "calibration": "minimize",
    "gradient_depth": "minimize",
    "activation_layers": "minimize",
    "projections": "minimize",
    "pipeline_granularity": "maximize",
    "capability": "maximize",
}


def named_objectives(names: Sequence[str]) -> dict[str, Direction]:
    """The objectives called so, with their directions."""
    for name in names:
        if name not in OBJECTIVES:
            raise ConfigError(f"objective {name!r} is unknown; choose among {', '.join(OBJECTIVES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"objectives are {list(names)}; name at least one, each once")
    return {name: OBJECTIVES[name] for name in names}


def as_runs(base: TrainConfig, min_depth: int = 2) -> Train:
    """Train candidates with the settings of `base`, whose `steps` are the full budget."""

    def train(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        config = replace(base, partition=str(candidate.composition), **candidate.settings)  # type: ignore[arg-type]
        trainer = resume(folder) if (folder / "config.toml").exists() else start(config, folder)
        result = trainer.train(stop_after=steps)
        if result["steps"] < steps:
            raise KeyboardInterrupt
        return objectives_of(candidate, trainer.plan, result, min_depth)

    return train


def objectives_of(
    candidate: Candidate, plan: Plan, readings: Mapping[str, Any], min_depth: int
) -> dict[str, float]:
    """Every objective of this module, from what `evaluate` read of the candidate."""
    return {
        "bpb": readings["bpb"]["last"],
        "prefix_bpb": readings["bpb"]["prefix"][0],
        "calibration": calibration_cost(readings["ece"]),
        "gradient_depth": gradient_depth(plan),
        "activation_layers": activation_layers(plan),
        "projections": len(plan.predicting()),
        "pipeline_granularity": pipeline_granularity(plan),
        "capability": structural_capability(candidate.composition, min_depth),
    }
