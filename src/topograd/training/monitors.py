"""Geometry of the residual stream, logged during training.

    trainer.train(on_step=GeometryLog(trainer.task, every=100))

appends a record of kind "geometry" to the run's metrics each `every` steps: σ_r by depth, effective ranks,
the weight norm, and the phase over the last `WINDOW` records. σ_min of the phase is σ_r after the last layer.
An encoder reads its rows with nothing hidden.

All records read the same held-out rows at the same r, `SHARE` of the rank that the stream's input has at the
first of them: with other rows or another r each time, a model that does not change would seem to. A run that
is resumed continues with the r and the records of its log. Where the input's rank falls below r, a record has
no σ.
Cost: one forward pass over `POSITIONS` held-out tokens at each record (see `geometry/monitors/stream.py`).
"""

from collections import deque
from typing import Any

import torch

from topograd.data.loader import IGNORED
from topograd.errors import GeometryError
from topograd.exec.forward import evaluating, stage_outputs
from topograd.geometry.monitors.phase import read_phase, weight_norm
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile
from topograd.training.runs import RunTask
from topograd.training.sources import ImageSource
from topograd.training.trainer import Reading

WINDOW = 10
POSITIONS = 4096
SHARE = 0.75
"""Of the input's rank: its last directions are those of the sample."""


class GeometryLog:
    """A callback of `Trainer.train`."""

    def __init__(self, task: RunTask, every: int) -> None:
        if every < 1:
            raise GeometryError(setting="every", given=every, allowed="at least 1")
        if isinstance(task.source, ImageSource):
            raise GeometryError(
                setting="geometry_every",
                given=every,
                allowed="0 for images, whose residual stream has no one width",
            )
        self._task, self._every = task, every
        sizes = (task.text.targets != IGNORED).sum(1)
        length = int(sizes.max())
        whole = task.text.inputs[sizes == length, :length]  # no padding
        count = min(len(whole), max(1, POSITIONS // length))
        self._probe = whole[torch.arange(count) * len(whole) // count]  # evenly spaced over the text
        known = [record for record in task.run.metrics() if record["kind"] == "geometry"]
        self._rank: int | None = known[-1]["rank"] if known else None
        self._records = deque(known, WINDOW)

    def __call__(self, step: int, steps: int, losses: list[float], reading: Reading | None) -> None:
        if step % self._every == 0:
            self._task.run.log(self._record(step))

    def profile(self) -> StreamProfile | None:
        """The stream of the probe rows at the fixed rank; None where the input no longer has that rank."""
        stack, plan = self._task.stack, self._task.plan
        try:
            device = next(stack.parameters()).device
            with evaluating(stack), torch.no_grad(), StreamMonitor(stack) as monitor:
                stage_outputs(stack, plan, self._probe.to(device), range(len(plan.stages)))
            if self._rank is None:
                self._rank = max(1, int(SHARE * monitor.profile().rank))
            return monitor.profile(self._rank)
        except GeometryError:
            if self._rank is None:
                raise
            return None

    def _record(self, step: int) -> dict[str, Any]:
        profile = self.profile()
        record: dict[str, Any] = {
            "kind": "geometry",
            "step": step,
            "sigma": None if profile is None else list(profile.sigma),
            "rank": self._rank,
            "effective_rank": None if profile is None else list(profile.effective_ranks),
            "weight_norm": weight_norm(self._task.stack),
        }
        self._records.append(record)
        norms = [each["weight_norm"] for each in self._records]
        sigmas = [each["sigma"][-1] if each["sigma"] else 0.0 for each in self._records]
        known = all(sigma > 0 for sigma in sigmas)  # one below resolution has no logarithm
        return record | {"phase": read_phase(norms, sigmas).phase if known else "undecided"}
