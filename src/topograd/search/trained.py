"""A trained model as properties see it: the model, the text that it is read on, and readings made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from topograd.data.windows import Text
from topograd.decode.calibrate import exit_readings
from topograd.decode.readings import Readings
from topograd.errors import ConfigError
from topograd.nn.stack import Stack
from topograd.runs.session import Session
from topograd.search.property_probes import Specialist, backwards, specialist
from topograd.topology.plan import Plan
from topograd.training.evaluation import Evaluation, evaluate


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
            raise ConfigError(f"budget is {self.budget}; it is a share of the layers, above 0 and at most 1")

    @classmethod
    def of(cls, session: Session, text: Text) -> Trained:
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
        """What every exit says, token by token."""
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
