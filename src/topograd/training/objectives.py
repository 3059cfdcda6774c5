"""What a stage is asked: a loss of its logits, computed chunk by chunk.

    cross-entropy   CE(z_k, y)                                      "Stage-Partitioned Learning" eq. 5
    residual        CE(A_{k-1} + z_k, y),  A_{k-1} = Σ_{j<k} sg(z_j)      eq. 42, the residual Log-OP
    distillation    (1-m) CE(z_k, y) + m T² KL(softmax(t/T) ‖ softmax(z_k/T)),  t the teacher's logits

An objective is a function from a chunk's logits (C, V), the detached sum of the earlier stages' logits (or
None), the teacher's logits (or None) and the targets (C) to the sum of the losses of the chunk. `stage_loss`
divides by the number of targets. Plain cross-entropy of a linear readout takes the fast path; everything
else recomputes each chunk's logits in its backward, so that they are never whole in memory either. Logits
of earlier stages and of a teacher are recomputed from their hidden states, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topograd.errors import ConfigError, TopologyError
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan
from topograd.training.linear_cross_entropy import chunk_tokens, linear_cross_entropy

Logits = Callable[[slice], Tensor]
"""Logits of a range of tokens, made when they are asked for."""


class Objective(Protocol):
    """The summed loss of a chunk."""

    uses_prior: bool
    """Whether it looks at the logits of earlier stages; their hidden states are kept only then."""

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor: ...


class CrossEntropy:
    """Predict the target, whatever the stages before said."""

    uses_prior = False

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")


class Residual:
    """Correct the sum of the stages before."""

    uses_prior = True

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        return F.cross_entropy(logits if prior is None else prior + logits, targets, reduction="sum")


@dataclass(frozen=True)
class Distillation:
    """Follow a teacher's distribution, and the targets."""

    temperature: float = 2.0
    mix: float = 0.5
    """The teacher's share of the loss."""
    uses_prior = False

    def __post_init__(self) -> None:
        if not self.temperature > 0 or not 0 <= self.mix <= 1:
            raise ConfigError(
                f"distillation has temperature {self.temperature} and mix {self.mix}; "
                "the temperature must be positive and the mix lie in [0, 1]"
            )

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        if teacher is None:
            raise ConfigError("the objective 'distillation' needs a teacher; pass teacher= to train_step")
        t = self.temperature
        counted = targets != -100
        student = F.log_softmax(logits[counted] / t, dim=-1)
        target = F.log_softmax(teacher[counted].to(logits.dtype) / t, dim=-1)
        divergence = F.kl_div(student, target, reduction="sum", log_target=True)
        return (1 - self.mix) * F.cross_entropy(
            logits, targets, reduction="sum"
        ) + self.mix * t**2 * divergence


OBJECTIVES: Mapping[str, Objective] = {
    "cross-entropy": CrossEntropy(),
    "residual": Residual(),
    "distillation": Distillation(),
}


def objective_named(objectives: Mapping[str, Objective], name: str) -> Objective:
    """The objective that a stage asks for by name."""
    if name not in objectives:
        raise TopologyError(f"objective {name!r} is unknown; known are {sorted(objectives)}")
    return objectives[name]


def objectives_of(plan: Plan, objectives: Mapping[str, Objective]) -> list[Objective]:
    """What each stage of `plan` is asked, if the logits that it wants to hear exist."""
    asked = [objective_named(objectives, planned.stage.objective) for planned in plan.stages]
    for planned, objective in zip(plan.stages, asked, strict=True):
        if planned.scale == 0 or not objective.uses_prior:
            continue
        for earlier in plan.stages[: planned.index]:
            if earlier.stage.frozen and not earlier.predicts:
                raise TopologyError(
                    f"stage {planned.index} has the objective {planned.stage.objective!r}, which needs the "
                    f"logits of frozen stage {earlier.index}, but that stage was trained without a loss; "
                    "use 'cross-entropy', or a base with a loss at every stage"
                )
    return asked


def stage_loss(
    stack: Stack,
    h: Tensor,
    stage: int,
    objective: Objective,
    targets: Tensor,
    prior: Sequence[tuple[int, Tensor]] = (),
    teacher: Logits | None = None,
) -> Tensor:
    """The mean loss of one stage. `prior` holds the earlier stages' (index, detached hidden state)."""
    projection = stack.projection(stage)
    if isinstance(objective, CrossEntropy) and projection is not None:
        x = projection.normalize(h)
        return linear_cross_entropy(
            x, projection.weight, targets, projection.bias, softcap=projection.softcap
        )
    tokens = targets.numel()
    flat, y = h.reshape(tokens, *h.shape[targets.dim() :]), targets.reshape(tokens)
    chunk = chunk_tokens(stack.readout(flat[:1].detach(), stage).shape[-1])
    before = [(k, earlier.reshape(tokens, *earlier.shape[targets.dim() :])) for k, earlier in prior]
    before = before if objective.uses_prior else []

    def part(rows: Tensor, start: int) -> Tensor:
        where = slice(start, start + len(rows))
        said: Tensor | None = None
        with torch.no_grad():
            for k, earlier in before:
                z = stack.readout(earlier[where], k)
                said = z if said is None else said + z
            taught = None if teacher is None else teacher(where)
        return objective(stack.readout(rows, stage), said, taught, y[where])

    total = torch.zeros((), device=h.device, dtype=h.dtype)
    for i, rows in enumerate(flat.split(chunk)):
        total = total + checkpoint(part, rows, i * chunk, use_reentrant=False)
    return total / (y != -100).sum().clamp(min=1)


def teacher_logits(stack: Stack, inputs: Tensor) -> Logits:
    """A frozen stack as a teacher: its last hidden state is kept, its logits are made by the chunk."""
    with torch.no_grad():
        h = stack.embed(inputs)
        bus = stack.bus(h, inputs)
        for layer in stack.layers:
            h = layer(h, bus)
    flat = h.reshape(inputs.numel(), *h.shape[inputs.dim() :])
    return lambda rows: stack.readout(flat[rows], stack.last_stage)
