"""Objectives of stages: losses of their logits, computed chunk by chunk.

    cross-entropy   CE(z_k, y)                                      "Stage-Partitioned Learning" eq. 5
    z-loss          CE(z_k, y) + c (log Z)²,  log Z = logsumexp(z_k)      `optim/z_loss.py`
    residual        CE(A_{k-1} + z_k, y),  A_{k-1} = Σ_{j<k} sg(z_j)      eq. 42, the residual Log-OP
    pooled          CE(Σ_j w_j sg(z_j) + w_k z_k, y), the terms those of the plan's exit after stage k
    distillation    (1-m) CE(z_k, y) + m T² KL(softmax(t/T) ‖ softmax(z_k/T)),  t the teacher's logits

An objective is a function from a chunk's logits (C, V), the detached sum of the earlier stages' logits (or
None), the teacher's logits (or None) and the targets (C) to the sum of the losses of the chunk. `stage_loss`
divides by the number of targets. Plain cross-entropy of a linear readout takes the fast path; everything
else recomputes each chunk's logits in its backward, so that they are never whole in memory either. Logits
of earlier stages and of a teacher are recomputed from their hidden states, chunk by chunk. Objectives that
read more than logits are in `local_objectives.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topograd.errors import ConfigError, TopologyError
from topograd.exec.forward import Predictor, predict
from topograd.exec.linear_cross_entropy import chunk_tokens, linear_cross_entropy
from topograd.exec.z_loss import z_loss
from topograd.nn.stack import Stack
from topograd.registry import Registry
from topograd.topology.plan import Plan

Logits = Callable[[slice], Tensor]
"""Logits of a range of tokens, computed on demand."""


class Objective(Protocol):
    """The summed loss of a chunk: any function of this signature, or an object with `uses_prior`."""

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor: ...


def uses_prior(objective: Objective) -> bool:
    """Whether it reads the logits of earlier stages, whose hidden states are kept only then.

    That is its attribute `uses_prior`; a plain function has none and does not read them.
    """
    return getattr(objective, "uses_prior", False)


class ClassObjective:
    """Base of objectives whose targets are class numbers."""


@dataclass(frozen=True)
class CrossEntropy(ClassObjective):
    """Predict the target, whatever the stages before predict."""

    z_weight: float = 0.0
    """c of the z-loss, which keeps log Z near 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.z_weight < math.inf:
            raise ConfigError(setting="z_weight", given=self.z_weight, allowed="finite and at least 0")

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        loss = F.cross_entropy(logits, targets, reduction="sum")
        if self.z_weight:
            loss = loss + z_loss(logits, self.z_weight, "sum", targets != -100)
        return loss


class Residual(ClassObjective):
    """Correct the sum of the stages before."""

    uses_prior = True

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        return F.cross_entropy(logits if prior is None else prior + logits, targets, reduction="sum")


class Pooled(Residual):
    """Predict the target together with the other terms of the exit, each with its weight."""

    pooled = True


@dataclass(frozen=True)
class Distillation(ClassObjective):
    """Follow a teacher's distribution, and the targets."""

    temperature: float = 2.0
    mix: float = 0.5
    """The teacher's share of the loss."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(setting="temperature", given=self.temperature, allowed="positive")
        if not 0 <= self.mix <= 1:
            raise ConfigError(setting="mix", given=self.mix, allowed="in [0, 1]")

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        if teacher is None:
            problem = "the objective 'distillation' needs a teacher"
            raise ConfigError(problem, setting="teacher", remedy="pass teacher= to train_step")
        t = self.temperature
        counted = targets != -100
        student = F.log_softmax(select_counted(logits, counted) / t, dim=-1)
        target = F.log_softmax(select_counted(teacher, counted).to(logits.dtype) / t, dim=-1)
        divergence = F.kl_div(student, target, reduction="sum", log_target=True)
        return (1 - self.mix) * F.cross_entropy(
            logits, targets, reduction="sum"
        ) + self.mix * t**2 * divergence


Z_LOSS = CrossEntropy(z_weight=1e-4)
OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    {
        "cross-entropy": CrossEntropy(),
        "residual": Residual(),
        "pooled": Pooled(),
        "distillation": Distillation(),
        "z-loss": Z_LOSS,
        "diversity": "topograd.exec.local_objectives:Diversity",
        "forward-forward": "topograd.exec.local_objectives:ForwardForward",
        "autoencoder": "topograd.exec.local_objectives:Autoencoder",
        "byol": "topograd.exec.local_objectives:Byol",
        "ridge": "topograd.exec.local_objectives:Ridge",
        "inverse": "topograd.exec.local_objectives:InverseObjective",
    },
)
"""Objectives by name. An entry is an objective, or a class that makes one without arguments."""


def objective_named(name: str, objectives: Mapping[str, Objective] | None = None) -> Objective:
    """The objective of a name; `objectives` come before the registered ones."""
    entry: Any = objectives[name] if objectives is not None and name in objectives else OBJECTIVES[name]
    return entry() if isinstance(entry, type) else entry


def objectives_of(plan: Plan, objectives: Mapping[str, Objective] | None = None) -> list[Objective]:
    """The objective of each stage of `plan`; raises if it uses logits that do not exist or do not predict."""
    chosen = [objective_named(planned.stage.objective, objectives) for planned in plan.stages]
    for planned, objective in zip(plan.stages, chosen, strict=True):
        if planned.scale == 0 or not uses_prior(objective):
            continue
        if plan.prediction.alone and planned.index > plan.predicting()[0]:
            raise TopologyError(
                f"the objective {planned.stage.objective!r} corrects the sum of the stages before "
                "it, and the plan predicts by one stage alone",
                setting="prediction",
                given=plan.topology.prediction,
                remedy="give the topology prediction='sum'",
            )
        for earlier in plan.stages[: planned.index]:
            if plan.topology.stages[earlier.index].frozen and not earlier.predicts:
                raise TopologyError(
                    f"stage {planned.index} has the objective {planned.stage.objective!r}, which "
                    f"needs the logits of frozen stage {earlier.index}, but that stage was "
                    "trained without a loss",
                    setting="objective",
                    given=planned.stage.objective,
                    remedy="use 'cross-entropy', or a base with a loss at every stage",
                )
    return chosen


def stage_loss(
    stack: Stack,
    h: Tensor,
    stage: int,
    objective: Objective,
    targets: Tensor,
    prior: Sequence[tuple[int, Tensor, float]] = (),
    teacher: Logits | None = None,
    weight: float = 1.0,
) -> Tensor:
    """The mean loss of one stage. `prior` holds the earlier stages' (head, detached hidden state, weight),
    and `weight` is that of this stage's logits beside them."""
    _check_targets(targets, h, objective)
    projection = stack.projection(stage)
    if isinstance(objective, CrossEntropy) and projection is not None:
        x, y = _counted(h, targets)
        return linear_cross_entropy(
            projection.normalize(x),
            projection.weight,
            y,
            projection.bias,
            low_rank=projection.low_rank,
            softcap=projection.softcap,
            z_weight=objective.z_weight,
        )
    tokens = targets.numel()
    flat, y = h.reshape(tokens, *h.shape[targets.dim() :]), targets.reshape(tokens)
    chunk = chunk_tokens(stack.readout(flat[:1].detach(), stage).shape[-1])
    before = [(k, earlier.reshape(tokens, *earlier.shape[targets.dim() :]), w) for k, earlier, w in prior]
    before = before if uses_prior(objective) else []

    def part(states: Tensor, start: int) -> Tensor:
        where = slice(start, start + len(states))
        summed: Tensor | None = None
        with torch.no_grad():
            for k, earlier, share in before:
                z = stack.readout(earlier[where], k)
                z = z if share == 1 else share * z
                summed = z if summed is None else summed + z
            target = None if teacher is None else teacher(where)
        z = stack.readout(states, stage)
        return objective(z if weight == 1 else weight * z, summed, target, y[where])

    total = torch.zeros((), device=h.device, dtype=h.dtype)
    if tokens <= chunk:  # one chunk is whole either way, so there is nothing to recompute
        return part(flat, 0) / (y != -100).sum().clamp(min=1)
    for i, states in enumerate(flat.split(chunk)):
        total = total + checkpoint(part, states, i * chunk, use_reentrant=False)
    return total / (y != -100).sum().clamp(min=1)


def _check_targets(targets: Tensor, h: Tensor, objective: Objective) -> None:
    leading = tuple(h.shape[: min(targets.dim(), h.dim() - 1)])
    if tuple(targets.shape) != leading:
        raise ConfigError(
            setting="targets",
            given=tuple(targets.shape),
            allowed=f"one for each position, of shape {leading}",
        )
    if isinstance(objective, ClassObjective) and targets.dtype not in (torch.int64, torch.uint8):
        raise ConfigError(
            f"targets are {targets.dtype}",
            setting="targets",
            given=targets.dtype,
            allowed="class numbers (torch.int64)",
            remedy="register an objective of your own in tg.OBJECTIVES for other targets",
        )


def every_nth(targets: Tensor, n: int) -> Tensor:
    """Targets of which every n-th counts, the others being -100; shifted by one in each next sequence.

    >>> every_nth(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), 2).tolist()
    [[1, -100, 3, -100], [-100, 6, -100, 8]]
    """
    if n == 1:
        return targets
    place = torch.zeros_like(targets)
    for dim, size in enumerate(targets.shape):
        steps = torch.arange(size, device=targets.device)
        place = place + steps.view([-1 if d == dim else 1 for d in range(targets.dim())])
    return targets.masked_fill(place % n != 0, -100)


def select_counted(x: Tensor, counted: Tensor) -> Tensor:
    """x (tokens, ...) where `counted`. On a GPU all of it, the rest zero: selecting would synchronize."""
    if x.device.type == "cpu":
        return x[counted]
    return x.masked_fill(~counted.view(-1, *[1] * (x.dim() - 1)), 0)


def _counted(h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and targets; where most targets are -100, as in a chat, only the others.

    On a GPU all of them: selecting would synchronize.
    """
    y = targets.reshape(-1)
    counted = y != -100
    if y.device.type != "cpu" or 2 * int(counted.sum()) >= len(y):
        return h, targets
    return h.reshape(len(y), *h.shape[targets.dim() :])[counted], y[counted]


def teacher_logits(
    teacher: Predictor,
    inputs: Tensor,
    targets: Tensor | None = None,
    states: Mapping[int, Tensor] | None = None,
) -> Logits:
    """A model as a teacher: its hidden states are kept, its logits are computed chunk by chunk.

    `targets` have the shape of the predictions, where that is not the inputs' (an image has one).
    `states` are known hidden states of the teacher by layer.
    """
    like = inputs if targets is None else targets
    with torch.no_grad():
        outputs = teacher.outputs(inputs, states)
    flat = {k: h.reshape(like.numel(), *h.shape[like.dim() :]) for k, h in outputs.items()}
    full = teacher.plan.prediction.full
    return lambda part: predict(teacher.stack, teacher.plan, {k: h[part] for k, h in flat.items()}, full)
