"""Signals over a series of checkpoints: one probe, one rank, alarms and change points.

Statement. At each checkpoint, on the same batches,

    sigma            σ_r of the stream after its last layer, r fixed by the first checkpoint
    effective_rank   of the same activations
    schur            the median over channels i of 1 - 1 / (M_ii (M⁻¹)_ii), M their second moment: the share
                     of a channel that the others explain (the Schur ratio)
    loss, norm       of the probe; of all weights
    coefficient      λ̂ with its interval (`singular/coefficient.py`), and whether it is calibrated

Over the checkpoints:

    alarm            a reading further than `DEVIATIONS` robust standard deviations from the median of those
                     before it, `READINGS` of them at least
    change point     a step where the logarithm of a signal jumps or has a kink, against a smooth null: the
                     best polynomial up to degree `DEGREES`, in the step or its logarithm, beside one of
                     degree 3 at most with a jump and a kink, by BIC and `PENALTY` log n more; in each part
                     again
    phase            accumulation or compression over all checkpoints (`monitors/phase.py`)

Symbols. n checkpoints. Cost: that of one reading for each; O(n²) for each change point.
Source: "Dead Directions: Geometric Singular Learning" §12.1 (phases), §13.5 (the summary along checkpoints),
§15 (the Schur ratio of random and of trained networks); change points after Hoogland et al., "The
Developmental Landscape of In-Context Learning", who take them from λ̂ alone. Thresholds are ours.
Limits. A change point describes the series; it needs three checkpoints on either side. Nothing here is a
rate of an approach.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, Outputs, outputs_of
from topograd.geometry.monitors.outliers import DEVIATIONS, deviation
from topograd.geometry.monitors.phase import weight_norm
from topograd.geometry.monitors.stream import StreamMonitor
from topograd.geometry.singular.coefficient import learning_coefficient
from topograd.geometry.singular.langevin import Langevin
from topograd.geometry.singular.terms import per_term

Array = NDArray[np.float64]
SHARE = 0.75
"""Of the first input's rank: its last directions are those of the sample."""
PENALTY = 4.5
"""Smooth curves with noise are split in 1 of 100 (`tests/geometry/test_series.py`)."""
DEGREES = 7
RESOLUTION = 1e-6
"""Of a logarithm's mean square: signals that are smooth up to a thousandth do not change."""
READINGS = 8
"""Before the first alarm."""
MIN_SIDE = 3
"""Checkpoints on either side of a change point."""
SAMPLING = Langevin(chains=2, burn_in=40, draws=8, thin=4)
"""A coefficient at every checkpoint costs as many gradients each."""
SAMPLED = 2
"""Batches of the probe that λ̂ is sampled on."""


@dataclass(frozen=True)
class Point:
    """One checkpoint."""

    step: int
    sigma: float | None
    """None where the input no longer has the rank."""
    effective_rank: float
    schur: float
    loss: float
    norm: float
    coefficient: float | None
    interval: tuple[float, float] | None
    calibrated: bool
    reason: str | None


@dataclass(frozen=True)
class Event:
    """An alarm or a change point of a signal."""

    signal: str
    step: int
    before: float
    after: float


class SeriesReader:
    """Reads models in turn, on the same batches and at the same rank."""

    def __init__(
        self,
        batches: Sequence[Batch],
        outputs: Outputs | None = None,
        sampling: Langevin | None = SAMPLING,
    ) -> None:
        """Without `sampling` no coefficients are sampled."""
        if not batches:
            raise GeometryError(
                "there are no batches", setting="batches", remedy="a series needs a probe that stays the same"
            )
        self.batches, self._outputs, self._sampling = list(batches), outputs, sampling
        self._loss = per_term("cross-entropy")
        self.rank: int | None = None

    def read(self, model: nn.Module, step: int) -> Point:
        """One checkpoint, in the mode that the model is in."""
        with torch.no_grad(), StreamMonitor(model) as monitor:
            total, terms = 0.0, 0
            for inputs, targets in self.batches:
                if targets is None:
                    raise GeometryError(
                        "a batch has no targets", setting="batches", remedy="the loss of a series needs them"
                    )
                losses = self._loss((self._outputs or outputs_of)(model, inputs), targets)
                total, terms = total + float(losses.sum()), terms + losses.numel()
        whole = monitor.profile()
        if self.rank is None:
            self.rank = max(1, int(SHARE * whole.rank))
        sigma = monitor.profile(self.rank).sigma[-1] if self.rank <= whole.rank else None
        sampled = None
        if self._sampling is not None:
            sampled = learning_coefficient(
                model, "cross-entropy", self.batches[:SAMPLED], self._sampling, outputs=self._outputs
            )
        return Point(
            step=step,
            sigma=sigma,
            effective_rank=whole.effective_ranks[-1],
            schur=schur_ratio(monitor.second_moment()),
            loss=total / max(terms, 1),
            norm=weight_norm(model),
            coefficient=None if sampled is None else sampled.value,
            interval=None if sampled is None else sampled.interval,
            calibrated=sampled is not None and sampled.calibrated,
            reason="not sampled" if sampled is None else sampled.reason,
        )


def schur_ratio(moment: Tensor) -> float:
    """The median share of a channel's second moment that the other channels explain.

    >>> round(schur_ratio(torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64)), 9)
    0.36
    """
    size = len(moment)
    ridge = 1e-12 * moment.diagonal().mean() * torch.eye(size, dtype=moment.dtype, device=moment.device)
    inverse = torch.linalg.pinv(moment + ridge, hermitian=True)
    left = 1 / (moment.diagonal() * inverse.diagonal()).clamp_min(1.0)
    return float((1 - left).median())


def alarms(signal: str, steps: Sequence[int], values: Sequence[float]) -> list[Event]:
    """Readings far from those before them, of a signal above 0."""
    logs = [math.log(value) for value in values]
    return [
        Event(signal, steps[i], math.exp(statistics.median(logs[:i])), values[i])
        for i in range(len(logs))
        if deviation(logs[:i], logs[i], "both", READINGS) > DEVIATIONS
    ]


def change_points(signal: str, steps: Sequence[int], values: Sequence[float]) -> list[Event]:
    """Where the logarithm of a signal above 0 changes its level or slope, in the order of steps.

    >>> steps, values = list(range(12)), [1.0] * 6 + [0.1] * 6
    >>> [event.step for event in change_points("sigma", steps, values)]
    [6]
    """
    if len(steps) != len(values):
        raise GeometryError(
            f"there are {len(steps)} steps and {len(values)} values",
            setting="values",
            given=len(values),
            remedy="give as many of each",
        )
    if bad := [value for value in values if not value > 0]:
        raise GeometryError(setting="values", given=bad[0], allowed=f"above 0: {signal} is read by logarithm")
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise GeometryError(setting="steps", given=list(steps), allowed="in ascending order")
    x, y = np.array(steps, dtype=np.float64), np.log(np.array(values, dtype=np.float64))
    return [Event(signal, steps[i], values[i - 1], values[i]) for i in sorted(_splits(x, y, 0))]


def _splits(x: Array, y: Array, start: int) -> list[int]:
    n = len(x)
    if n < 2 * MIN_SIDE:
        return []
    places = np.arange(MIN_SIDE, n - MIN_SIDE + 1)
    smooth, _ = _scores(x, y, min(DEGREES, max(1, n // 3)), places)
    _, broken = _scores(x, y, min(3, max(1, n // 6)), places)
    best = int(np.argmin(broken))
    if smooth - float(broken[best]) <= PENALTY * math.log(n):
        return []
    cut = int(places[best])
    return [*_splits(x[:cut], y[:cut], start), start + cut, *_splits(x[cut:], y[cut:], start + cut)]


def _scores(x: Array, y: Array, degree: int, places: NDArray[np.int64]) -> tuple[float, Array]:
    """BIC of the best polynomial up to a degree, in the step or its logarithm; of the best with a jump and
    a kink at each place: both columns lose what the polynomial explains, and two unknowns are left."""
    n = len(x)
    smooth, broken = math.inf, np.full(len(places), np.inf)
    for axis in (x, np.log1p((x - x[0]) / np.diff(x).min())):
        scaled = 2 * (axis - axis[0]) / (axis[-1] - axis[0]) - 1
        jump = (np.arange(n)[:, None] >= places).astype(np.float64)
        kink = jump * (scaled[:, None] - scaled[places])
        for count in range(1, degree + 2):
            basis = np.linalg.qr(np.polynomial.chebyshev.chebvander(scaled, count - 1))[0]
            left, up, bent = (part - basis @ (basis.T @ part) for part in (y, jump, kink))
            rss = float(left @ left)
            smooth = min(smooth, n * math.log(rss / n + RESOLUTION) + count * math.log(n))
            if count + 2 > n - 2:
                continue
            a, b, c = (up * up).sum(0), (up * bent).sum(0), (bent * bent).sum(0)
            u, v = up.T @ left, bent.T @ left
            explained = (c * u * u - 2 * b * u * v + a * v * v) / np.maximum(a * c - b * b, 1e-12)
            residual = np.clip(rss - explained, 0.0, rss)
            broken = np.minimum(broken, n * np.log(residual / n + RESOLUTION) + (count + 2) * math.log(n))
    return smooth, broken


def events(points: Sequence[Point]) -> Mapping[str, list[Event]]:
    """Alarms and change points of every signal over the checkpoints."""
    result: dict[str, list[Event]] = {"alarms": [], "change_points": []}
    for signal in ("sigma", "effective_rank", "loss", "norm", "coefficient"):
        # a λ̂ whose chains are not calibrated is no reading
        read = [one for one in points if signal != "coefficient" or one.calibrated]
        pairs = [(one.step, getattr(one, signal)) for one in read]
        positive = [(step, value) for step, value in pairs if value is not None and value > 0]
        steps, values = [step for step, _ in positive], [value for _, value in positive]
        result["alarms"] += alarms(signal, steps, values)
        result["change_points"] += change_points(signal, steps, values)
    return result
