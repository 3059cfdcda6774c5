"""Early-warning callbacks for transformers and Lightning, and writers to files, TensorBoard and W&B.

    Trainer(..., callbacks=[trainer_callback(monitor)])            transformers
    L.Trainer(..., callbacks=[lightning_callback(monitor)])        Lightning
    EarlyWarning(model, writer=writer_to("signals.jsonl"))         a file of one JSON object a line
    EarlyWarning(model, writer=writer_to(SummaryWriter()))         whatever has add_scalar(name, value, step)
    EarlyWarning(model, writer=writer_to(wandb.run))               whatever has log(values, step=...)

Clipping. transformers calls `on_pre_optimizer_step` after it has clipped the gradients, so that a norm read
there never exceeds the limit. The callback therefore keeps the norm of each gradient as it is accumulated
(`register_post_accumulate_grad_hook`), before anything else touches it. Lightning calls
`on_before_optimizer_step` before it clips.
Limits. transformers gives a callback no loss but the one that it logs: it is read once for each log, and is
the mean since the log before. Numbers that are not finite are null in a JSON file.
"""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.monitors.early_warning import EarlyWarning, Writer
from topograd.geometry.monitors.guard import Guard


def writer_to(target: Any) -> Writer:
    """A writer of signals to a file's path, a TensorBoard writer, a W&B run, or a function.

    >>> seen = []
    >>> writer_to(lambda step, values: seen.append(step))(3, {"loss": 1.0})
    >>> seen
    [3]
    """
    if isinstance(target, str | Path):

        def lines(step: int, values: Mapping[str, float]) -> None:
            with Path(target).open("a", encoding="utf-8") as file:
                finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
                file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")

        return lines
    if hasattr(target, "add_scalar"):

        def scalars(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

        return scalars
    if hasattr(target, "log"):
        return lambda step, values: target.log(dict(values), step=step)
    if not callable(target):
        raise GeometryError(
            setting="target", given=target, allowed="a path, a function, or an object with add_scalar or log"
        )
    writer: Writer = target
    return writer


class UnclippedNorms:
    """Norms of gradients as they are accumulated; `total` is that of all, whatever was clipped since."""

    def __init__(self, model: nn.Module) -> None:
        self._norms: dict[Tensor, Tensor] = {}
        self._handles = [
            p.register_post_accumulate_grad_hook(self._store) for p in model.parameters() if p.requires_grad
        ]

    def _store(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._norms[parameter] = parameter.grad.detach().norm()

    def total(self) -> float:
        """Of the last step, and forget it."""
        norms = [norm.float() for norm in self._norms.values()]
        self._norms.clear()
        return float(torch.stack(norms).norm()) if norms else 0.0

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def trainer_callback(watching: EarlyWarning | Guard) -> Any:
    """A `transformers.TrainerCallback` that reads the monitor at every optimizer step.

    A `Guard` acts too: a step that is left out has no gradients when the optimizer comes to it.
    """
    guard = watching if isinstance(watching, Guard) else None
    monitor = watching.monitor if isinstance(watching, Guard) else watching
    base = _imported("transformers", "TrainerCallback")

    class Callback(base):  # type: ignore[misc, valid-type]
        """Enters the monitor with the training and reads it before each step of the optimizer."""

        loss: float | None = None
        """As logged since the last reading; an evaluation's record has none."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            self.loss = (logs or {}).get("loss", self.loss)

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.__enter__()
            if more.get("optimizer") is not None:
                monitor.watch_optimizer(_plain(more["optimizer"]))
                if guard is not None:
                    guard.watch([_plain(more["optimizer"])])
            self.norms = UnclippedNorms(more["model"])
            monitor.norm = self.norms.total

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if guard is None:
                monitor.read(state.global_step, self.loss)
            elif not guard.allows(state.global_step, self.loss, batch={"epoch": state.epoch}):
                more["model"].zero_grad(set_to_none=True)
            self.loss = None

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.__exit__(None, None, None)
            self.norms.remove()

    return Callback()


def lightning_callback(monitor: EarlyWarning) -> Any:
    """A Lightning `Callback`, of `lightning` or `pytorch_lightning`, whichever is installed."""
    base = _imported("lightning.pytorch", "Callback", "pytorch_lightning")

    class Callback(base):  # type: ignore[misc, valid-type]
        """Enters the monitor with the fit and reads it before each step of the optimizer."""

        loss: Any = float("nan")

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            monitor.__enter__()

        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            self.loss = loss.detach()

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            monitor.watch_optimizer(_plain(optimizer))
            monitor.read(trainer.global_step, self.loss)

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            monitor.__exit__(None, None, None)

    return Callback()


def _plain(optimizer: Any) -> Any:
    """The optimizer inside of a wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _imported(package: str, name: str, *others: str) -> Any:
    for place in (package, *others):
        try:
            return getattr(importlib.import_module(place), name)
        except ImportError:
            continue
    raise GeometryError(
        f"{package} is not installed",
        setting="package",
        given=package,
        remedy="read the monitor in a loop of your own, or install it",
    )
