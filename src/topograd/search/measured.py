"""Trained models with their readings, and candidates trained as runs.

Readings that several properties share are made once. The worth of a run is its measured J (eq. 30,
`utility.py`). A candidate of a Pareto study is trained in its folder, resumed from it, and read as objectives
by name (`properties.py`); what is not asked for is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from topograd.data.windows import Text
from topograd.decode.calibration.measure import Readings, exit_readings
from topograd.errors import ConfigError
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.session import LoadedTextRun
from topograd.search.candidates import Candidate
from topograd.search.pareto import Train
from topograd.search.properties import read_numbers, read_properties
from topograd.search.property_probes import Specialist, backwards, specialist
from topograd.search.utility import Terms, Weights, utility
from topograd.topology.plan import Plan
from topograd.training.evaluation import Evaluation, evaluate
from topograd.training.runs import resume, start


@dataclass(frozen=True, eq=False)
class Trained:
    """What a property is read from. Readings that several properties share are made when first asked for."""

    stack: Stack
    plan: Plan
    text: Text
    """Held-out text."""
    other: Text | None = None
    """Text of another kind, for the probes; without it, `text` backwards."""
    layers: int | None = None
    """Layers that are not of private decoders; None is all."""
    budget: float = 0.5
    """The share of the layers that a prefix may run."""
    eps: float = 0.01
    """The share of tokens that WAND may change."""
    floor: float = 0.25
    """r_min: a boundary where the effective rank is a smaller share of the width costs."""

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ConfigError(
                setting="budget",
                given=self.budget,
                remedy="it is a share of the layers, above 0 and at most 1",
            )

    @classmethod
    def of(cls, session: LoadedTextRun, text: Text) -> Trained:
        """A run that was opened."""
        return cls(session.stack, session.plan, text, layers=session.config.model.layers)

    @property
    def new(self) -> Text:
        """The text of the probes."""
        return backwards(self.text) if self.other is None else self.other

    @cached_property
    def evaluation(self) -> Evaluation:
        """What `evaluate` reads of the held-out text."""
        return evaluate(self.stack, self.plan, self.text)

    @cached_property
    def readings(self) -> Readings:
        """The logits of every exit, token by token."""
        return exit_readings(self.stack, self.plan, self.text)

    @cached_property
    def accuracy(self) -> list[float]:
        """How often the top token of each exit is the target."""
        targets = self.text.targets[self.text.targets != -100].cpu()
        return [(top == targets).double().mean().item() for top in self.readings.top]

    @cached_property
    def specialist(self) -> Specialist:
        """What the last stage learned in a short probe."""
        return specialist(self.stack, self.plan, self.text, self.new)

    @property
    def device(self) -> torch.device:
        return next(self.stack.parameters()).device


@dataclass(frozen=True)
class Worth:
    """What a trained model is worth."""

    utility: float
    """J; less is better."""
    terms: Terms
    """Its six terms, as measured."""
    shares: dict[str, float]
    """What each term adds to J: times its weight, with its sign."""
    properties: dict[str, Any]
    """Whatever else was asked for."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worth(trained: Trained, weights: Weights, properties: Sequence[str] = ()) -> Worth:
    """Measure the terms of J on a trained model, and weigh them."""
    terms = Terms(**read_numbers(trained, [field.name for field in fields(Terms)]))
    shares = {name: getattr(weights, name, 1.0) * value for name, value in asdict(terms).items()}
    shares["capability"] = 0.0 - shares["capability"]
    return Worth(utility(terms, weights), terms, shares, read_properties(trained, properties))


def as_runs(base: TrainConfig, objectives: Sequence[str]) -> Train:
    """Train candidates with the settings of `base`, whose `steps` are the full budget, and read objectives.

    The schedule of the learning rate is that of the full budget at every rung. A run saves itself as its
    settings say, so a kill costs at most the steps since the last checkpoint, and they are the same again.
    """

    def train(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        config = replace(base, topology=candidate.topology(base.topology))
        trainer = resume(folder) if (folder / "config.toml").exists() else start(config, folder)
        result = trainer.train(stop_after=steps)
        if result["steps"] < steps:
            raise KeyboardInterrupt(
                f"stopped and saved at step {result['steps']} of {steps}; the same command goes on from there"
            )
        task = trainer.task
        trained = Trained(task.stack, task.plan, task.text, layers=task.config.model.layers)
        return read_numbers(trained, objectives)

    return train
