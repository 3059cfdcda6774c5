"""One training as studies do it: the usual optimizers, schedule and loop, on batches that are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from topograd.errors import DivergenceError
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig
from topograd.topology.plan import Plan
from topograd.training.forward import Predictor
from topograd.training.loop import TrainingLoop
from topograd.training.objectives import Objective
from topograd.training.optimizers import make_optimizers

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
) -> None:
    """`steps` steps on as many batches. A stage that breaks ends it: what is left would be another model.

    `penalty` adds to the gradients, once they are there and before the optimizers step.
    """
    optimizers = make_optimizers(stack, config, plan)
    if penalty is not None:
        first = next(iter(optimizers.optimizers.values()))
        first.register_step_pre_hook(lambda *_: penalty())
    loop = TrainingLoop(stack, optimizers, clip=config.clip, teacher=teacher, objectives=objectives)
    for step, (inputs, targets) in zip(range(steps), batches, strict=False):
        optimizers.set_rates(step, steps)
        if watch is not None:
            watch(step, stack, plan, inputs, targets)
        found = loop.step(plan, [(inputs, targets)], step + 1)
        if found.halted:
            raise DivergenceError(f"stage {found.halted[0] + 1} broke at step {step + 1}; take other sizes")
