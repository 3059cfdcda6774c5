"""Our fit of a spectrum's tail beside that of the package weightwatcher, on the same matrices.

Both fit x^-α to the values from a threshold on and choose the threshold at which the fit lies closest to the
values' own distribution F. Ours (`tails.py`) takes the largest distance on both sides of every step of
F, as Kolmogorov and Smirnov do; weightwatcher takes it on the lower side only. Here a third fit of our own
has that one-sided distance, so that what the rule changes can be told from everything else.

Matrices are W_2..W_L of the networks of `field_networks.py`, before and after training with the furthest
targets of the study of fields: 10 seeds, 3 matrices each.

Cost: a minute on one core, with the preset `small`. weightwatcher is not among the package's extras; without
it the study says so. Source: §10.3 of "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram
Metrics" (C. Nordio) asks for exponents and names no estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from papers.gram_metrics.checks import gentle_step
from papers.gram_metrics.field_networks import Sizes, descent, make_task, make_weights, sizes_of
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.tails import fit_tail
from papers.outcome import Asked, Result, ResultTable, Row
from topograd.errors import ConfigError

SAME = 1e-9
"""Exponents whose relative difference is at most this are the same."""


def run(args: Asked) -> Result:
    """Both programs on every matrix."""
    theirs = their_fit()
    sizes, seeds = sizes_of(args), args.seeds
    rows: list[Row] = []
    for seed in range(seeds):
        rows += args.kept.rows({"seed": seed}, partial(_seed_rows, sizes, seed, theirs))
        args.on_more(seed + 1, seeds)
    return Result(
        setting=(
            f"Matrices of networks of {sizes.depth} layers of {sizes.width} neurons, before and after "
            f"training with targets up to {max(sizes.highs):g}."
        ),
        rows=rows,
        tables=(table(rows),),
        findings=tuple(findings(rows)),
        seeds=seeds,
    )


def _seed_rows(sizes: Sizes, seed: int, theirs: Callable[[Tensor], tuple[float, int]]) -> list[Row]:
    return [compared(W, theirs) | where for where, W in matrices(sizes, seed)]


def their_fit() -> Callable[[Tensor], tuple[float, int]]:
    """weightwatcher's α and how many values are in its tail."""
    try:
        fit = import_module("weightwatcher.WW_powerlaw").WWFit
    except ImportError:
        raise ConfigError(
            "weightwatcher is not installed, with which this study compares",
            setting="package",
            given="weightwatcher",
            remedy="pip install weightwatcher",
        ) from None

    def of(values: Tensor) -> tuple[float, int]:
        result = fit(values.numpy())
        return float(result.alpha), len(result.data)

    return of


def matrices(sizes: Sizes, seed: int) -> Iterator[tuple[Row, Tensor]]:
    """W_2..W_L at the start and at the end of a run with the furthest targets, each with where it is from."""
    high = max(sizes.highs)
    task = make_task("teacher", sizes.examples, sizes.unseen, sizes.width, seed)
    start = make_weights(sizes.depth, sizes.width, task.inputs.shape[1], seed)
    eta = gentle_step(kernel(start, task.inputs).total) / high
    *_, end = descent(start, task.inputs, task.targets(high), eta, sizes.steps)
    for when, weights in (("before", start), ("after", end.weights)):
        for layer, W in enumerate(weights[1:], 2):
            yield {"when": when, "seed": seed, "layer": layer}, W


def compared(W: Tensor, theirs: Callable[[Tensor], tuple[float, int]]) -> Row:
    """The exponents and the sizes of the tails that three rules find in the spectrum of WᵀW."""
    values = torch.linalg.svdvals(W).square()
    fitted = fit_tail(values)
    row: Row = {"ours_alpha": fitted.alpha, "ours_count": fitted.count}
    row["theirs_alpha"], row["theirs_count"] = theirs(values)
    row["one_sided_alpha"], row["one_sided_count"] = one_sided(values)
    return row


def one_sided(values: Tensor) -> tuple[float, int]:
    """α and m of the threshold with the least max_i |P(x_i) - i/m|, i = 0..m-1: below each step of F only."""
    x = values.double().sort().values.numpy()
    best = (np.inf, 0.0, 0)
    for first in range(len(x) - 1):
        over = np.log(x[first:] / x[first])
        m = len(over)
        if over[-1] > 0:
            exponent = m / over.sum()
            apart = np.abs(1 - np.exp(-exponent * over) - np.arange(m) / m).max()
            best = min(best, (float(apart), 1 + float(exponent), m))
    return best[1:]


def table(rows: Sequence[Row]) -> ResultTable:
    """Medians before and after training."""
    cells = []
    for when in ("before", "after"):
        some = [row for row in rows if row["when"] == when]
        medians = (f"{np.median([row[f'{name}_alpha'] for row in some]):.2f}" for name in ("theirs", "ours"))
        tails = (_range(row[f"{name}_count"] for row in some) for name in ("theirs", "ours"))
        cells.append((f"{when} training", str(len(some)), *medians, *tails))
    header = ("matrices", "number", "α, theirs", "α, ours", "tail, theirs", "tail, ours")
    caption = "Median exponents and sizes of the tails, weightwatcher's and ours"
    return ResultTable(caption, header, tuple(cells))


def findings(rows: Sequence[Row]) -> list[str]:
    """Where the rules agree."""
    alike = sum(_same(row["one_sided_alpha"], row["theirs_alpha"]) for row in rows)
    ours = sum(row["ours_count"] == row["theirs_count"] for row in rows)
    return [
        f"With the distance on the lower side only, our fit gives weightwatcher's exponent for {alike} of "
        f"{len(rows)} matrices.",
        f"With the distance on both sides the threshold is the same for {ours} of {len(rows)}.",
    ]


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * abs(b)


def _range(counts: Iterator[int]) -> str:
    result = sorted(counts)
    return f"{result[0]} to {result[-1]}, median {int(np.median(result))}"
