"""The training of one arm of the studies of the gap: the one loop, a topology that may change on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from papers.product_of_experts.gap_arms import Arm
from papers.staged_runs import held_out
from topograd.data import Loader, Shards, Text
from topograd.exec.forward import Predictor
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.loop import TrainingLoop
from topograd.training.objectives import Distillation
from topograd.training.optimizers import make_optimizers

DECAY = 0.98
"""Of the average of past weights that teaches."""


class Given:
    """What the arms of a seed have in common, read when the first of them is trained."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @cached_property
    def loaded(self) -> tuple[TrainConfig, Text, Shards]:
        """Settings as the data makes them, the text to judge on, and that to learn from."""
        config, data = load_data(self.config)
        return config, held_out(config, data), data.train

    def batches(self, rows: int) -> Loader:
        """Batches of so many rows; those of the same number of rows are the same for every arm."""
        config, _, train = self.loaded
        return Loader(train, config.model.context, rows, config.seed)


class Training:
    """A model, its optimizers and its teacher. All arms of a seed and a width start from the same weights."""

    def __init__(self, arm: Arm, config: TrainConfig) -> None:
        self.arm, self.config = arm, config
        torch.manual_seed(config.seed)
        width = int(config.model.width * arm.width)
        self.stack = GPT(config.gpt.changed(layers=arm.topology.layers, width=width))
        self.plan = prepare(self.stack, arm.topology)
        settings = config.optimizer if arm.settings is None else arm.settings(config.optimizer)
        average = copy.deepcopy(self.stack) if arm.taught == "average" else None
        self.loop = TrainingLoop(
            self.stack,
            make_optimizers(self.stack, settings, self.plan),
            clip=settings.clip,
            teacher=None if average is None else Predictor(average, self.plan),
            own_teacher=arm.taught == "self",
            objectives={"distillation": Distillation()},
        )
        self._plans: dict[Topology, Plan] = {arm.topology: self.plan}

    def plan_at(self, share: float) -> Plan:
        """The plan when this share of the training is done."""
        topology = self.arm.topology_at(share)
        if topology not in self._plans:
            self._plans[topology] = Plan.of(topology, len(self.stack.layers))
        return self._plans[topology]

    def gradients(self, share: float, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradients of a batch, in as many parts as the arm runs it in."""
        for x, y in self._parts(inputs, targets):
            self.loop.gradients(self.plan_at(share), x, y, 1 / self.arm.micro)

    def step(self, share: float, inputs: Tensor, targets: Tensor, number: int = 1) -> Tensor:
        """One step; returns the stages' losses."""
        found = self.loop.step(self.plan_at(share), self._parts(inputs, targets), number)
        if self.loop.teacher is not None:
            self._follow()
        return found.losses

    def run(self, batches: Iterable[tuple[Tensor, Tensor]], steps: int) -> Tensor:
        """All steps; returns the losses of the stages (steps, stages)."""
        losses = []
        for step, (inputs, targets) in zip(range(steps), batches, strict=False):
            self.loop.optimizers.set_rates(step, steps)
            losses.append(self.step(step / steps, inputs, targets, step + 1))
        return torch.stack(losses)

    def _parts(self, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = self.arm.micro
        return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))

    @torch.no_grad()
    def _follow(self) -> None:
        """The average moves a little towards the weights."""
        assert self.loop.teacher is not None
        pairs = zip(self.loop.teacher.stack.parameters(), self.stack.parameters(), strict=True)
        for past, now in pairs:
            past.lerp_(now, 1 - DECAY)
