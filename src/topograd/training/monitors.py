"""The geometry of a training, logged beside its losses.

    with GeometryLog(trainer, every=100) as log:
        trainer.train(on_step=log)

appends a record of kind "geometry" to the run's metrics each `every` steps: σ_r of the stream by depth,
effective ranks, the weight norm, and the phase over the last `WINDOW` records. σ_min of the phase is σ_r
after the last layer.
Cost: one watched step in `every` (see `geometry/monitors/stream.py`); the others run as they would.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

from topograd.geometry.monitors.phase import read_phase, weight_norm
from topograd.geometry.monitors.stream import StreamMonitor
from topograd.training.tasks import Reading
from topograd.training.trainer import OnStep, Trainer

WINDOW = 10


class GeometryLog:
    """A callback of `Trainer.train`, to be entered around it; `then` is called after it, with the same."""

    def __init__(self, trainer: Trainer, every: int, then: OnStep | None = None) -> None:
        self._stack, self._log = trainer.stack, trainer.run.log
        self._stream = StreamMonitor(trainer.stack, every=every)
        self._then = then
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._sigmas: deque[float] = deque(maxlen=WINDOW)

    def __enter__(self) -> GeometryLog:
        self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, error, trace)

    def __call__(self, step: int, steps: int, losses: list[float], reading: Reading | None) -> None:
        self._stream(step, steps, losses, reading)
        if step in self._stream.history:
            self._log(self._record(step))
        if self._then is not None:
            self._then(step, steps, losses, reading)

    def _record(self, step: int) -> dict[str, Any]:
        profile = self._stream.history[step]
        self._norms.append(weight_norm(self._stack))
        self._sigmas.append(profile.sigma[-1])
        known = all(sigma > 0 for sigma in self._sigmas)  # one below resolution has no logarithm
        return {
            "kind": "geometry",
            "step": step,
            "sigma": list(profile.sigma),
            "rank": profile.rank,
            "effective_rank": list(profile.effective_ranks),
            "weight_norm": self._norms[-1],
            "phase": read_phase(self._norms, self._sigmas).phase if known else "undecided",
        }
