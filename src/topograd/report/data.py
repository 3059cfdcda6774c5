"""What a report reads: plain records of a run, and the series that figures and tables need from them.

Everything here forgives. A record may lack a field, hold null, NaN or infinity, or have another number of
stages than its neighbours: such a value becomes NaN, which figures skip and tables print as a dash. So a
run that diverged, was killed early or was never evaluated still gets its report.

Shapes: n records, K stages; `Series.values` is (n, K), ordered by step, one record for each step (the last).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LARGEST = 1e15  # the size beyond which a number is taken for the trace of a divergence


@dataclass(frozen=True)
class RunData:
    """One run, as its JSON and TOML files hold it. Empty mappings and lists stand for files not there."""

    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """Values over training: steps (n,), training seconds (n,) and values (n, K), NaN where unknown."""

    steps: Array
    seconds: Array
    values: Array

    @property
    def stages(self) -> int:
        return int(self.values.shape[1])


def number(value: object) -> float:
    """A number as a float; NaN for anything else, and for infinity or a size beyond `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= LARGEST else math.nan


def numbers(value: object) -> list[float]:
    """A list of numbers, by `number`; anything that is not a list is an empty one."""
    return [number(item) for item in value] if isinstance(value, list | tuple) else []


def entry(mapping: object, *keys: str) -> Any:
    """The value at a path of nested mappings, or None where the path ends early."""
    for key in keys:
        if not isinstance(mapping, Mapping):
            return None
        mapping = mapping.get(key)
    return mapping


def bpb_by_prefix(bpb: object) -> list[float]:
    """Bits per byte of each prefix of stages; of the whole model alone where prefixes are not recorded."""
    prefix = numbers(entry(bpb, "prefix"))
    whole = [number(entry(bpb, key)) for key in ("prediction", "last")]
    return prefix or [value for value in whole if math.isfinite(value)][:1]


def bpb_prediction(bpb: object) -> float:
    """Bits per byte of what the model predicts, or else of its last stage."""
    known = [number(entry(bpb, key)) for key in ("prediction", "last")]
    return next((value for value in known if math.isfinite(value)), [math.nan, *bpb_by_prefix(bpb)][-1])


def loss_series(run: RunData) -> Series | None:
    """The training loss of each stage in nats per token, or None if no record has a finite one."""
    return _series(
        (record, numbers(record.get("loss"))) for record in records(run) if record.get("kind") == "train"
    )


def bpb_series(run: RunData) -> Series | None:
    """Held-out bits per byte of each prefix during training, or None if no record has a finite one."""
    return _series(
        (record, bpb_by_prefix(record.get("bpb"))) for record in records(run) if record.get("kind") == "eval"
    )


def stage_count(run: RunData) -> int:
    """The number of stages: the longest per-stage list of the evaluation or of the metrics."""
    lists = [numbers(run.evaluation.get(key)) for key in ("ece", "effective_rank", "usefulness")]
    lists.append(bpb_by_prefix(run.evaluation.get("bpb") or run.evaluation.get("accuracy")))
    losses = loss_series(run)
    return max([len(values) for values in lists] + [losses.stages if losses else 0])


def last_value(run: RunData, kind: str, key: str) -> float:
    """The last finite value of one field among the metrics of a kind, NaN if there is none."""
    values = [number(record.get(key)) for record in records(run) if record.get("kind") == kind]
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def percent_above(value: Array | float, base: Array | float) -> Any:
    """How far a value lies above a base, in percent; NaN where that makes no sense or is beyond `LARGEST`."""
    sound = np.asarray(base) > 1e-9
    result = 100 * (value / np.where(sound, base, np.nan) - 1)
    result = np.where(np.abs(result) <= LARGEST, result, np.nan)
    return float(result) if result.ndim == 0 else result


def gap_at_steps(staged: Series, backprop: Series) -> Series | None:
    """The gap of each prefix to what backprop predicts, in percent, at the steps that both evaluated."""
    _, ours, theirs = np.intersect1d(staged.steps, backprop.steps, return_indices=True)
    gap = percent_above(staged.values[ours], backprop.values[theirs, -1:])
    return _known(Series(staged.steps[ours], staged.seconds[ours], gap))


def gap_at_seconds(staged: Series, backprop: Series) -> Series | None:
    """The gap of each prefix, in percent, to what backprop had reached in the same training time.

    Backprop's value is interpolated linearly between its evaluations, and never beyond the first and last of
    them: staged evaluations outside that time have no partner and are left out.
    """
    last = backprop.values[:, -1]
    known = np.isfinite(last) & np.isfinite(backprop.seconds)
    seconds, order = np.unique(backprop.seconds[known], return_index=True)
    if len(seconds) < 2:
        return None
    timed = np.isfinite(staged.seconds)
    partner = np.interp(
        staged.seconds[timed], seconds, last[known][order], left=float("nan"), right=float("nan")
    )
    gap = percent_above(staged.values[timed], partner[:, None])
    return _known(Series(staged.steps[timed], staged.seconds[timed], gap))


def smooth(values: Array, window: int) -> Array:
    """Centred running mean along the first axis, which ignores NaN and stays NaN where a window has none.

    At the start, where a loss falls fast, the window shrinks so that it stays centred. At the end it keeps
    its past half: the last value is the mean of the last `window // 2 + 1`.
    """
    count = len(values)
    known = np.isfinite(values)
    zero = np.zeros((1, *values.shape[1:]))
    sums = np.concatenate([zero, np.cumsum(np.where(known, values, 0.0), axis=0)])
    counts = np.concatenate([zero, np.cumsum(known, axis=0)])
    index = np.arange(count)
    half = np.minimum(index, max(window, 1) // 2)
    high, low = np.minimum(index + half + 1, count), index - half
    inside = counts[high] - counts[low]
    return np.where(inside > 0, (sums[high] - sums[low]) / np.maximum(inside, 1), np.nan)


def records(run: RunData) -> list[Mapping[str, Any]]:
    return [record for record in run.metrics if isinstance(record, Mapping)]


def _series(rows: Iterable[tuple[Mapping[str, Any], list[float]]]) -> Series | None:
    by_step = {number(record.get("step")): (number(record.get("seconds")), row) for record, row in rows}
    steps = sorted(step for step in by_step if math.isfinite(step))
    stages = max((len(by_step[step][1]) for step in steps), default=0)
    values = np.full((len(steps), stages), np.nan)
    for index, step in enumerate(steps):
        row = by_step[step][1]
        values[index, : len(row)] = row
    seconds = np.array([by_step[step][0] for step in steps])
    return _known(Series(np.array(steps), seconds, values))


def _known(series: Series) -> Series | None:
    return series if np.isfinite(series.values).any() else None
