"""When a token may leave early: three rules, each a threshold on the margin of every exit stage.

A token leaves after stage k where margin_k > threshold_k, at the first k for which this holds.

    sum-of-bounds   s Σ_{j >= k} p99(shift_j)      "Product of Experts" §5.3 (s is its safety factor)
    rival-gain      s p99(gain_k)                  measured from stage k to the last, not summed
    flip-rate       τ_k(ε)                         `depth.calibration`; ours

What each proves. A bound b on every |Δ_j| lets the leader fall by b and a rival rise by b, so it moves a
margin by up to 2b: sum-of-bounds proves what it says only with s = 2 and true bounds. A bound on the rival
gain is what the margin must exceed, and proves it with s = 1. But p99 and max of a calibration text are no
bounds on other text, so all three rules are approximate there; verified speculation is the exact mode.
The summed bounds are also loose: calibrated on small models, that rule hardly ever leaves at stage 0.

Candidate pruning (`survivors`) is the same inequality turned round, eq. 8 of Theorem 2.4.3: with θ the
leader's logit after stage k, a token j is dropped where z_{k,j} + bound < θ. The paper calls this block-max
WAND. It is not: there are no blocks with a bound each, and one bound serves the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from topograd.decode.calibration import Bounds, Calibration
from topograd.decode.readings import Readings
from topograd.errors import ConfigError, DataError
from topograd.topology.branches import path_name
from topograd.topology.plan import Plan

Rule = Literal["sum-of-bounds", "rival-gain", "flip-rate"]
Quantile = Literal["p99", "max"]


def thresholds(
    calibration: Calibration,
    rule: Rule,
    *,
    safety: float = 1.0,
    quantile: Quantile = "p99",
    eps: float = 0.001,
) -> tuple[float, ...]:
    """For each exit stage 0..K-2 the margin above which a token leaves; infinity means never.

    `safety` and `quantile` are of the two rules by bounds, `eps` is of the flip rate.
    """
    if rule not in get_args(Rule):
        raise ConfigError(setting="rule", given=rule, allowed=f"one of {get_args(Rule)}")
    if quantile not in get_args(Quantile):
        raise ConfigError(setting="quantile", given=quantile, allowed=f"one of {get_args(Quantile)}")
    if not 0 < safety < math.inf:
        raise ConfigError(setting="safety", given=safety, allowed="a finite number above 0")
    exits = range(calibration.stages - 1)
    if rule == "flip-rate":
        return tuple(calibration.threshold(k, eps) for k in exits)
    if rule == "rival-gain":
        return tuple(safety * gain for gain in _at(calibration.gain, quantile))
    shifts = _at(calibration.shift, quantile)
    return tuple(safety * sum(shifts[k:]) for k in exits)


def check_exits(plan: Plan) -> None:
    """Early exits and drafts need two stages that predict, at least, and a model that predicts by them."""
    if plan.prediction.path is not None:
        raise ConfigError(
            f"the model predicts by the path {path_name(plan.prediction.path)}, of which its "
            "exits are no part",
            remedy="use depth full",
        )
    if len(plan.predicting()) < 2:
        raise ConfigError(
            f"the model has {len(plan.predicting())} predicting stages of {len(plan.stages)}",
            remedy=("early exits and drafts need at least 2: train or import it with --partition, as 2,2"),
        )


def exits(readings: Readings, thresholds: Sequence[float]) -> Tensor:
    """(n,) long: the stage at which each token leaves; K-1 where it goes all the way."""
    if len(thresholds) != readings.stages - 1:
        raise ConfigError(
            f"{len(thresholds)} thresholds for {readings.stages} stages",
            remedy="give one for each stage but the last",
        )
    limits = torch.tensor([*thresholds, -math.inf], dtype=torch.float64)
    return (readings.margin > limits[:, None]).int().argmax(0)  # the first of the largest


def agreement(readings: Readings, exits: Tensor) -> float:
    """The share of tokens that leave with the last stage's top token (teacher-forced)."""
    if not len(readings):
        raise DataError("there are no tokens to compare", remedy="give more text")
    chosen = readings.top.gather(0, exits[None]).squeeze(0)
    return (chosen == readings.top[-1]).double().mean().item()


def survivors(logits: Tensor, bound: float) -> Tensor:
    """Indices of the tokens of one row (vocab,) that can still win if no rival gains more than `bound`.

    The leader is always among them. With a bound that holds for a token's true gain, so is the final argmax,
    up to the rounding of the logits.
    """
    if not bound >= 0:
        raise ConfigError(setting="bound", given=bound, remedy="a bound on a gain must be at least 0")
    if logits.ndim != 1:
        raise ConfigError(
            f"logits have shape {tuple(logits.shape)}", remedy="prune one row (vocab,) at a time"
        )
    return torch.nonzero(logits.max() - logits <= bound).squeeze(-1)


def _at(bounds: Bounds, quantile: Quantile) -> tuple[float, ...]:
    return bounds.p99 if quantile == "p99" else bounds.max
