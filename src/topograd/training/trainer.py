"""Training a run: the loop around the executor, and everything that lets it be stopped and continued.

A checkpoint holds the weights, the optimizers, torch's generator, the loader's position, the step and the
seconds so far. A run that is killed at any instant and resumed gives the losses, bit for bit, that it would
have given (on the same machine, with the same number of threads).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from topograd.data import Loader, Prepared, Tokenizer, windows
from topograd.errors import CheckpointError, ConfigError, DivergenceError
from topograd.files import write_json
from topograd.runs import checkpoint
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import (
    build_stack,
    find_checkpoint,
    load_data,
    summary,
)
from topograd.training.evaluation import Text, evaluate
from topograd.training.executor import train_step
from topograd.training.optimizer import make_optimizers, set_learning_rates

OnStep = Callable[[int, int, list[float], dict[str, Any] | None], None]
"""Called after each step with (step, steps, losses, evaluation or None)."""


def start(config: TrainConfig, folder: Path) -> Trainer:
    """A new run in an empty folder."""
    run = Run.create(folder)
    if config.data is not None:
        config = replace(config, data=str(Path(config.data).absolute()))
    config, data = load_data(config)
    trainer = Trainer(run, config, data)  # before anything is written: what does not fit is refused here
    run.write_config(config.as_dict())
    data.tokenizer.save(run.tokenizer_file)
    return trainer


def resume(folder: Path, name: str | None = None) -> Trainer:
    """The run in `folder`, from its newest checkpoint or the one called `name`; from the start if none."""
    run = Run.open(folder)
    config = TrainConfig.from_dict(run.read_config())
    saved = Tokenizer.load(run.tokenizer_file) if run.tokenizer_file.exists() else None
    config, data = load_data(config, saved)
    if saved is None:
        data.tokenizer.save(run.tokenizer_file)
    trainer = Trainer(run, config, data)
    if name is not None or checkpoint.latest(run.checkpoints) is not None:
        trainer.load(find_checkpoint(run, name))
    return trainer


class Trainer:
    """A run under way."""

    def __init__(self, run: Run, config: TrainConfig, data: Prepared) -> None:
        self.run, self.config, self.data = run, config, data
        self.loader = Loader(data.train, config.model.context, config.batch, config.seed)
        self.text = Text(*windows(data.heldout, data.tokenizer, config.model.context, config.eval_bytes))
        self.stack, self.plan = build_stack(config)
        self.optimizers = make_optimizers(self.stack, config.optimizer)
        self.step = 0
        self.seconds = 0.0
        if config.compile:
            for layer in self.stack.layers:
                layer.compile()

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; whatever was logged after it is dropped."""
        loaded = checkpoint.load(path, self.stack, self.optimizers)
        if loaded.extra.get("corpus") != self.data.digest:
            raise CheckpointError(
                f"the corpus has changed since {path} was saved, so the run cannot be continued exactly; "
                "restore the text or start a new run"
            )
        self.step = loaded.step
        self.seconds = loaded.extra["seconds"]
        self.loader.seek(loaded.extra["loader"])

    def save(self) -> None:
        extra = {"loader": self.loader.position, "seconds": self.seconds, "corpus": self.data.digest}
        checkpoint.save(
            self.run.checkpoints,
            step=self.step,
            model=self.stack,
            optimizers=self.optimizers,
            extra=extra,
            keep=self.config.keep,
        )

    def train(self, stop_after: int | None = None, on_step: OnStep | None = None) -> dict[str, Any]:
        """Train to the end, or to step `stop_after`; save, evaluate, and return the summary.

        Ctrl-C (and SIGTERM) ends after the current step in the same way. `finished` in the summary says
        whether the schedule was run to its end.
        """
        if stop_after is not None and stop_after < 1:
            raise ConfigError(f"stop-after is {stop_after}; it must be at least 1")
        last = min(self.config.steps, stop_after or self.config.steps)
        with self.run.lock(), _interrupts() as interrupted:
            self._give_up_later()
            readings = None
            while self.step < last and not interrupted():
                losses = self._one_step()
                readings = self._maybe_evaluate()
                if self._due(self.config.save_every) and self.step < last:
                    self.save()
                if on_step:
                    on_step(self.step, self.config.steps, losses, readings)
            self.save()
            readings = readings or evaluate(self.stack, self.plan, self.text)
            result = summary(self.run, self.step, readings)
            result["finished"] = self.step >= self.config.steps
            result["seconds"] = self.seconds
            write_json(self.run.results_file, result)
        return result

    def _give_up_later(self) -> None:
        """Drop the checkpoints and records of later steps, checkpoints first: a kill in between is mended."""
        newest = checkpoint.latest(self.run.checkpoints)
        if newest is not None and int(newest.name.rpartition("-")[2]) > self.step:
            self.save()
        self.run.rewind_metrics(self.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _one_step(self) -> list[float]:
        began = time.perf_counter()
        config = self.config
        set_learning_rates(self.optimizers, config.optimizer.multiplier(self.step, config.steps))
        total = torch.zeros(len(self.plan.stages))
        for _ in range(config.accumulate):
            total += self._gradients().cpu() / config.accumulate
        losses = [total[k].item() for k in self.plan.predicting()]  # the other stages have none
        self._stop_if_not_finite(losses)
        norm = self._gradient_norm()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += time.perf_counter() - began
        tokens = self.step * config.accumulate * config.batch * config.model.context
        record = {"kind": "train", "step": self.step, "loss": losses, "grad_norm": norm, "tokens": tokens}
        self.run.log(record | {"seconds": self.seconds})
        return losses

    def _gradients(self) -> Tensor:
        config, device = self.config, next(self.stack.parameters()).device
        inputs, targets = (tensor.to(device) for tensor in next(self.loader))
        with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
            return train_step(self.stack, self.plan.topology, inputs, targets, scale=1 / config.accumulate)

    def _gradient_norm(self) -> float:
        """The norm of all gradients together, before it is clipped where the settings ask for that."""
        learning = [p for p in self.stack.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
        value = norm.item()
        if not math.isfinite(value):
            raise DivergenceError(
                f"the gradient of {self._first_bad()} is not finite at step {self.step + 1}; nothing was "
                f"changed by that step; lower the learning rates and start again"
            )
        if self.config.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(learning, self.config.optimizer.clip, norm)
        return value

    def _first_bad(self) -> str:
        """The first stage with a gradient that is not finite, or else what the stages share."""
        for planned in self.plan.stages:
            for i in planned.layers:
                if any(
                    p.grad is not None and not p.grad.isfinite().all()
                    for p in self.stack.layers[i].parameters()
                ):
                    return f"stage {planned.index + 1}"
        return "the embedding or the head"

    def _stop_if_not_finite(self, losses: list[float]) -> None:
        for k, loss in zip(self.plan.predicting(), losses, strict=True):
            if not math.isfinite(loss):
                raise DivergenceError(
                    f"the loss of stage {k + 1} is {loss} at step {self.step + 1}; nothing was changed by "
                    f"that step; lower the learning rates and start again, or look at {self.run.metrics_file}"
                )

    def _maybe_evaluate(self) -> dict[str, Any] | None:
        if not self._due(self.config.eval_every) and self.step != self.config.steps:
            return None
        readings = evaluate(self.stack, self.plan, self.text)
        record = {"kind": "eval", "step": self.step, "bpb": readings["bpb"], "seconds": self.seconds}
        self.run.log(record)
        return readings


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C and SIGTERM only set a flag; the function it yields reads the flag."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals are somebody else's
        before = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
