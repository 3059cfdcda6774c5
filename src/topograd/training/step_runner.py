"""One training step: gradients, checks, clipping, the optimizers' step.

What is done per group. Stages between which gradient passes are a group (`Plan.groups`). Where there are
several, no gradient couples them, so nothing else shall: each group's gradient is clipped by its own norm,
and a group whose loss or gradient is not finite is halted alone. It is run without learning from then on, its
name is reported, and the step is repeated without it: the others never see what broke it ("Product of
Experts" §4.4). What groups share (embedding, shared head) is clipped by its own norm. With one group, and
where no group is left, a number that is not finite ends the training.

Nothing is changed by a step that fails. Cost beside the gradients: one norm of each group.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError, DivergenceError
from topograd.exec.forward import Predictor
from topograd.exec.gradient import BACKWARDS, Autograd, GradientEngine, StepGraph, Transport
from topograd.exec.late import LateQueue, check_late
from topograd.exec.objectives import Logits, Objective, objectives_of, teacher_logits
from topograd.exec.train_step import OpenStep, start_step
from topograd.nn.host_numbers import to_device
from topograd.nn.layer_dropout import dropped_layers
from topograd.nn.stack import Stack
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.plan import Plan
from topograd.training.activation_cache import StateBatch
from topograd.training.optimizers import OptimizerSet, stage_parameters

Allows = Callable[[int, Tensor, Sequence[float]], bool]
Batch = tuple[Tensor, Tensor] | StateBatch
"""Inputs and targets; with hidden states, what is frozen before them does not run."""


@dataclass(frozen=True)
class Step:
    """The results of a step."""

    losses: Tensor
    """Of each stage, on the CPU; nan for a stage without one."""
    norms: tuple[float, ...]
    """Of each group's gradient before clipping, and of what they share; of everything where there is one."""
    halted: tuple[int, ...] = ()
    """Stages that this step halted, counted from 0."""
    taken: bool = True
    """Whether the weights were changed."""

    @property
    def norm(self) -> float:
        """Of the whole gradient."""
        return math.hypot(*self.norms)


@dataclass
class StepRunner:
    """A model, its optimizers, and the settings of a step."""

    stack: Stack
    optimizers: OptimizerSet
    clip: float | None = None
    """Largest norm of a group's gradient."""
    bf16: bool = False
    gradient: GradientEngine = field(default_factory=Autograd)
    """How gradients cross edges."""
    recompute: bool = False
    """Whether layers keep their inputs alone and run again in the backward."""
    teacher: Predictor | None = None
    own_teacher: bool = False
    """Whether what the model itself predicts, at full depth and without gradient, is the teacher."""
    objectives: Mapping[str, Objective] | None = None
    """Objectives that replace registered ones."""
    dropout_rates: Sequence[float] = ()
    """How often each layer is left out; empty leaves out none."""
    halted: set[int] = field(default_factory=set)
    """Stages that run without learning, because they broke."""
    parts: int = 1
    """Parts of a batch that are run one after another; their gradients add up to that of the batch."""
    transport: Transport | None = None
    """What carries messages to and from stages that run elsewhere (`parallel/`)."""
    seed: int = 0
    """What the rounding of gradients with few bits is seeded by, with the step and the batch."""
    allows: Allows | None = None
    """What may leave a step out: (number, losses, norm of the gradient) -> whether it is taken."""
    late: LateQueue = field(default_factory=LateQueue)
    """Batches from which some stages learn at later steps."""

    def step(self, plan: Plan, batches: Sequence[Batch], number: int = 1) -> Step:
        """One step of the optimizers on the mean gradient of `batches`; `number` is what errors call it."""
        newly: list[int] = []
        problem = ""
        while True:
            out = self.halted.union(newly)
            running = plan.halted(out) if out else plan
            self.late.begin(number - 1, self._count(batches))
            measured, parts, norms = self._measured(running, batches)
            # Losses and norms to the CPU in one copy: on a device this is what a step waits for.
            small = torch.stack([to_device(norm, measured.device) for norm in norms])
            dtype = torch.promote_types(measured.dtype, small.dtype)
            numbers = torch.cat((measured.to(dtype), small.to(dtype))).cpu()
            losses, sizes = (
                numbers[: len(measured)].to(measured.dtype),
                tuple(numbers[len(measured) :].tolist()),
            )
            broken = self._broken(running, losses, sizes)
            if not broken:
                break
            if not problem:  # what breaks after it may only follow from it
                problem = self._problem(running, broken, losses)
            self.stack.zero_grad(set_to_none=True)
            learning = {k for group in running.groups() for k in group if running.stages[k].scale > 0}
            if broken == [-1] or not learning.difference(broken):
                if self.allows is not None and not self.allows(number, losses, sizes):
                    return Step(losses, sizes, taken=False)
                raise DivergenceError(
                    f"{problem} at step {number}; nothing was changed by that step",
                    remedy="lower the learning rates and start again",
                )
            newly += broken
        self.halted.update(newly)
        if self.allows is not None and not self.allows(number, losses, sizes):
            self.stack.zero_grad(set_to_none=True)
            return Step(losses, sizes, tuple(newly), taken=False)
        self.late.commit()
        self._clip(parts, norms)
        self.optimizers.step()
        self.stack.after_step()
        self.stack.zero_grad(set_to_none=True)
        return Step(losses, sizes, tuple(newly))

    def _count(self, batches: Sequence[Batch]) -> int:
        """The batches that are run one after another, or by replicas."""
        return len(batches) * self.parts

    def _measured(
        self, plan: Plan, batches: Sequence[Batch]
    ) -> tuple[Tensor, list[list[nn.Parameter]], list[Tensor]]:
        """Losses of the stages, and the parts that are clipped by themselves with their gradients' norms."""
        losses = self._gradients(plan, batches, len(batches))
        parts = self._parts(plan)
        return losses, parts, [norm_of(parameters) for parameters in parts]

    def _gradients(self, plan: Plan, batches: Sequence[Batch], count: int) -> Tensor:
        """Add the gradients of `batches`, which are some of `count`; returns their part of the losses."""
        device = next(p.device for p in self.stack.parameters() if not p.is_meta)
        total: Tensor | None = None
        for number, (batch, share) in enumerate(self._parted(batches)):
            inputs, targets = (to_device(tensor, device) for tensor in (batch.inputs, batch.targets))
            with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
                losses = self.gradients(
                    plan, inputs, targets, share / count, batch.states or None, batch.teacher, number
                )
            part = losses.detach() * share / count
            total = part if total is None else total + part
        assert total is not None, "a step needs a batch"
        return total

    def _parted(self, batches: Sequence[Batch]) -> Iterable[tuple[StateBatch, float]]:
        """What is run at once: each with the share of its batch's targets that it has."""
        return batch_parts(batches, self.parts)

    def gradients(
        self,
        plan: Plan,
        inputs: Tensor,
        targets: Tensor,
        scale: float,
        states: Mapping[int, Tensor] | None = None,
        kept: Logits | None = None,
        number: int = 0,
    ) -> Tensor:
        """Add the gradients of one batch, times `scale`; `kept` are a teacher's logits that were kept, and
        `number` is the batch's within the step."""
        taught = kept
        with dropped_layers(self.stack.layers, self.dropout_rates):
            if self.own_teacher:
                taught = teacher_logits(Predictor(self.stack, plan), inputs, targets, states)
            elif kept is None and self.teacher is not None:
                taught = teacher_logits(self.teacher, inputs, targets)
            step = start_step(
                self.stack,
                plan,
                inputs,
                targets,
                teacher=taught,
                objectives=self.objectives,
                scale=scale,
                states=states,
                transport=self.transport,
                gradient=self.gradient,
                recompute=self.recompute,
                draw=(self.seed, self.late.step, self._number(number)),
                late=self.late,
            )
            self._finish(step)
        return step.losses

    def _number(self, number: int) -> int:
        """The number of a batch among those of all replicas."""
        return number

    def _finish(self, step: OpenStep) -> None:
        """Run what is left of a step on a batch, which may wait for others."""
        step.finish()

    def check_backward(self, plan: Plan, keeps_states: bool = False) -> None:
        """Raise for what the engine does not take, before a step does."""
        taught = self.teacher is not None or self.own_teacher
        extras = {"layer dropout": any(self.dropout_rates), "a teacher": taught}
        extras |= {"on_alarm": self.allows is not None, "kept states; give --states none": keeps_states}
        check_late(self.stack, plan, objectives_of(plan, self.objectives), extras=extras)
        self.gradient.begin(StepGraph(self.stack, plan, transport=self.transport, recompute=self.recompute))

    def check_parts(self, plan: Plan) -> None:
        """Raise ConfigError where the gradients of parts of a batch do not add up to that of the batch."""
        if self.parts == 1:
            return
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.stack.modules()):
            raise ConfigError(setting="batch_parts", given=self.parts, allowed="1: the model has BatchNorm")
        for planned, asked in zip(plan.stages, objectives_of(plan, self.objectives), strict=True):
            if planned.scale > 0 and hasattr(asked, "of_stage"):
                name = planned.stage.objective
                raise ConfigError(
                    setting="batch_parts",
                    given=self.parts,
                    allowed=f"1: objective {name} reads a whole batch",
                )

    def _parts(self, plan: Plan) -> list[list[nn.Parameter]]:
        """Parameters with a gradient: of each group, and of what they share; all in one if there is one."""
        learning = [p for p in self.stack.parameters() if p.grad is not None]
        groups = plan.groups()
        if len(groups) < 2:
            return [learning]
        own = [{id(p) for p in stage_parameters(self.stack, plan, group)} for group in groups]
        parts = [[p for p in learning if id(p) in ids] for ids in own]
        owned = set().union(*own)
        return [*parts, [p for p in learning if id(p) not in owned]]

    def _broken(self, plan: Plan, losses: Tensor, norms: Sequence[float]) -> list[int]:
        """The stages of the first groups whose loss or gradient is not finite: none before them broke.

        [-1] is what groups share, where that alone is not finite.
        """
        groups = plan.groups()
        bad = [
            not all(math.isfinite(losses[k]) for k in group if plan.stages[k].scale > 0)
            or (len(norms) > 1 and not math.isfinite(norms[i]))
            for i, group in enumerate(groups)
        ]
        if len(groups) < 2 and not math.isfinite(norms[0]):
            bad = [True] * max(len(groups), 1)
        if not any(bad):
            if not math.isfinite(norms[-1]):
                return [-1]
            return []
        where = {k: i for i, group in enumerate(groups) for k in group}
        behind = {
            where[p.index]
            for p in plan.stages
            if p.index in where
            for before in plan.needed(p.index)
            if before.index in where and where[before.index] != where[p.index] and bad[where[before.index]]
        }
        return [k for i, group in enumerate(groups) if bad[i] and i not in behind for k in group]

    def _problem(self, plan: Plan, broken: Sequence[int], losses: Tensor) -> str:
        """What is not finite, in words; gradients are still there."""
        stages = [k for k in broken if k >= 0]
        for k in stages:
            if plan.stages[k].scale > 0 and not math.isfinite(losses[k]):
                return f"the loss of stage {k + 1} is {losses[k].item()}"
        for k in stages:
            if not math.isfinite(norm_of(stage_parameters(self.stack, plan, [k]))):
                return f"the gradient of stage {k + 1} is not finite"
        return "the gradient of the embedding or the head is not finite"

    def _clip(self, parts: Sequence[list[nn.Parameter]], norms: Sequence[Tensor]) -> None:
        if self.clip is not None:
            for parameters, norm in zip(parts, norms, strict=True):
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)


def engine_of(config: TopologyConfig) -> GradientEngine:
    """The engine that a run's settings name."""
    if config.backward == "autograd":
        return Autograd()
    carried = {"carried": config.carried} if config.backward == "hybrid" else {}
    return BACKWARDS[config.backward](jacobian=config.jacobian, chunk=config.jacobian_chunk, **carried)


def batch_parts(batches: Iterable[Batch], parts: int) -> Iterator[tuple[StateBatch, float]]:
    """Each batch in equal parts, with the share of its targets that each part has."""
    for given in batches:
        batch = given if isinstance(given, StateBatch) else StateBatch(*given, {})
        if parts == 1:
            yield batch, 1.0
            continue
        size, counted = len(batch.inputs) // parts, max(int(batch.mask.sum()), 1)
        for first in range(0, len(batch.inputs), size):
            part = batch.part(slice(first, first + size))
            yield part, int(part.mask.sum()) / counted


def norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
