"""Run tasks of the trainer: starting a run in a new folder, and resuming one.

A task of a run has batches of its text or images, a step of its loop and its evaluation. A search of
boundaries, stages on several ranks and independent stages are runs that override the public hooks below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topograd.data import Loader, Prepared, Text, Tokenizer
from topograd.data.images import DIGITS, ImageLoader
from topograd.errors import CheckpointError, ConfigError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import Distillation, objectives_of
from topograd.nn.layer_dropout import dropout_rates
from topograd.nn.stack import Stack
from topograd.registry import Registry
from topograd.runs.checkpoint import Checkpoint, Optimizers
from topograd.runs.config import TrainConfig
from topograd.runs.delta_store import DeltaStore, bind_base
from topograd.runs.folder import Run
from topograd.runs.session import (
    LoadedRun,
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
from topograd.runs.topology_config import AVERAGE_TEACHER, OWN_TEACHER
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.activation_cache import CachedActivationLoader, OnRows
from topograd.training.alarms import RunGuard
from topograd.training.averaged_weights import AveragedWeights
from topograd.training.cached_batches import cached_layers, first_sequences, open_cached_loader, remove_cache
from topograd.training.exit_heads import TOKENS, begin_exit_heads
from topograd.training.forgetting import READ, Forgetting
from topograd.training.interface_directions import STEPS, begin_interfaces
from topograd.training.lora_directions import begin_lora
from topograd.training.optimizers import make_optimizers
from topograd.training.sources import Data, ImageSource, Teacher, source_of, teacher_of
from topograd.training.step_runner import Batch, Step, StepRunner, engine_of
from topograd.training.trainer import OnStep, Reading, Schedule, StepRecord, Task, Trainer

TASKS: Registry[type[RunTask]] = Registry("search", {"none": "topograd.training.runs:RunTask"})
"""Tasks by what they search for while the weights learn; packages above declare more."""
SOURCES: Registry[Callable[[Path | str], Path]] = Registry("model source")
"""Who makes a run of a model from outside."""


class RunTask(Task):
    """A run under way."""

    loop: StepRunner
    average: AveragedWeights[Stack] | None = None
    """What teaches, where an average of the weights does."""
    last: Step
    """What the last step found."""

    def __init__(self, run: Run, config: TrainConfig, data: Data) -> None:
        every = config.save_every, config.save_seconds, config.eval_every
        first = config.tune.measures_forgetting
        super().__init__(Schedule(config.steps, *every, eval_first=first, keep=config.keep))
        self.run, self.config, self.data = run, config, data
        self.source = source_of(config, data)
        self.loader = self.source.loader
        self.states: CachedActivationLoader | None = None
        """Who gives the batches instead, where states of a frozen trunk or a teacher's logits are kept."""
        self.teacher: Teacher | None = teacher_of(config, data)
        self.stack, self.plan = build_stack(config)
        table, rate = config.topology, config.tune.layer_dropout
        self.model = self.stack
        self.loop = StepRunner(
            self.stack,
            make_optimizers(self.stack, config.optimizer, self.plan),
            clip=config.optimizer.clip,
            bf16=config.bf16,
            gradient=engine_of(config.topology),
            teacher=None if self.teacher is None else self.teacher.predictor,
            own_teacher=config.topology.teacher == OWN_TEACHER,
            objectives={"distillation": Distillation(table.teacher_temperature, table.teacher_mix)},
            dropout_rates=dropout_rates(len(self.stack.layers), rate) if rate else (),
            parts=config.batch_parts,
            recompute=config.recompute,
            seed=config.seed,
        )
        if config.topology.teacher == AVERAGE_TEACHER:
            self.average = AveragedWeights(self.stack, config.topology.teacher_decay)
            self.loop.optimizers.optimizers[AVERAGE_TEACHER] = self.average
            self.loop.teacher = Predictor(self.average.averaged, self.plan)
        self.guard = None if config.on_alarm == "none" else RunGuard(self, config.on_alarm)
        self.loop.allows = None if self.guard is None else self.guard.allows
        objectives_of(self.plan, self.loop.objectives)  # what cannot be asked is refused before it is a run
        self._layers = cached_layers(config, self.plan)
        self.loop.check_backward(self.plan, bool(self._layers))
        self.loop.check_parts(self.plan)
        self.forgetting = Forgetting(self) if config.tune.measures_forgetting else None
        masked = isinstance(data, Prepared) and data.train.learned is not None
        self.keeps_states = bool(self._layers or config.topology.teacher_top or masked)
        self._position: dict[str, Any] = self.loader.position
        """Where batches with states begin: at the start, or where a checkpoint was saved."""
        if config.compile:
            for layer in self.stack.layers:
                layer.compile()

    @property
    def optimizers(self) -> Optimizers:  # type: ignore[override]
        return self.loop.optimizers.optimizers

    @property
    def text(self) -> Text:
        """What a model of text is read on."""
        assert not isinstance(self.source, ImageSource), "a run on images has no text"
        return self.source.text

    def prepare(self, step: int, on_rows: OnRows | None) -> None:
        """From here on batches come with what is kept of them, if anything is; new exits begin."""
        if not self.run.manifest.exists():
            self.run.manifest.adopt()
        if self.keeps_states and self.states is None:
            self.states = open_cached_loader(self, self._layers, on_rows)
            self.states.seek(self._position)
        if self.config.tune.keeps_base and self.config.model.task == "text" and step == 0:
            begin_exit_heads(self.stack, self.plan, partial(first_sequences, self, TOKENS))
        if self.forgetting is not None:
            self.forgetting.prepare(step, lambda: first_sequences(self, READ).inputs)
        elif self.config.tune.lora_directions == "pissa" and step == 0:
            begin_lora(self.stack, "pissa")
        if self.average is not None:
            self.average.connect()

    def begin(self, base: LoadedRun | None) -> None:
        """Take the weights of a base, and give interfaces the directions that they take from data, but for a
        base with interfaces of its own; the run's batches begin as they would."""
        if base is not None:
            begin_from(self.stack, base)
            if base.config.topology.interface is not None:
                return
        position = self.loader.position
        steps = STEPS if self.config.init is None else 0
        if begin_interfaces(self.stack, self.plan, self.config.optimizer, self.loader, steps):
            self.loader.seek(position)

    def callbacks(self) -> list[OnStep]:
        """A reader of geometry, where the settings ask for one."""
        if not self.config.geometry_every:
            return []
        from topograd.training.monitors import GeometryLog

        return [GeometryLog(self, self.config.geometry_every)]

    def step(self, step: int) -> StepRecord:
        plan = self.current_plan(step)
        self.loop.optimizers.set_rates(step, self.config.steps)
        self.last = self.loop.step(plan, self.batches(), step + 1)
        losses = [self.last.losses[k].item() for k in self.logged_stages(plan)]
        seen = (step + 1) * self.config.accumulate * self.source.units
        return StepRecord(losses, {"grad_norm": self.last.norm, self.source.unit: seen})

    def current_plan(self, step: int) -> Plan:
        """The plan of the next step; λ may be a function of it."""
        lam = self.config.topology.grad_scale_at(step / self.config.steps)
        if lam is None:
            return self.plan
        return _plan_at(self.plan.topology.with_grad_scale(lam), len(self.stack.layers))

    def batches(self) -> list[Batch]:
        """The batches of the next step."""
        if self.guard is not None:
            self.guard.batch = self._batches().position
        loader: Iterator[Batch] = self._batches()
        return [next(loader) for _ in range(self.config.accumulate)]

    def logged_stages(self, plan: Plan) -> list[int]:
        """The stages whose losses are logged; the others have none."""
        return plan.predicting()

    def after_step(self, step: int) -> None:
        if self.guard is not None:
            self.guard.log()
        if self.last.halted:
            stages = [stage + 1 for stage in self.last.halted]
            self.run.log({"kind": "halted", "step": step, "stages": stages})
        if self.forgetting is not None:
            self.forgetting.bound(step)

    def evaluate(self, step: int) -> Reading | None:
        reading = self.source.evaluate(self.stack, self.plan)
        return reading if self.forgetting is None else self.forgetting.reading(reading)

    def extra_state(self) -> dict[str, Any]:
        """`topology` in it is that of the weights, where it has changed."""
        extra: dict[str, Any] = {
            "loader": self._batches().position,
            "corpus": self.data.digest,
            "run": self.run.manifest.identity(),
            "halted": sorted(self.loop.halted),
        }
        if self.forgetting is not None:
            extra["base_bpb"] = self.forgetting.before
        if self.guard is not None:
            extra["alarms"] = self.guard.state()
        return extra if self.teacher is None else extra | {"teacher": self.teacher.weights}

    def extra_tensors(self) -> dict[str, Tensor]:
        """What is left to learn of earlier batches."""
        return self.loop.late.tensors(min(self.own_stages, default=0))

    @property
    def own_stages(self) -> Collection[int]:
        """The stages that run in this process."""
        return range(len(self.plan.stages))

    def load_extra(self, loaded: Checkpoint) -> None:
        check_owner(self.run, loaded)
        extra = loaded.extra
        if extra.get("corpus") != self.data.digest:
            raise CheckpointError(
                f"the corpus has changed since {loaded.path} was saved, so the run cannot be "
                "continued exactly",
                setting="data",
                given=self.config.data,
                remedy="restore the text or start a new run",
            )
        if self.teacher is not None and extra.get("teacher") != self.teacher.weights:
            raise CheckpointError(
                f"the teacher {self.config.topology.teacher} has other weights than when "
                f"{loaded.path} was saved, so the run cannot be continued exactly",
                setting="teacher",
                given=self.config.topology.teacher,
                remedy="restore it or start a new run",
            )
        if self.forgetting is not None:
            self.forgetting.before = dict(extra["base_bpb"])
        self._position = extra["loader"]
        if not self.keeps_states:
            self.loader.seek(self._position)
        self.loop.halted = set(extra.get("halted", ()))
        if self.guard is not None and "alarms" in extra:
            self.guard.load_state(extra["alarms"])
        device = next(p.device for p in self.stack.parameters() if not p.is_meta)
        self.loop.late.load(loaded.tensors, self.own_stages, device)

    def summary(self, checkpoint: str) -> dict[str, Any]:
        halted = [stage + 1 for stage in sorted(self.loop.halted)]
        results = {"run": str(self.run.folder), "weights": self.run.store.weights(checkpoint)}
        return results | ({"halted": halted} if halted else {})

    def end(self, results: dict[str, Any]) -> None:
        self.run.write_results(results)
        if results["finished"]:
            remove_cache(self.run.folder)

    def _batches(self) -> Loader | ImageLoader | CachedActivationLoader:
        return self.loader if self.states is None else self.states


@lru_cache(maxsize=16)
def _plan_at(topology: Topology, layers: int) -> Plan:
    return Plan.of(topology, layers)


RunTrainer = Trainer[RunTask]
Make = Callable[[Run, TrainConfig, Data], RunTask]


def start(config: TrainConfig, folder: Path | str, make: Make | None = None) -> RunTrainer:
    """A new run in an empty folder; `make` builds its task, instead of the settings' own choice."""
    with Run.creating(folder) as run:
        return _begin(run, config, make)


def _begin(run: Run, config: TrainConfig, make: Make | None) -> RunTrainer:
    if config.data is not None and not (config.model.task == "images" and config.data == DIGITS):
        config = replace(config, data=str(Path(config.data).absolute()))
    if config.topology.teacher not in (None, OWN_TEACHER, AVERAGE_TEACHER):
        config = config.changed(teacher=str(Path(config.topology.teacher or "").absolute()))
    if config.tune.old_text is not None:
        path = str(Path(config.tune.old_text).absolute())
        config = replace(config, tune=replace(config.tune, old_text=path))
    base = source = None
    if config.init is not None:
        folder = SOURCES["any"](config.init).absolute()
        source = None if (Path(config.init) / "config.toml").is_file() else config.init
        base = open_run(folder)
        if base.config.model.task != config.model.task:
            raise ConfigError(
                f"{config.init} is a run on {base.config.model.task}",
                setting="init",
                allowed=f"on {config.model.task}",
            )
        config = replace(config, init=str(base.run.folder))
    elif config.tokenizer == "imported":
        raise ConfigError(
            setting="tokenizer", given="imported", allowed="given with init, the run to begin with"
        )
    config, data = _load(
        config, None if base is None or config.model.task == "images" else read_tokenizer(base.run)
    )
    task = (make or TASKS[config.search.kind])(run, config, data)  # first: what does not fit is refused
    task.begin(base)
    if isinstance(data, Prepared):
        bind_tokenizer(run, data.tokenizer)
        if base is not None and config.tune.keeps_base:
            bind_base(run, base, data.tokenizer, source)
    run.write_config(config.as_dict())
    return Trainer(task, task.run)


def resume(folder: Path | str, name: str | None = None, make: Make | None = None) -> RunTrainer:
    """The run in `folder`, from its newest checkpoint or the one called `name`; from the start if none."""
    run = Run.open(folder)
    config = read_settings(run)
    run.manifest.verify(run.tokenizer_file.name)
    saved = read_tokenizer(run) if run.tokenizer_file.exists() else None
    config, data = _load(config, saved)
    if saved is None and isinstance(data, Prepared):  # of an earlier version, killed before it wrote one
        bind_tokenizer(run, data.tokenizer)
    known = run.store.names()
    checkpoint = find_checkpoint(run, name) if name is not None or known else None
    if checkpoint is not None:
        config = topology_at(config, run.store.extra(checkpoint))
    task = (make or TASKS[config.search.kind])(run, config, data)
    trainer = Trainer(task, task.run, known)
    if checkpoint is not None:
        trainer.load(checkpoint)
        return trainer
    if config.init is None:
        base = None
    else:
        base = run.store.open_base() if isinstance(run.store, DeltaStore) else open_run(config.init)
    task.begin(base)
    return trainer


def _load(config: TrainConfig, tokenizer: Tokenizer | None) -> tuple[TrainConfig, Data]:
    """The data of the settings, and the settings with its vocabulary or shape."""
    return load_images(config) if config.model.task == "images" else load_data(config, tokenizer)


@torch.no_grad()
def begin_from(stack: Stack, base: LoadedRun) -> None:
    """Give a stack the weights of a run; heads, relays and layers that the run lacks stay as they are."""
    own, given = stack.state_dict(), base.stack.state_dict()
    foreign = sorted(name for name in given if name not in own)
    if foreign:
        raise ConfigError(
            f"{base.run.folder} has {foreign[0]!r}, which the new model does not",
            setting="init",
            given=str(base.run.folder),
            remedy="give it the same [model] and [topology], as --config RUN/config.toml does",
        )
    for name, tensor in given.items():
        if own[name].shape != tensor.shape:
            raise ConfigError(
                f"{name!r} is {tuple(tensor.shape)} in {base.run.folder} and "
                f"{tuple(own[name].shape)} in the new model",
                setting="init",
                given=str(base.run.folder),
                remedy="give it the same [model]",
            )
        own[name].copy_(tensor)
