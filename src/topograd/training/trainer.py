"""Training a run: the schedule around the loop, and everything that lets it be stopped and continued.

A checkpoint holds the weights, the optimizers, torch's generator, the loader's position, the step and the
seconds so far. A run that is killed at any instant and resumed gives the losses, bit for bit, that it would
have given (on the same machine, with the same number of threads).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from topograd.data import Loader, Prepared, Text, Tokenizer
from topograd.data.image_loader import ImageLoader
from topograd.data.images import DIGITS
from topograd.errors import CheckpointError, ConfigError, RunError
from topograd.nn.layer_dropout import dropout_rates
from topograd.nn.stack import Stack
from topograd.registry import Registry
from topograd.runs.based import BasedStore, bind_base
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import (
    Opened,
    bind_tokenizer,
    build_stack,
    check_owner,
    find_checkpoint,
    load_data,
    load_images,
    open_run,
    read_settings,
    read_tokenizer,
    topology_at,
)
from topograd.runs.topology_config import OWN_TEACHER
from topograd.topology.plan import Plan
from topograd.training.exit_heads import TOKENS, begin_exit_heads
from topograd.training.hidden_states import OnRows, StateLoader
from topograd.training.kept_states import first_rows, kept_layers, open_kept_loader, remove_states
from topograd.training.loop import Batch, Step, TrainingLoop
from topograd.training.objectives import objectives_of
from topograd.training.optimizers import make_optimizers
from topograd.training.tasks import Data, Reading, TextTask, task_of
from topograd.training.teacher import Teacher, objectives_of_config

OnStep = Callable[[int, int, list[float], Reading | None], None]
"""Called after each step with (step, steps, losses, evaluation or None)."""
TRAINERS: Registry[type[Trainer]] = Registry("search", {"none": "topograd.training.trainer:Trainer"})
"""Trainers by what they search for while the weights learn; packages above declare more."""
Make = Callable[[Run, TrainConfig, Data], "Trainer"]


def start(config: TrainConfig, folder: Path | str, make: Make | None = None) -> Trainer:
    """A new run in an empty folder; `make` builds its trainer, instead of the settings' own choice."""
    there = Path(folder).exists()
    run = Run.create(folder)
    try:
        return _begin(run, config, make)
    except BaseException:
        if not there:
            with suppress(OSError):  # what was refused leaves no empty folder behind
                run.folder.rmdir()
        raise


def _begin(run: Run, config: TrainConfig, make: Make | None) -> Trainer:
    if config.data is not None and not (config.model.task == "images" and config.data == DIGITS):
        config = replace(config, data=str(Path(config.data).absolute()))
    if config.topology.teacher not in (None, OWN_TEACHER):
        config = config.changed(teacher=str(Path(config.topology.teacher or "").absolute()))
    base = None
    if config.init is not None:
        base = open_run(Path(config.init).absolute())
        if base.config.model.task != config.model.task:
            raise ConfigError(
                f"init is {config.init}, a run on {base.config.model.task}; give one on {config.model.task}"
            )
        config = replace(config, init=str(base.run.folder))
    elif config.tokenizer == "imported":
        raise ConfigError("an imported model's tokenizer is asked for; give init, the run to begin with")
    config, data = _load(
        config, None if base is None or config.model.task == "images" else read_tokenizer(base.run)
    )
    trainer = (make or TRAINERS[config.search.kind])(run, config, data)  # first: what does not fit is refused
    if base is not None:
        begin_from(trainer.stack, base)
    if isinstance(data, Prepared):
        bind_tokenizer(run, data.tokenizer)
        if base is not None and config.tune.keeps_base:
            bind_base(run, base, data.tokenizer)
    run.write_config(config.as_dict())
    return trainer


def resume(folder: Path | str, name: str | None = None, make: Make | None = None) -> Trainer:
    """The run in `folder`, from its newest checkpoint or the one called `name`; from the start if none."""
    run = Run.open(folder)
    config = read_settings(run)
    run.manifest.verify(run.tokenizer_file.name)
    saved = read_tokenizer(run) if run.tokenizer_file.exists() else None
    config, data = _load(config, saved)
    if saved is None and isinstance(data, Prepared):  # of an earlier version, killed before it wrote one
        bind_tokenizer(run, data.tokenizer)
    found = find_checkpoint(run, name) if name is not None or run.store.names() else None
    if found is not None:
        config = topology_at(config, run.store.extra(found))
    trainer = (make or TRAINERS[config.search.kind])(run, config, data)
    if found is not None:
        trainer.load(found)
    elif config.init is not None:
        store = run.store
        based = store.open_base() if isinstance(store, BasedStore) else open_run(config.init)
        begin_from(trainer.stack, based)
    return trainer


def _load(config: TrainConfig, tokenizer: Tokenizer | None) -> tuple[TrainConfig, Data]:
    """What the settings train on, and the settings with what it says of itself."""
    return load_images(config) if config.model.task == "images" else load_data(config, tokenizer)


@torch.no_grad()
def begin_from(stack: Stack, base: Opened) -> None:
    """Give a stack the weights of a run; heads, relays and layers that the run lacks stay as they are."""
    own, given = stack.state_dict(), base.stack.state_dict()
    foreign = sorted(name for name in given if name not in own)
    if foreign:
        raise ConfigError(
            f"{base.run.folder} has {foreign[0]!r}, which the new model does not; give it the same [model]"
        )
    for name, tensor in given.items():
        if own[name].shape != tensor.shape:
            raise ConfigError(
                f"{name!r} is {tuple(tensor.shape)} in {base.run.folder} and {tuple(own[name].shape)} in the "
                "new model; give it the same [model]"
            )
        own[name].copy_(tensor)


class Trainer:
    """A run under way."""

    def __init__(self, run: Run, config: TrainConfig, data: Data) -> None:
        self.run, self.config, self.data = run, config, data
        self._known = run.store.names()
        """The run's checkpoints as this trainer knows them."""
        self.task = task_of(config, data)
        self.loader = self.task.loader
        self.states: StateLoader | None = None
        """Who gives the batches instead, where states of a frozen trunk or a teacher's logits are kept."""
        self.teacher: Teacher | None = self.task.teacher(config)
        self.stack, self.plan = build_stack(config)
        self.loop = TrainingLoop(
            self.stack,
            make_optimizers(self.stack, config.optimizer, self.plan),
            clip=config.optimizer.clip,
            bf16=config.bf16,
            backward=config.topology.backward,
            teacher=None if self.teacher is None else self.teacher.predictor,
            own_teacher=config.topology.teacher == OWN_TEACHER,
            objectives=objectives_of_config(config),
            dropout_rates=_dropout_rates(config, len(self.stack.layers)),
        )
        objectives_of(self.plan, self.loop.objectives)  # what cannot be asked is refused before it is a run
        self.loop.check_backward(self.plan)
        self.step = 0
        self.seconds = 0.0
        self._layers = kept_layers(config, self.plan)
        self._keeps = bool(self._layers or config.topology.teacher_top)
        self._position: dict[str, Any] = self.loader.position
        """Where batches with states begin: at the start, or where a checkpoint was saved."""
        if config.compile:
            for layer in self.stack.layers:
                layer.compile()

    @property
    def text(self) -> Text:
        """What a model of text is read on."""
        assert isinstance(self.task, TextTask), "settings with [images] have no text"
        return self.task.text

    def load(self, name: str) -> None:
        """Continue from a checkpoint; whatever was logged after it is dropped."""
        loaded = self.run.store.load(name, self.stack, self.loop.optimizers.optimizers)
        check_owner(self.run, loaded)
        extra = loaded.extra
        if extra.get("corpus") != self.data.digest:
            raise CheckpointError(
                f"the corpus has changed since {loaded.path} was saved, so the run cannot be continued "
                "exactly; restore the text or start a new run"
            )
        if self.teacher is not None and extra.get("teacher") != self.teacher.weights:
            raise CheckpointError(
                f"the teacher {self.config.topology.teacher} has other weights than when {loaded.path} was "
                "saved, so the run cannot be continued exactly; restore it or start a new run"
            )
        self._check_log(name, extra)
        self.step = loaded.step
        self.seconds = extra["seconds"]
        self._position = extra["loader"]
        if not self._keeps:
            self.loader.seek(self._position)
        self.loop.halted = set(extra.get("halted", ()))

    def save(self) -> str:
        """Save a checkpoint and return its name."""
        extra = {
            "loader": self._source().position,
            "seconds": self.seconds,
            "corpus": self.data.digest,
            "run": self.run.manifest.identity(),
            "metrics": self.run.log_mark(self.step),
            "halted": sorted(self.loop.halted),
            **self.more_extra(),
        }
        if self.teacher is not None:
            extra["teacher"] = self.teacher.weights
        name = self.run.store.save(
            step=self.step,
            model=self.stack,
            optimizers=self.loop.optimizers.optimizers,
            extra=extra,
            keep=self.config.keep,
        )
        self._known = self.run.store.names()
        return name

    # What a search or several processes change

    def more_extra(self) -> dict[str, Any]:
        """What else a checkpoint keeps, as JSON; `topology` is that of the weights, where it has changed."""
        return {}

    def plan_now(self) -> Plan:
        """The plan of the next step."""
        return self.plan

    def after_step(self, step: Step) -> None:
        """Called when a step is done and counted."""

    def stops(self, interrupted: Callable[[], bool]) -> bool:
        """Whether to end before the next step."""
        return interrupted()

    def batches(self) -> list[Batch]:
        """The batches of the next step."""
        loader: Iterator[Batch] = self._source()
        return [next(loader) for _ in range(self.config.accumulate)]

    def reporting(self, plan: Plan) -> list[int]:
        """The stages whose losses are logged; the others have none."""
        return plan.predicting()

    def evaluate(self) -> Reading | None:
        """What the model makes of what is held out; None where there is only a part of it."""
        return self.task.evaluate(self.stack, self.plan)

    def finish(self) -> None:
        """Called once, when the last step is done: what it makes of the model is evaluated and saved."""

    def train(
        self, stop_after: int | None = None, on_step: OnStep | None = None, on_rows: OnRows | None = None
    ) -> dict[str, Any]:
        """Train to the end, or to step `stop_after`; save, evaluate, and return the summary.

        `on_rows` sees the hidden states of a frozen trunk being computed, where there are any.
        Ctrl-C (and SIGTERM) ends after the current step in the same way; a second one ends at once.
        `finished` in the summary says whether the schedule was run to its end.
        """
        if stop_after is not None and stop_after < 1:
            raise ConfigError(f"stop-after is {stop_after}; it must be at least 1")
        last = min(self.config.steps, stop_after or self.config.steps)
        with ExitStack() as stack:
            stack.enter_context(self.run.lock())
            self._still_here()
            if not self.run.manifest.exists():  # of a run that version 0.1 made
                self.run.manifest.adopt()
            interrupted = stack.enter_context(_interrupts())
            self._open_states(on_rows)
            self._give_up_later()
            watching = self._watched(on_step)
            reading = None
            while self.step < last and not self.stops(interrupted):
                losses = self._one_step()
                reading = self._maybe_evaluate()
                if self._due(self.config.save_every) and self.step < last:
                    self.save()
                if watching:
                    watching(self.step, self.config.steps, losses, reading)
            name = self.save()
            result = self._summary(reading or self.evaluate(), name)
            self.run.write_results(result)
            if result["finished"]:
                remove_states(self.run.folder)
        return result

    def _open_states(self, on_rows: OnRows | None) -> None:
        """From here on batches come with what is kept of them, if anything is; new exits begin."""
        if self._keeps and self.states is None:
            self.states = open_kept_loader(self, self._layers, on_rows)
            self.states.seek(self._position)
        if self.config.tune.keeps_base and self.config.model.task == "text" and self.step == 0:
            begin_exit_heads(self.stack, self.plan, partial(first_rows, self, TOKENS))

    def _source(self) -> Loader | ImageLoader | StateLoader:
        return self.loader if self.states is None else self.states

    def _summary(self, reading: Reading | None, name: str) -> dict[str, Any]:
        halted = [stage + 1 for stage in sorted(self.loop.halted)]
        return {
            "run": str(self.run.folder),
            "steps": self.step,
            **({} if reading is None else reading.as_dict()),
            "weights": self.run.store.weights(name),
            "finished": self.step >= self.config.steps,
            "seconds": self.seconds,
            **({"halted": halted} if halted else {}),
        }

    def _watched(self, on_step: OnStep | None) -> OnStep | None:
        """The callback, behind a reader of geometry where the settings ask for one."""
        if not self.config.geometry_every:
            return on_step
        from topograd.training.monitors import GeometryLog

        return GeometryLog(self, self.config.geometry_every, on_step)

    def _still_here(self) -> None:
        """Refuse to go on where somebody else has trained since this trainer was made."""
        if self.run.store.names() != self._known:
            raise RunError(
                f"{self.run.folder} was trained on by another process while it was being opened; "
                "resume it again"
            )

    def _give_up_later(self) -> None:
        """Drop the checkpoints and records of later steps, checkpoints first: a kill in between is mended."""
        names = self.run.store.names()
        if names and int(names[-1].rpartition("-")[2]) > self.step:
            self.save()
        self.run.rewind_metrics(self.step)

    def _check_log(self, name: str, extra: dict[str, Any]) -> None:
        """Refuse a log that is not this run's up to the checkpoint; name an earlier one that it does fit."""
        mark = extra.get("metrics")
        if mark is None or self.run.has_log(mark):
            return
        names = self.run.store.names()
        marks = {n: self.run.store.extra(n).get("metrics") for n in names[: names.index(name)]}
        fits = [n for n, m in marks.items() if m is not None and self.run.has_log(m)]
        earlier = f"resume with --from {fits[-1]}, which it fits, " if fits else ""
        raise RunError(
            f"{self.run.metrics_file} is not the log that {name} was saved with: it is missing, cut or of "
            f"another run; restore it, {earlier}or make it an empty file to go on without its records"
        )

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _one_step(self) -> list[float]:
        began = time.perf_counter()
        config, plan = self.config, self.plan_now()
        self.loop.optimizers.set_rates(self.step, config.steps)
        done = self.loop.step(plan, self.batches(), self.step + 1)
        losses = [done.losses[k].item() for k in self.reporting(plan)]
        self.step += 1
        self.seconds += time.perf_counter() - began
        seen = self.step * config.accumulate * self.task.units
        record = {
            "kind": "train",
            "step": self.step,
            "loss": losses,
            "grad_norm": done.norm,
            self.task.unit: seen,
        }
        self.run.log(record | {"seconds": self.seconds})
        if done.halted:
            stages = [stage + 1 for stage in done.halted]
            self.run.log({"kind": "halted", "step": self.step, "stages": stages})
        self.after_step(done)
        if self.step == config.steps:
            self.finish()
        return losses

    def _maybe_evaluate(self) -> Reading | None:
        if not self._due(self.config.eval_every) and self.step != self.config.steps:
            return None
        reading = self.evaluate()
        if reading is None:
            return None
        self.run.log({"kind": "eval", "step": self.step, **reading.logged, "seconds": self.seconds})
        return reading


def _dropout_rates(config: TrainConfig, layers: int) -> list[float]:
    return dropout_rates(layers, config.tune.layer_dropout) if config.tune.layer_dropout else []


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
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
        heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
    except ValueError:  # not in the main thread: signals are somebody else's
        before = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
