"""Actions of a run on alarms of its loss and gradient norm: `train --on-alarm`.

    train --on-alarm rollback --save-every 250

The step runner asks before each step of the optimizers (`StepRunner.allows`). What is done is
`geometry/monitors/guard.py`; a rollback takes weights, optimizers and torch's generators from the newest
checkpoint of the schedule (`save_every`) that had no alarm in the `CALM` steps before it, bit for bit, and
the batches go on. Checkpoints by the clock or by an interrupt are not taken: they are a matter of speed.

Each action is a record of kind "alarm" in the run's metrics: step, action, signals with their usual values,
where the batch begins in the data, and the step that a rollback went back to. The guard's readings are in
every checkpoint, so that a resumed run acts as the uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from topograd.geometry.monitors.early_warning import EarlyWarning
from topograd.geometry.monitors.guard import CALM, Action, Guard, OnAlarm

if TYPE_CHECKING:
    from topograd.training.runs import RunTask


@dataclass
class RunGuard:
    """The guard of one run."""

    task: RunTask
    action: OnAlarm
    batch: Any = None
    """Where the batches of the next step begin."""
    norm: float = 0.0
    """Of the gradient, as the step runner has measured it."""

    def __post_init__(self) -> None:
        monitor = EarlyWarning(self.task.stack, signals=("loss", "gradient_norm"))
        monitor.norm = lambda: self.norm
        own = [one for one in self.task.optimizers.values() if isinstance(one, Optimizer)]
        self.guard = Guard(monitor, self.action, self.task.stack, own, keeper=self)

    def allows(self, number: int, losses: Tensor, norms: Sequence[float]) -> bool:
        """Whether the step with this number is taken; its loss is the mean of the stages'."""
        own = [loss for k, loss in enumerate(losses.tolist()) if k not in self.task.loop.halted]
        finite = [loss for loss in own if not math.isnan(loss)]
        broken = any(math.isinf(loss) for loss in own) or not all(map(math.isfinite, norms)) or not finite
        self.norm = math.hypot(*norms)
        return self.guard.allows(number, math.inf if broken else sum(finite) / len(finite), batch=self.batch)

    def keep(self, step: int) -> None:
        """Checkpoints are the trainer's."""

    def restore(self) -> int | None:
        """Weights and optimizers of the newest good checkpoint; its step."""
        task, every = self.task, self.task.config.save_every
        names = [name for name in task.run.store.names() if _step(name) % every == 0]
        for name in reversed(names):
            last = task.run.store.extra(name).get("alarms", {}).get("last", -CALM)
            if _step(name) - last >= CALM:
                task.run.store.load(name, task.model, task.optimizers)
                return _step(name)
        return None

    def log(self) -> None:
        """Write down what was done since the last call."""
        for one in self.guard.actions:
            self.task.run.log(_record(one))
        self.guard.actions.clear()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.guard.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.guard.load_state(state)


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _record(one: Action) -> dict[str, Any]:
    signals = {
        alarm.signal: {"value": alarm.value if math.isfinite(alarm.value) else None, "usual": alarm.usual}
        for alarm in one.alarms
    }
    return {
        "kind": "alarm",
        "step": one.step,
        "action": one.action,
        "signals": signals,
        "batch": one.batch,
        "restored": one.restored,
    }
