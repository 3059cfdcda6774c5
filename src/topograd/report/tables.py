"""Tables of a report, and the format of numbers.

A number that is not known is written as a dash. Text is not escaped here: the page does that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topograd.reading import flat_settings
from topograd.report.data import (
    RunData,
    bpb_by_prefix,
    bpb_prediction,
    entry,
    last_value,
    loss_series,
    number,
    numbers,
    percent_above,
    smooth,
    stage_count,
)

DASH = "–"
POOLINGS = {"sum": "pooled by sum", "mean": "pooled by mean", "shrinkage": "pooled by shrinkage"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Table:
    """A table of text. The first cell of each row names the row."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def fixed(value: float, digits: int = 3) -> str:
    """With a fixed number of digits after the point; the very large and very small as powers of ten."""
    if not math.isfinite(value):
        return DASH
    plain = value == 0 or 0.5 * 10**-digits <= abs(value) < 1e6
    return (f"{value:.{digits}f}" if plain else f"{value:.1e}").replace("-", "−")


def whole(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}".replace(",", "\u00a0").replace("-", "−") if math.isfinite(value) else DASH


def percent(value: float) -> str:
    """A signed percentage."""
    if not math.isfinite(value):
        return DASH
    return (f"{value:+.1f}" if abs(value) < 1e5 else f"{value:+.0e}").replace("-", "−") + "\u00a0%"


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit in which `largest` bytes reads best: its size and its name."""
    power = 0
    while power + 1 < len(_UNITS) and largest >= 1024 ** (power + 1):
        power += 1
    return float(1024**power), _UNITS[power]


def size(value: float) -> str:
    """Bytes in their best unit."""
    if not math.isfinite(value):
        return DASH
    scale, unit = byte_unit(value)
    return f"{value / scale:.4g} {unit}"


def prefix_name(stages: int, total: int) -> str:
    """What the first `stages` of `total` stages are called."""
    return "whole model" if total == 1 else f"first {stages} of {total} stages"


def smoothing_window(points: int) -> int:
    """How many neighbouring records a smoothed loss averages: a twenty-fifth of the run, at least 5."""
    return max(5, points // 25)


def gap_percent(staged: RunData, backprop: RunData | None, comparison: Mapping[str, Any] | None) -> float:
    """The gap in percent that the comparison measured, or else that of the two evaluations."""
    measured = number(entry(comparison, "gap"))
    if math.isfinite(measured) or backprop is None:
        return measured
    evaluations = (bpb_prediction(run.evaluation.get("bpb")) for run in (staged, backprop))
    return percent_above(*evaluations)


def all_numbers(staged: RunData, backprop: RunData | None, names: Sequence[str] = ()) -> Table:
    """Every number of the runs: bits per byte or accuracy, calibration, rank, usefulness, losses and sizes.

    `names` are those of the runs where they are not a staged and a backprop run.
    """
    runs = [run for run in (staged, backprop) if run is not None]
    stages = stage_count(staged)
    rows: list[tuple[str, ...]] = []

    def add(label: str, cells: list[str]) -> None:
        if any(cell != DASH for cell in cells):
            rows.append((label, *cells))

    for measure, name in (("bpb", "bits per byte"), ("accuracy", "accuracy")):
        for stage in range(stages):
            values = [_of_stage(bpb_by_prefix(run.evaluation.get(measure)), stage, stages) for run in runs]
            add(f"{name}, {prefix_name(stage + 1, stages)}", [fixed(value, 4) for value in values])
        for key, words in {"prediction": "what the model predicts", **POOLINGS}.items():
            values = [number(entry(run.evaluation, measure, key)) for run in runs]
            add(f"{name}, {words}", [fixed(value, 4) for value in values])
    for key, label, digits in (
        ("ece", "expected calibration error", 4),
        ("effective_rank", "effective rank", 1),
        ("usefulness", "tail usefulness U", 4),
    ):
        for stage in range(stages):
            values = [_of_stage(numbers(run.evaluation.get(key)), stage, stages) for run in runs]
            add(f"{label}, stage {stage + 1}", [fixed(value, digits) for value in values])
    losses = [_final_loss(run) for run in runs]
    for stage in range(stages):
        values = [_of_stage(loss, stage, stages) for loss in losses]
        add(
            f"training loss at the end, stage {stage + 1}, nats per token", [fixed(value) for value in values]
        )
    add("steps", [whole(number(run.evaluation.get("steps"))) for run in runs])
    add("training tokens", [whole(last_value(run, "train", "tokens")) for run in runs])
    add("training seconds", [fixed(last_value(run, "train", "seconds"), 1) for run in runs])
    for what in ("tokens", "bytes", "images"):
        add(f"{what} evaluated", [whole(number(run.evaluation.get(what))) for run in runs])
    return Table("What the runs measured", ("number", *(names or _columns(backprop))), tuple(rows))


def comparison_numbers(comparison: Mapping[str, Any] | None) -> Table | None:
    """What only a comparison measures, or None if there is nothing of it."""
    time = {key: number(entry(comparison, "step_time_ratio", key)) for key in ("median", "low", "high")}
    memory = {key: number(entry(comparison, "memory", key)) for key in ("staged", "backprop", "ratio")}
    span = f" (from {fixed(time['low'])} to {fixed(time['high'])})" if math.isfinite(time["low"]) else ""
    candidates = (
        ("gap at matched steps", percent(number(entry(comparison, "gap")))),
        ("step time, staged over backprop, median", fixed(time["median"]) + span),
        ("peak activation memory, staged", size(memory["staged"])),
        ("peak activation memory, backprop", size(memory["backprop"])),
        ("peak activation memory, staged over backprop", fixed(memory["ratio"])),
    )
    rows = tuple(row for row in candidates if not row[1].startswith(DASH))
    return Table("Staged against backprop", ("number", "measured"), rows) if rows else None


def settings(staged: RunData, backprop: RunData | None) -> Table:
    """The configuration with dotted names; where two runs differ, a last column says so."""
    ours = _flatten(staged.config)
    if backprop is None:
        return Table("Settings of the run", ("setting", "value"), tuple(ours.items()))
    theirs = _flatten(backprop.config)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    pairs = ((key, ours.get(key, DASH), theirs.get(key, DASH)) for key in keys)
    rows = tuple((key, one, two, "" if one == two else "differs") for key, one, two in pairs)
    return Table("Settings of the runs", ("setting", *_columns(backprop), "difference"), rows)


def spread(count: int, most: int) -> list[int]:
    """Up to `most` indices below `count`, evenly spread, both ends among them."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def read_row(table: Table, row: int) -> str:
    """One row of a table as a sentence."""
    pairs = zip(table.header, table.rows[row], strict=True)
    return ", ".join(f"{head} {cell}" for head, cell in pairs) + "."


def _columns(backprop: RunData | None) -> tuple[str, ...]:
    return ("staged",) if backprop is None else ("staged", "backprop")


def _of_stage(values: list[float], stage: int, stages: int) -> float:
    """A stage's value. A run with fewer stages has its last value beside our last, where they compare."""
    if len(values) < stages:
        return values[-1] if values and stage == stages - 1 else math.nan
    return values[stage]


def _final_loss(run: RunData) -> list[float]:
    series = loss_series(run)
    return smooth(series.values, smoothing_window(len(series.steps)))[-1].tolist() if series else []


def _flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings as texts, with dotted names."""
    flat = flat_settings(config).items()
    return {key: ", ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for key, v in flat}
