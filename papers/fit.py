"""One training as studies do it, on batches that are given, and the choice of its rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.errors import DivergenceError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import Objective
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig
from topograd.topology.plan import Plan
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner

POINTS = 20
"""Of a trajectory."""
Watch = Callable[[int, Stack, Plan, Tensor, Tensor], None]
"""Called before each step with its number, the model and the batch."""


def fit(
    stack: Stack,
    plan: Plan,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    config: OptimizerConfig,
    watch: Watch | None = None,
    *,
    teacher: Predictor | None = None,
    objectives: Mapping[str, Objective] | None = None,
    penalty: Callable[[], None] | None = None,
) -> Tensor:
    """`steps` steps on as many batches; returns the losses of the stages (steps, stages), nan for none.

    A stage that breaks ends it: what is left would be another model.

    `penalty` adds to the gradients, once they are there and before the optimizers step.
    """
    optimizers = make_optimizers(stack, config, plan)
    if penalty is not None:
        first = next(iter(optimizers.optimizers.values()))
        first.register_step_pre_hook(lambda *_: penalty())
    loop = StepRunner(stack, optimizers, clip=config.clip, teacher=teacher, objectives=objectives)
    losses: list[Tensor] = []
    for step, (inputs, targets) in zip(range(steps), batches, strict=False):
        optimizers.set_rates(step, steps)
        if watch is not None:
            watch(step, stack, plan, inputs, targets)
        result = loop.step(plan, [(inputs, targets)], step + 1)
        if result.halted:
            raise DivergenceError(
                f"stage {result.halted[0] + 1} broke at step {step + 1}",
                setting="sizes",
                remedy="take other sizes",
            )
        losses.append(result.losses)
    return torch.stack(losses)


def best_between(grid: Sequence[float], loss: Callable[[float], float]) -> float:
    """The best rate of a geometric grid, which grows by one while its best is at an end.

    >>> best_between((1.0, 2.0, 4.0), lambda rate: abs(rate - 15))
    16.0
    """
    rates, factor = sorted(grid), grid[1] / grid[0]
    losses = {rate: loss(rate) for rate in rates}
    while (best := min(rates, key=lambda rate: losses[rate])) in (rates[0], rates[-1]):
        beyond = best / factor if best == rates[0] else best * factor
        rates = sorted([*rates, beyond])
        losses[beyond] = loss(beyond)
    return best


def trajectory(losses: Tensor, points: int = POINTS) -> list[dict[str, Any]]:
    """The way of a training in few numbers: the mean loss of each stage, in nats, up to each of some steps.

    losses (steps, stages). A point is the mean over the steps since the one before; None for no loss.
    """
    ends = sorted({round(len(losses) * (i + 1) / points) for i in range(points)} - {0})
    result, begin = [], 0
    for end in ends:
        means = losses[begin:end].double().mean(0).tolist()
        result.append({"step": end, "losses": [None if math.isnan(mean) else mean for mean in means]})
        begin = end
    return result
