"""The training loop: steps, evaluations, checkpoints, interrupts and exact resume.

    Trainer(task, workspace).train()

What learns is the task's: a model, optimizers and a step. The folder with its lock, log and checkpoints is
the workspace (`runs/workspace.py`); without one a training runs in memory. Runs, searches, stages on several
ranks, specialists, draft stages, exits and routers are all trained here.

A checkpoint holds the weights, the optimizers, torch's generator, the task's own state, the step and the
seconds so far. A training that is killed at any instant and resumed gives the losses, bit for bit, that it
would have given (on the same machine, with the same number of threads). It is saved every so many steps and
every so many seconds; when it is saved changes no result. What changes and is neither in the model nor in the
optimizers belongs into the task's `extra_state` or `extra_tensors`; what is a function of the step alone
needs no state.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from topograd.errors import ConfigError, RunError
from topograd.files import dump_json
from topograd.runs.checkpoint import Checkpoint, Optimizers
from topograd.runs.workspace import Workspace
from topograd.training.activation_cache import OnRows


class Reading(Protocol):
    """The result of an evaluation, of any task."""

    def as_dict(self) -> dict[str, Any]: ...

    @property
    def logged(self) -> dict[str, Any]:
        """What the log keeps of it."""
        ...

    @property
    def words(self) -> str:
        """The number to show during training."""
        ...


OnStep = Callable[[int, int, list[float], Reading | None], None]
"""Called after each step with (step, steps, losses, evaluation or None)."""


@dataclass(frozen=True)
class Schedule:
    """How long a training is, and when it is saved and evaluated."""

    steps: int
    save_every: int = 0
    """Steps between checkpoints; 0 has none of these."""
    save_seconds: float = 600.0
    """Seconds after which one is saved in any case; 0 has none of these."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end alone."""
    eval_first: bool = False
    """Whether the model is evaluated before the first step too."""
    keep: int = 2
    """Checkpoints that are kept."""


@dataclass(frozen=True)
class StepRecord:
    """The losses of a step, and what else is logged."""

    losses: list[float]
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else is logged."""


class Task:
    """A model that learns, its optimizers, and one step. The trainer calls the rest when it is due."""

    model: nn.Module
    """What a checkpoint holds."""
    optimizers: Optimizers
    key: Mapping[str, Any] | None = None
    """What the result depends on, as JSON: a checkpoint with another one is refused."""
    kind = "eval"
    """What the log calls an evaluation."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def step(self, step: int) -> StepRecord:
        """One step of the optimizers; `step` are done."""
        raise TypeError(f"{type(self).__name__} has no step")

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Around a call of `Trainer.train`, before the folder is locked."""
        yield

    def prepare(self, step: int, on_rows: OnRows | None) -> None:
        """Called once the folder is locked, before the next step."""

    def callbacks(self) -> list[OnStep]:
        """Called after each step, before that of the user."""
        return []

    def should_stop(self, interrupted: Callable[[], bool]) -> bool:
        """Whether to end before the next step."""
        return interrupted()

    def wait_for_inputs(self, step: int, interrupted: Callable[[], bool]) -> int | None:
        """Wait for what the next step needs. Returns the steps that are left out; None ends the training."""
        return 0

    def after_step(self, step: int) -> None:
        """Called when a step is counted and logged."""

    def finish(self) -> None:
        """Called once, when the last step is done: what it makes of the model is evaluated and saved."""

    def evaluate(self, step: int) -> Reading | None:
        """What the model makes of what is held out; None where there is nothing to say."""
        return None

    def before_save(self, step: int) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, step: int) -> None:
        """Called when a checkpoint is in place."""

    def extra_state(self) -> dict[str, Any]:
        """What else a checkpoint keeps, as JSON."""
        return {}

    def extra_tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps beside the model and the optimizers, by name."""
        return {}

    def load_extra(self, loaded: Checkpoint) -> None:
        """Restore both; raises where the checkpoint belongs to another training."""

    def summary(self, checkpoint: str) -> dict[str, Any]:
        """What the results have beside steps, seconds and the evaluation."""
        return {}

    def end(self, results: dict[str, Any]) -> None:
        """Called with the results, before the folder is given back."""


T = TypeVar("T", bound=Task)


class Trainer(Generic[T]):
    """A training under way; `known` are the checkpoints that were there when it was opened."""

    def __init__(
        self, task: T, workspace: Workspace | None = None, known: Sequence[str] | None = None
    ) -> None:
        self.task, self.workspace = task, workspace
        self.step = 0
        self.seconds = 0.0
        self._known = self._names() if known is None else list(known)
        self._saved = 0.0
        self._by_clock: list[str] = []

    def load(self, name: str) -> None:
        """Continue from a checkpoint; whatever was logged after it is dropped when training begins."""
        assert self.workspace is not None, "nothing is saved in memory"
        loaded = self.workspace.store.load(name, self.task.model, self.task.optimizers)
        if loaded.extra.get("key") != self.task.key:
            raise RunError(
                f"checkpoint {loaded.path} belongs to a training with other settings or other data",
                remedy="restore them, or begin again",
            )
        self.task.load_extra(loaded)
        self.workspace.check_log(name)
        self.step, self.seconds = loaded.step, loaded.extra["seconds"]
        self._by_clock = loaded.extra.get("by_clock", [])

    def save(self, by_clock: bool = False) -> str:
        """Save a checkpoint and return its name. One that the clock asked for goes with the next one, and
        takes no other one's place: which checkpoints a training leaves is no matter of its speed."""
        if self.workspace is None:
            return ""
        self.task.before_save(self.step)
        own = f"step-{self.step:08d}"
        stale = [name for name in self._by_clock if name != own]
        self._by_clock = [own] if by_clock else []
        extra: dict[str, Any] = {"seconds": self.seconds, "metrics": self.workspace.log_mark(self.step)}
        if self.task.key is not None:
            extra["key"] = self.task.key
        if stale or by_clock:
            extra["by_clock"] = stale + self._by_clock
        name = self.workspace.store.save(
            step=self.step,
            model=self.task.model,
            optimizers=self.task.optimizers,
            extra=extra | self.task.extra_state(),
            keep=self.task.schedule.keep + len(stale) + by_clock,
            tensors=self.task.extra_tensors(),
        )
        for other in stale:
            self.workspace.drop_checkpoint(other)
        self.task.after_save(self.step)
        self._known, self._saved = self._names(), time.monotonic()
        return name

    def train(
        self, stop_after: int | None = None, on_step: OnStep | None = None, on_rows: OnRows | None = None
    ) -> dict[str, Any]:
        """Train to the end, or to step `stop_after`; save, evaluate, and return the summary.

        `on_rows` sees the hidden states of a frozen trunk being computed, where there are any.
        Ctrl-C (and SIGTERM) ends after the current step in the same way; a second one ends at once.
        `finished` in the summary is whether the schedule was run to its end.
        """
        if stop_after is not None and stop_after < 1:
            raise ConfigError(setting="stop_after", given=stop_after, allowed="at least 1")
        task, schedule = self.task, self.task.schedule
        last = min(schedule.steps, stop_after or schedule.steps)
        with ExitStack() as stack:
            stack.enter_context(task.running(self.step))
            stack.enter_context(nullcontext() if self.workspace is None else self.workspace.lock())
            if self.workspace is not None:
                self.workspace.check_unmodified(self._known)
            interrupted = stack.enter_context(interrupts())
            task.prepare(self.step, on_rows)
            self._drop_future_checkpoints()
            callbacks = [*task.callbacks(), *([] if on_step is None else [on_step])]
            reading = self._evaluate() if schedule.eval_first and not self._known else None
            self._saved = time.monotonic()
            while self.step < last and not task.should_stop(interrupted):
                skipped = task.wait_for_inputs(self.step, interrupted)
                if skipped is None:
                    break
                self.step += skipped
                losses = self._one_step()
                due = self._due(schedule.eval_every) or self.step == schedule.steps
                reading = self._evaluate() if due else None
                if self.step < last and self._due(schedule.save_every):
                    self.save()
                elif self.step < last and 0 < schedule.save_seconds <= time.monotonic() - self._saved:
                    self.save(by_clock=True)
                for callback in callbacks:
                    callback(self.step, schedule.steps, losses, reading)
            name = self.save()
            results = self._results(reading or task.evaluate(self.step), name)
            task.end(results)
        return results

    def _one_step(self) -> list[float]:
        began = time.perf_counter()
        done = self.task.step(self.step)
        self.step += 1
        self.seconds += time.perf_counter() - began
        record = {"kind": "train", "step": self.step, "loss": done.losses, **done.more}
        self._log(record | {"seconds": self.seconds})
        self.task.after_step(self.step)
        if self.step == self.task.schedule.steps:
            self.task.finish()
        return done.losses

    def _evaluate(self) -> Reading | None:
        reading = self.task.evaluate(self.step)
        if reading is not None:
            self._log({"kind": self.task.kind, "step": self.step, **reading.logged, "seconds": self.seconds})
        return reading

    def _results(self, reading: Reading | None, name: str) -> dict[str, Any]:
        return {
            "steps": self.step,
            **({} if reading is None else reading.as_dict()),
            "finished": self.step >= self.task.schedule.steps,
            "seconds": self.seconds,
            **self.task.summary(name),
        }

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _drop_future_checkpoints(self) -> None:
        """Delete checkpoints, then records, of later steps. Safe to interrupt: the next resume repeats it."""
        if self.workspace is None:
            return
        names = self._names()
        if names and int(names[-1].rpartition("-")[2]) > self.step:
            self.save()
        self.workspace.rewind_metrics(self.step if names else -1)

    def _names(self) -> list[str]:
        return [] if self.workspace is None else self.workspace.store.names()

    def _log(self, record: Mapping[str, Any]) -> None:
        if self.workspace is not None:
            self.workspace.log(record)


def train_task(task: Task, folder: Path | None, on_step: OnStep | None = None) -> None:
    """Train a task to its end. In a folder it continues a training with the same `key`;
    checkpoints with another one are deleted.

    Ctrl-C (and SIGTERM) saves, and is then raised as KeyboardInterrupt: the caller has no result.
    """
    task.key = json.loads(dump_json(dict(task.key or {})))  # as a checkpoint has it
    workspace = None if folder is None else Workspace(folder)
    if workspace is not None:
        workspace.folder.mkdir(parents=True, exist_ok=True)
        with workspace.lock():
            if any(workspace.store.extra(name).get("key") != task.key for name in workspace.store.names()):
                shutil.rmtree(workspace.checkpoints)
    trainer = Trainer(task, workspace)
    if workspace is not None and workspace.store.names():
        trainer.load(workspace.store.names()[-1])
    if not trainer.train(on_step=on_step)["finished"]:
        kept = "nothing is kept" if workspace is None else "the same command goes on from there"
        raise KeyboardInterrupt(f"stopped at step {trainer.step} of {task.schedule.steps}; {kept}")


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within it, a first Ctrl-C or SIGTERM only sets a flag, which the function it yields reads.

    A second one is raised at once: what is being saved is then not saved, and what was saved before stands.
    A signal that is ignored, as nohup and shells have it for jobs in the background, stays ignored.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    try:
        handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in handled}
    except ValueError:  # not in the main thread: signals are the caller's
        before = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
