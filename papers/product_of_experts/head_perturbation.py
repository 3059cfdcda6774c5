"""Does training stages through one head make them robust against noise in that head?

The head W (vocab, width) of a trained model becomes W + σ s ε, ε normal, s the root mean square of W's
entries, and σ 0.01 to 1. Read is how much the cross-entropy of the whole model rises, mean over DRAWS draws:

    rise(σ) = CE(W + σ s ε) - CE(W)                 ratio(σ) = rise of the staged model / rise of backprop

"Product of Experts" §8.6 asked whether a head that moved under several stages makes representations robust,
and found the contrary: at every σ the staged model loses as much as backprop or more, ratios 1.02 to 2.59. It
does not say whether its σ is absolute; here it is relative, so that heads of different size compare.

Both arms share their first weights and data, and both have one head. Cost: two trainings a seed.
Limits: small models of bytes; the noise is in the head alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from papers.outcome import Asked, Row
from papers.staged_runs import SHALLOW, Sizes, chain, mean, train_arms, values
from papers.verdicts import Claim, Drawing, Found, Series, above, each
from topograd.data import Text
from topograd.exec.forward import Predictor
from topograd.nn.gpt import GPT
from topograd.topology.plan import Plan

SIGMAS = (0.01, 0.03, 0.1, 0.3, 1.0)
DRAWS = 4
BATCH = 32
STAGED, BACKPROP = "staged", "backprop"
ARMS = (chain(SHALLOW, STAGED, heads="shared"), chain("6", BACKPROP, heads="shared"))


def run(sizes: Sizes, args: Asked) -> Found:
    """Train both, perturb their heads, and judge."""
    rows = train_arms(ARMS, sizes, args, probe)
    cells = [
        (
            f"σ = {sigma:g}",
            *(f"{mean(rows, arm.name, _key(sigma)):+.4f}" for arm in ARMS),
            f"{statistics.fmean(ratios(rows, sigma)):.2f}",
        )
        for sigma in SIGMAS
    ]
    series = [
        Series.of(
            arm.name, [math.log10(s) for s in SIGMAS], [values(rows, arm.name, _key(s)) for s in SIGMAS]
        )
        for arm in ARMS
    ]
    return Found(
        rows,
        "Rise of the cross-entropy under noise in the head, nats a token",
        ("noise", STAGED, BACKPROP, "ratio"),
        tuple(cells),
        Drawing("Noise in the head", "log10 σ", "rise, nats a token", tuple(series)),
        claims(rows),
    )


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """Worse at every σ from 0.1 on, where noise is felt; and by how much in all."""
    felt = [sigma for sigma in SIGMAS if sigma >= 0.1]
    return (
        each(
            "no robustness",
            "the staged model loses more than backprop at every σ",
            "the staged model's rise minus backprop's at σ = 0.1, 0.3 and 1",
            [_gaps(rows, sigma) for sigma in felt],
        ),
        above(
            "the ratio is above 1",
            "ratios of 1.02 to 2.59",
            "the mean log ratio over σ = 0.1, 0.3 and 1",
            [
                statistics.fmean(logs)
                for logs in zip(*([math.log(r) for r in ratios(rows, s)] for s in felt), strict=True)
            ],
        ),
    )


def ratios(rows: Sequence[Row], sigma: float) -> list[float]:
    """The staged model's rise over backprop's, seed by seed; rises that are no rises count as tiny ones."""
    pairs = zip(values(rows, STAGED, _key(sigma)), values(rows, BACKPROP, _key(sigma)), strict=True)
    return [max(a, 1e-9) / max(b, 1e-9) for a, b in pairs]


def _gaps(rows: Sequence[Row], sigma: float) -> list[float]:
    pairs = zip(values(rows, STAGED, _key(sigma)), values(rows, BACKPROP, _key(sigma)), strict=True)
    return [a - b for a, b in pairs]


def _key(sigma: float) -> str:
    return f"rise {sigma:g}"


@torch.no_grad()
def probe(stack: GPT, plan: Plan, text: Text) -> Mapping[str, Any]:
    """By how much noise of each size raises the loss; the same draws for every arm."""
    predictor = Predictor(stack, plan)
    weight = stack.head.weight
    retained, size = weight.clone(), float(weight.square().mean().sqrt())
    base = _loss(predictor, text)
    result = {}
    for sigma in SIGMAS:
        generator = torch.Generator().manual_seed(int(1000 * sigma))
        rises = []
        for _ in range(DRAWS):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(retained + sigma * size * noise)
            rises.append(_loss(predictor, text) - base)
        result[_key(sigma)] = statistics.fmean(rises)
    weight.copy_(retained)
    return result


def _loss(predictor: Predictor, text: Text) -> float:
    total, count = 0.0, 0
    for inputs, targets in zip(text.inputs.split(BATCH), text.targets.split(BATCH), strict=True):
        counted = targets != -100
        logits = predictor(inputs)[counted]
        total += float(F.cross_entropy(logits, targets[counted], reduction="sum"))
        count += int(counted.sum())
    return total / count
