"""Actions on alarms in a training loop: report, leave the step out, lower the rate, or roll back.

    guard = Guard(EarlyWarning(model, optimizer=optimizer), "rollback", model, optimizer)
    with guard.monitor:
        for step, batch in enumerate(batches):
            loss = ...; optimizer.zero_grad(); loss.backward()
            if guard.allows(step, loss, batch=f"batch {step}"):   # before gradients are clipped
                optimizer.step()

    report      the step is taken
    skip        it is not
    lower       it is taken, and those of the next `CALM` steps, with `LOWER` times the learning rate
    rollback    it is not, and weights and optimizer become, bit for bit, what was kept last; the data go on

An alarm here is an outlier of a signal of `ACTING` (`early_warning.py`), at every reading, without a rest; a
loss that is not finite is one in any case. Outliers count among the readings that later ones are compared
with, so that a lasting change is accepted after half of that memory. What is kept is kept only when the last
`CALM` steps had no alarm.

Cost: that of the monitor; a rollback needs a copy of weights and optimizer, made every `keep_every` steps.
Source: skipping batches and restarting from an earlier checkpoint as in Chowdhery et al., "PaLM".
Limits. A fault that lasts (wrong labels from now on) is no matter of a few steps: no action mends it. With
gradient accumulation call it once a step of the optimizer.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from topograd.errors import DivergenceError, GeometryError
from topograd.geometry.monitors.early_warning import Alarm, EarlyWarning

OnAlarm = Literal["report", "skip", "lower", "rollback"]
ACTING = ("loss", "gradient_norm", "update_size", "logit_size")
LOWER = 0.1
CALM = 20
"""Steps without an alarm."""
MAX_REFUSED = 50
"""Steps in a row that are left out; then the training ends."""


@dataclass(frozen=True)
class Action:
    """What was done at a step, and why."""

    step: int
    action: OnAlarm
    alarms: tuple[Alarm, ...]
    batch: Any
    """The name that was given to the batch."""
    restored: int | None = None
    """The step whose weights a rollback took; None where nothing was kept yet, and the step was left out."""

    def __str__(self) -> str:
        why = "; ".join(map(str, self.alarms)) or f"step {self.step}: the loss is not finite"
        back = "" if self.restored is None else f" to step {self.restored}"
        return f"{why}: {self.action}{back}, batch {self.batch}"


class Keeper(Protocol):
    """Where good weights are."""

    def keep(self, step: int) -> None:
        """Keep what is there now, if it is time."""

    def restore(self) -> int | None:
        """Go back to what was kept last; its step, or None."""


class MemoryKeeper:
    """A copy of the weights and of the optimizer's state, every so many steps."""

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer], every: int) -> None:
        if every < 1:
            raise GeometryError(setting="keep_every", given=every, allowed="at least 1 step")
        self._model, self._optimizers, self._every = model, list(optimizers), every
        self._kept: tuple[int, dict[str, Any], list[dict[str, Any]]] | None = None

    def keep(self, step: int) -> None:
        if self._kept is None or step - self._kept[0] >= self._every:
            states = [copy.deepcopy(one.state_dict()["state"]) for one in self._optimizers]
            self._kept = step, {name: x.clone() for name, x in self._model.state_dict().items()}, states

    def restore(self) -> int | None:
        if self._kept is None:
            return None
        step, weights, states = self._kept
        self._model.load_state_dict(weights)
        for one, state in zip(self._optimizers, states, strict=True):
            groups = one.state_dict()["param_groups"]  # rates are the schedule's
            one.load_state_dict({"state": copy.deepcopy(state), "param_groups": groups})
        return step


class Guard:
    """Reads a monitor before every step and says whether the step is taken."""

    def __init__(
        self,
        monitor: EarlyWarning,
        action: OnAlarm,
        model: nn.Module | None = None,
        optimizer: Optimizer | Iterable[Optimizer] = (),
        *,
        keep_every: int = 50,
        keeper: Keeper | None = None,
    ) -> None:
        """`keeper` replaces copies in memory for a rollback."""
        if action not in get_args(OnAlarm):
            raise GeometryError(setting="action", given=action, allowed=", ".join(get_args(OnAlarm)))
        self.monitor, self.action = monitor, action
        monitor.rest = 0
        self.actions: list[Action] = []
        self._model, self._keeper, self._keep_every = model, keeper, keep_every
        self._last = -CALM
        self._refused = 0
        self._lowered: list[float] = []
        self.watch([optimizer] if isinstance(optimizer, Optimizer) else list(optimizer))

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Act on these optimizers; called by the constructor, and again where one is made later."""
        self._optimizers = list(optimizers)
        if self.action == "lower":
            for one in self._optimizers:
                one.register_step_pre_hook(self._lower)
                one.register_step_post_hook(self._raise)
        if self.action == "rollback" and self._keeper is None and self._optimizers:
            if self._model is None:
                raise GeometryError(setting="model", given=None, allowed="the model that a rollback restores")
            self._keeper = MemoryKeeper(self._model, self._optimizers, self._keep_every)

    def allows(self, step: int, loss: Tensor | float | None, batch: Any = None) -> bool:
        """Whether to take the step; call it after backward, before gradients are clipped."""
        calm = step - self._last >= CALM
        alarms = tuple(one for one in self.monitor.read(step, loss) if one.signal in ACTING)
        number = loss.detach() if isinstance(loss, Tensor) else loss
        broken = number is not None and not math.isfinite(float(number))
        if not alarms and not broken:
            if calm and self._keeper is not None:
                self._keeper.keep(step)
            self._refused = 0
            return True
        self._last = step
        restored = self._keeper.restore() if self.action == "rollback" and self._keeper is not None else None
        self.actions.append(Action(step, self.action, alarms, step if batch is None else batch, restored))
        if self.action in ("report", "lower"):
            return True
        self._refused += 1
        if self._refused > MAX_REFUSED:
            raise DivergenceError(
                f"{self._refused} steps in a row were left out: {self.actions[-1]}",
                setting="on_alarm",
                given=self.action,
                remedy="lower the learning rates, or look at the data",
            )
        return False

    def state(self) -> dict[str, Any]:
        """What a resumed training needs to act in the same way, as JSON."""
        return {"monitor": self.monitor.state(), "last": self._last, "refused": self._refused}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.monitor.load_state(state["monitor"])
        self._last, self._refused = state["last"], state["refused"]

    def _lower(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._lowered = [group["lr"] for group in optimizer.param_groups]
        if self.actions and self.monitor.last_step - self._last < CALM:
            for group in optimizer.param_groups:
                group["lr"] = LOWER * group["lr"]

    def _raise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._lowered, strict=True):
            group["lr"] = rate
