"""The training of one arm of the studies of the gap: a task of the one trainer, in memory.

Its topology may change on the way; parts of a batch and the average that teaches are those of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from papers.product_of_experts.gap_arms import Arm
from papers.staged_runs import held_out
from topograd.data import Loader, Shards, Text
from topograd.exec.forward import Predictor
from topograd.exec.objectives import Distillation
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.averaged_weights import AveragedWeights
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner, batch_parts
from topograd.training.trainer import Schedule, StepRecord, Task, train_task

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


class Training(Task):
    """A model, its optimizers and its teacher. All arms of a seed and a width start from the same weights."""

    def __init__(self, arm: Arm, config: TrainConfig) -> None:
        super().__init__(Schedule(config.steps))
        self.arm, self.config = arm, config
        torch.manual_seed(config.seed)
        width = int(config.model.width * arm.width)
        self.model = self.stack = GPT(config.gpt.changed(layers=arm.topology.layers, width=width))
        self.plan = prepare(self.stack, arm.topology)
        settings = config.optimizer if arm.settings is None else arm.settings(config.optimizer)
        self.loop = StepRunner(
            self.stack,
            make_optimizers(self.stack, settings, self.plan),
            clip=settings.clip,
            own_teacher=arm.taught == "self",
            objectives={"distillation": Distillation()},
            parts=arm.micro,
            recompute=arm.recompute,
        )
        self.optimizers = self.loop.optimizers.optimizers
        if arm.taught == "average":
            average = self.optimizers["average"] = AveragedWeights(self.stack, DECAY)
            average.connect()
            self.loop.teacher = Predictor(average.averaged, self.plan)
        self._plans: dict[Topology, Plan] = {arm.topology: self.plan}

    def plan_at(self, share: float) -> Plan:
        """The plan when this share of the training is done."""
        topology = self.arm.topology_at(share)
        if topology not in self._plans:
            self._plans[topology] = Plan.of(topology, len(self.stack.layers))
        return self._plans[topology]

    def gradients(self, share: float, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradients of a batch, in as many parts as the arm runs it in."""
        for part, weight in batch_parts([(inputs, targets)], self.arm.micro):
            self.loop.gradients(self.plan_at(share), part.inputs, part.targets, weight)

    def learn(self, share: float, inputs: Tensor, targets: Tensor, number: int = 1) -> Tensor:
        """One step on a batch; returns the stages' losses."""
        return self.loop.step(self.plan_at(share), [(inputs, targets)], number).losses

    def step(self, step: int) -> StepRecord:
        self.loop.optimizers.set_rates(step, self.schedule.steps)
        return StepRecord(self.learn(step / self.schedule.steps, *next(self.batches), step + 1).tolist())

    def run(self, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> Tensor:
        """All steps; returns the losses of the stages (steps, stages)."""
        self.batches, self.schedule = batches, Schedule(steps)
        losses: list[list[float]] = []
        train_task(self, None, lambda step, of, result, reading: losses.append(result))
        return torch.tensor(losses)
