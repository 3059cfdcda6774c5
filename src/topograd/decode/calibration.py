"""A run's calibration: how far later stages move the logits, and the margins from which they may be skipped.

    per transition k -> k+1     p99 and max of shift_k, rate of top_{k+1} ≠ top_k   "Product of Experts" §5.3
    per exit stage k = 0..K-2   p99 and max of the rival gain, agreement with the last stage
    τ_k(ε)                      flip-rate thresholds, for ε in `EPS`

The p99 is the smallest reading that at least 99 % of the tokens do not exceed.

Flip-rate thresholds are ours, not the paper's. ε is the share of *all* n tokens that may come out different
from full depth. Each of the K-1 exits gets an equal part of it, and a token leaves where margin_k > τ_k:

    τ_k = min { τ >= 0 : #{ tokens that reach stage k, margin_k > τ, top_k ≠ top_{K-1} } <= ε n / (K-1) }

or infinity where no calibration token that reaches stage k has a margin above it. A part that an exit does
not use is not passed on. So on the calibration text at most ε n tokens differ. On other text the rate is an
empirical one and no guarantee: measure it on readings that the calibration has not seen (`Readings.split`).

A calibration is stored as JSON with the step of the weights that it was read from; the caller compares that
step. The sample is of whole sequences, evenly spaced, cut at `SAMPLE` tokens, margins to 3 decimals.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from topograd.decode.readings import Readings
from topograd.errors import ConfigError, DataError, RunError

FORMAT = "topograd-calibration"
VERSION = 1
EPS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
SAMPLE = 6000


@dataclass(frozen=True)
class Bounds:
    """p99 and max of one reading, a number per stage or transition 0..K-2."""

    p99: tuple[float, ...]
    max: tuple[float, ...]

    @classmethod
    def of(cls, readings: Tensor) -> Bounds:
        rank = -(-99 * readings.shape[1] // 100)
        p99, most = readings.kthvalue(rank, dim=1).values, readings.amax(1)
        return cls(tuple(p99.tolist()), tuple(most.tolist()))


@dataclass(frozen=True)
class Sample:
    """Some tokens in order, for simulations: rows are the exit stages 0..K-2."""

    margins: tuple[tuple[float, ...], ...]
    agrees: tuple[tuple[int, ...], ...]
    """1 where the stage's top token is the last stage's, else 0."""
    lengths: tuple[int, ...]
    """Tokens of each sequence; they sum to the length of a row."""

    @classmethod
    def of(cls, readings: Readings) -> Sample:
        ends = readings.sequence.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        count = min(len(spans), -(-SAMPLE * len(spans) // len(readings)))
        chosen = [torch.arange(*spans[i * len(spans) // count]) for i in range(count)]
        some = readings.take(torch.cat(chosen)[:SAMPLE])
        agrees = (some.top[:-1] == some.top[-1]).int()
        return cls(
            tuple(tuple(round(m, 3) for m in row) for row in some.margin[:-1].tolist()),
            tuple(tuple(row) for row in agrees.tolist()),
            tuple(some.sequence.unique_consecutive(return_counts=True)[1].tolist()),
        )


@dataclass(frozen=True)
class Calibration:
    """The numbers of the module's head. Make it with `Calibration.of`, keep it with `as_dict`."""

    step: int
    """The training step of the weights that were read."""
    stages: int
    tokens: int
    shift: Bounds
    gain: Bounds
    change_rate: tuple[float, ...]
    """Rate of top_{k+1} ≠ top_k, for each transition."""
    agreement: tuple[float, ...]
    """Rate of top_k = top_{K-1}, for all K stages; the last is 1."""
    flip_thresholds: tuple[tuple[float, ...], ...]
    """τ_k(ε): a row for each ε of `EPS`, a column for each exit stage."""
    sample: Sample

    @classmethod
    def of(cls, readings: Readings, step: int) -> Calibration:
        """Calibrate on readings of the weights of training step `step`."""
        _check(readings)
        top = readings.top
        return cls(
            step=step,
            stages=readings.stages,
            tokens=len(readings),
            shift=Bounds.of(readings.shift),
            gain=Bounds.of(readings.gain),
            change_rate=_rates(top[1:] != top[:-1]),
            agreement=_rates(top == top[-1]),
            flip_thresholds=tuple(flip_thresholds(readings, eps) for eps in EPS),
            sample=Sample.of(readings),
        )

    def threshold(self, stage: int, eps: float) -> float:
        """τ_k(ε) of exit stage k; leave where the margin is above it. Infinity means never."""
        if eps not in EPS:
            raise ConfigError(f"eps {eps} has no calibrated thresholds", remedy=f"choose one of {EPS}")
        if not 0 <= stage < self.stages - 1:
            raise ConfigError(
                f"stage {stage + 1} has no early exit", remedy=f"stages 1..{self.stages - 1} have"
            )
        return self.flip_thresholds[EPS.index(eps)][stage]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON; a threshold of infinity is null."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "stages": self.stages,
            "tokens": self.tokens,
            "shift": {"p99": list(self.shift.p99), "max": list(self.shift.max)},
            "gain": {"p99": list(self.gain.p99), "max": list(self.gain.max)},
            "change_rate": list(self.change_rate),
            "agreement": list(self.agreement),
            "flip_thresholds": {
                str(eps): [None if math.isinf(tau) else tau for tau in row]
                for eps, row in zip(EPS, self.flip_thresholds, strict=True)
            },
            "sample": {
                "margins": [list(row) for row in self.sample.margins],
                "agrees": [list(row) for row in self.sample.agrees],
                "lengths": list(self.sample.lengths),
            },
        }

    @classmethod
    def from_dict(cls, values: object) -> Calibration:
        """What `as_dict` gave; anything else raises RunError."""
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise RunError(
                f"this is no calibration, it does not name the format {FORMAT!r}", remedy="calibrate again"
            )
        if values.get("version") != VERSION:
            raise RunError(
                f"the calibration has version {values.get('version')!r}, this program reads "
                f"version {VERSION}",
                remedy="calibrate again",
            )
        stages = _whole(values, "stages", 2)
        exits = stages - 1
        flips = _field(values, "flip_thresholds")
        return cls(
            step=_whole(values, "step", 0),
            stages=stages,
            tokens=_whole(values, "tokens", 1),
            shift=_bounds(values, "shift", exits),
            gain=_bounds(values, "gain", exits),
            change_rate=_row(_field(values, "change_rate"), "change_rate", exits, high=1),
            agreement=_row(_field(values, "agreement"), "agreement", stages, high=1),
            flip_thresholds=tuple(
                _row(_field(flips, str(eps)), f"flip threshold {eps}", exits, null=math.inf) for eps in EPS
            ),
            sample=_sample(_field(values, "sample"), exits),
        )


def flip_thresholds(readings: Readings, eps: float) -> tuple[float, ...]:
    """τ_k(ε) for each exit stage, in order: which tokens reach a stage depends on those before it."""
    # The grid's ε are decimals: 0.29 · 100 is 28.999... in binary, and one flip would be lost.
    allowed = math.floor(eps * len(readings) / (readings.stages - 1) + 1e-9)
    here = torch.ones(len(readings), dtype=torch.bool)
    thresholds = []
    for margin, top in zip(readings.margin[:-1], readings.top[:-1], strict=True):
        wrong = margin[here & (top != readings.top[-1])]
        excess = len(wrong) - allowed
        tau = wrong.kthvalue(excess).values.item() if excess > 0 else 0.0
        leaves = here & (margin > tau)
        thresholds.append(tau if leaves.any() else math.inf)
        here &= ~leaves
    return tuple(thresholds)


def _check(readings: Readings) -> None:
    if readings.stages < 2:
        raise RunError(
            "a model with 1 predicting stage has no early exit", remedy="train one with at least 2 stages"
        )
    if not len(readings):
        raise DataError("there are no tokens to calibrate on", remedy="give more text")
    numbers = torch.cat((readings.margin, readings.shift, readings.gain))
    strange = int((~numbers.isfinite()).any(0).sum())
    if strange:
        raise RunError(
            f"the logits of {strange} of {len(readings)} tokens are not finite",
            remedy="calibrate weights from before the run diverged",
        )


def _rates(hits: Tensor) -> tuple[float, ...]:
    return tuple(hits.double().mean(1).tolist())


# Reading JSON


def _damaged(what: str) -> RunError:
    return RunError(f"the calibration is damaged: {what}", remedy="calibrate again")


def _field(values: object, name: str) -> Any:
    if not isinstance(values, Mapping) or name not in values:
        raise _damaged(f"{name!r} is missing")
    return values[name]


def _whole(values: object, name: str, least: int) -> int:
    value = _field(values, name)
    if type(value) is not int or value < least:
        raise _damaged(f"{name!r} is {value!r}, not a whole number of at least {least}")
    return value


def _row(
    row: object, name: str, count: int, *, high: float = sys.float_info.max, null: float | None = None
) -> tuple[float, ...]:
    """`count` numbers of 0..high. Where `null` is given, null stands for it."""
    if not isinstance(row, list) or len(row) != count:
        raise _damaged(f"{name!r} is not a list of {count} numbers")
    for value in row:
        allowed = null is not None if value is None else type(value) in (int, float) and 0 <= value <= high
        if not allowed:
            raise _damaged(f"{name!r} holds {value!r}, not a number of 0..{high:g}")
    return tuple(null if value is None and null is not None else float(value) for value in row)


def _bounds(values: object, name: str, count: int) -> Bounds:
    bounds = _field(values, name)
    p99 = _row(_field(bounds, "p99"), f"{name} p99", count)
    return Bounds(p99, _row(_field(bounds, "max"), f"{name} max", count))


def _sample(values: object, exits: int) -> Sample:
    lengths = _field(values, "lengths")
    if not isinstance(lengths, list) or any(type(n) is not int or n < 1 for n in lengths):
        raise _damaged("'lengths' is not a list of whole numbers of at least 1")
    rows: dict[str, list[tuple[float, ...]]] = {}
    for name, high in (("margins", sys.float_info.max), ("agrees", 1.0)):
        table = _field(values, name)
        if not isinstance(table, list) or len(table) != exits:
            raise _damaged(f"{name!r} is not a list of {exits} rows")
        rows[name] = [_row(row, name, sum(lengths), high=high) for row in table]
    if any(a not in (0, 1) for row in rows["agrees"] for a in row):
        raise _damaged("'agrees' holds numbers other than 0 and 1")
    agrees = tuple(tuple(int(a) for a in row) for row in rows["agrees"])
    return Sample(tuple(rows["margins"]), agrees, tuple(lengths))
