"""Candidates of a Pareto study as runs: trained in their folder, resumed from it, read as objectives.

Objectives are properties by name (`search/properties.py`); what is not asked for is not measured. The
schedule of the learning rate is that of the full budget at every rung. A run saves itself as its settings
say, so a kill costs at most the steps since the last checkpoint, and they are the same steps again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from topograd.runs.config import TrainConfig
from topograd.search.candidates import Candidate
from topograd.search.pareto import Train
from topograd.search.properties import read_numbers
from topograd.search.trained import Trained
from topograd.training.trainer import resume, start


def as_runs(base: TrainConfig, objectives: Sequence[str]) -> Train:
    """Train candidates with the settings of `base`, whose `steps` are the full budget."""

    def train(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        config = replace(base, topology=candidate.topology(base.topology))
        trainer = resume(folder) if (folder / "config.toml").exists() else start(config, folder)
        result = trainer.train(stop_after=steps)
        if result["steps"] < steps:
            raise KeyboardInterrupt
        trained = Trained(trainer.stack, trainer.plan, trainer.text, layers=trainer.config.model.layers)
        return read_numbers(trained, objectives)

    return train
