"""The conjecture that concentrated projectors make heavy-tailed spectra: both measured, and their link.

The conjecture (§10.3): inputs of a class come to share their active neurons, so that D_l^{αβ} concentrates;
G_l^{αβ} = W_{l+1}ᵀ D_l^{αβ} W_{l+1} then carries gradients along few directions, the steps add up along
these, and W_{l+1}ᵀ W_{l+1} gets a heavy tail. Read in every run, for l = 1..L-1, at the start and at the end:

    within, across    mean rank share of D_l^{αβ}, over pairs of one class and of two (α ≠ β)
    contrast          within - across: how far classes have come apart
    alpha             exponent of the tail of W_{l+1}ᵀ W_{l+1}, its threshold fitted
    alpha_quarter     the same of the largest quarter of the eigenvalues, a threshold that cannot jump
    outlier           the largest eigenvalue over 8, where the bulk of a random matrix of this kind ends
    along_G           share of the leading input direction of W_{l+1}(T) - W_{l+1}(0) in the leading 1/16 of
                      the eigenvectors of the mean G_l(0): by chance 1/16
    along_u           the same for the second moments of u_l(0)

The link is the rank correlation between the growth of the contrast and the change of each tail measure,
after each layer's mean is taken off: over all runs, where further targets may drive both, and among runs with
the same targets. The intervals are those of 1000 resamplings of whole runs. The conjecture expects exponents
to fall where the contrast grows. It is called

    supported        the exponent falls with the contrast, also among runs with the same targets
    in part          it does over all runs only, so that the targets may drive both
    not supported    otherwise

for the fitted exponent and for that of the largest quarter alike: the verdict is that of the weaker one.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), §10.3,
which names no measure: these are ours. Limits. Small networks and full batches; no claim about large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from papers.gram_metrics.checks import gentle_step
from papers.gram_metrics.field_networks import (
    Data,
    Moment,
    Sizes,
    Task,
    Weights,
    descent,
    make_task,
    make_weights,
    reading_steps,
)
from papers.gram_metrics.field_state import State
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.tails import fit_tail, largest_tail
from papers.gram_metrics.transport import metric

Array = NDArray[np.float64]
MEASURES = ("alpha", "alpha_quarter", "outlier")
EDGE = 8.0
"""The largest eigenvalue of WᵀW for entries N(0, 2/N), N → ∞."""
PART = 16
RESAMPLES = 1000


def geometry(data: Data, sizes: Sizes, on_run: Callable[[], None]) -> dict[str, Any]:
    """All runs, and the links between what they show; `on_run` is called after each."""
    rows: list[dict[str, Any]] = []
    for high in sizes.highs:
        for seed in range(sizes.seeds):
            rows.append(one_run(data, sizes, high, seed))
            on_run()
    return {"runs": rows, "links": links(rows), "alpha_without_tail": _without_tail(sizes)}


def one_run(data: Data, sizes: Sizes, high: float, seed: int) -> dict[str, Any]:
    """What one run shows by layer: over time, and at its start and end."""
    task = make_task(data, sizes.examples, sizes.unseen, sizes.width, seed)
    weights = make_weights(sizes.depth, sizes.width, task.inputs.shape[1], seed)
    eta = gentle_step(kernel(weights, task.inputs).total) / high
    wanted, times = reading_steps(sizes.steps, sizes.readings), []
    moments = descent(weights, task.inputs, task.targets(high), eta, sizes.steps)
    for moment in moments:
        if moment.t == 0:
            start = moment
        if moment.t in wanted:
            layers = [shares(moment.state, task, layer) for layer in range(1, sizes.depth)]
            times.append({"step": moment.t, "layers": layers})
    layers = [_layer(task, start, moment, layer, sizes.pairs) for layer in range(1, sizes.depth)]
    loss = float(moment.residual.square().mean())
    accuracy = task.accuracy(moment.weights, high)
    return {"high": high, "seed": seed, "loss": loss, "accuracy": accuracy, "times": times, "layers": layers}


def shares(state: State, task: Task, layer: int) -> dict[str, float]:
    """Mean rank shares of D_l^{αβ} over pairs of one class and of two."""
    A = state.A(layer + 1)
    same = task.classes[:, None] == task.classes[None]
    others = ~torch.eye(len(A), dtype=torch.bool, device=A.device)
    within, across = float(A[same & others].mean()), float(A[~same].mean())
    return {"within": within, "across": across, "contrast": within - across}


def tails(W: Tensor) -> dict[str, float]:
    """How the spectrum of WᵀW ends."""
    values = torch.linalg.svdvals(W).square()
    quarter = largest_tail(values, max(2, len(values) // 4))
    fitted = fit_tail(values)
    return {
        "alpha": fitted.alpha,
        "tail_count": float(fitted.count),
        "alpha_quarter": quarter,
        "outlier": float(values.max()) / EDGE,
    }


def _layer(task: Task, start: Moment, end: Moment, layer: int, pairs: int) -> dict[str, Any]:
    """One layer's readings at the start and at the end, their changes, and where W_{l+1} moved."""
    ends: dict[str, dict[str, Any]] = {
        name: {
            **shares(moment.state, task, layer),
            **tails(moment.weights[layer]),
            "G": spectra(moment.weights, moment.state, task, layer, pairs),
        }
        for name, moment in (("start", start), ("end", end))
    }
    changes = {key: ends["end"][key] - ends["start"][key] for key in ("contrast", *MEASURES)}
    moved = end.weights[layer] - start.weights[layer]
    direction = torch.linalg.svd(moved).Vh[0]
    a, u, W = start.state.a[layer + 1].to(moved.dtype), start.state.u[layer], start.weights[layer]
    # the mean over all pairs of a^α ∘ a^β is the square of the mean mask
    mean_G = W.T @ (a.mean(0).square()[:, None] * W)
    return {
        "layer": layer,
        **ends,
        "changes": changes,
        "along_G": _share_in_leading(mean_G, direction),
        "along_u": _share_in_leading(u.T @ u, direction),
        "first_direction": float(torch.linalg.matrix_norm(moved, 2) ** 2 / moved.square().sum()),
    }


def _share_in_leading(operator: Tensor, direction: Tensor) -> float:
    """How much of a unit vector lies in the leading 1/16 of an operator's eigenvectors."""
    leading = torch.linalg.eigh(operator).eigenvectors[:, -max(1, len(operator) // PART) :]
    return float((leading.T @ direction).square().sum())


def spectra(
    weights: Weights, state: State, task: Task, layer: int, pairs: int
) -> dict[str, dict[str, float]]:
    """G_l^{αβ} over pairs of the upper class and across: largest eigenvalue, effective rank share."""
    upper, lower = (task.classes.nonzero()[:, 0].tolist(), (~task.classes).nonzero()[:, 0].tolist())
    chosen = {
        "within": list(zip(upper[::2], upper[1::2], strict=False))[:pairs],
        "across": list(zip(upper, lower, strict=False))[:pairs],
    }
    return {
        kind: _mean([_spectrum(weights, state, layer, pair) for pair in result])
        for kind, result in chosen.items()
    }


def _spectrum(weights: Weights, state: State, layer: int, pair: tuple[int, int]) -> dict[str, float]:
    N = state.v[layer].shape[1]
    matrix = metric(weights, state, layer, pair)(torch.eye(N, dtype=state.Y.dtype, device=state.Y.device))
    values = torch.linalg.eigvalsh(matrix).clamp(min=0)
    return {
        "largest": float(values[-1]),
        "effective": float(values.sum() ** 2 / values.square().sum().clamp(min=1e-300)) / N,
    }


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def links(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """For each measure of the tail: its correlation with the growth of the contrast, and an interval."""
    groups = {"all_runs": [0.0] * len(rows), "same_targets": [row["high"] for row in rows]}
    result: dict[str, dict[str, dict[str, float]]] = {}
    for measure in MEASURES:
        x, y = (
            np.array([[layer["changes"][key] for layer in row["layers"]] for row in rows])
            for key in ("contrast", measure)
        )
        result[measure] = {name: _correlation(x, y, np.array(group)) for name, group in groups.items()}
    return result


def _correlation(x: Array, y: Array, group: Array) -> dict[str, float]:
    """Spearman's ρ of (runs, layers), centred by layer within each group, and its 95 % interval."""
    x, y = _centred(x, group), _centred(y, group)
    drawn = np.random.default_rng(0).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.quantile(rank_correlations(x[drawn], y[drawn]), [0.025, 0.975])
    return {"rho": float(rank_correlations(x[None], y[None])[0]), "low": float(low), "high": float(high)}


def rank_correlations(x: Array, y: Array) -> Array:
    """Spearman's ρ of each sample, (samples, ...) to (samples,)."""
    ranks = [rankdata(values.reshape(len(values), -1), axis=1) for values in (x, y)]
    first, second = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    lengths = np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return np.asarray((first * second).sum(1) / lengths)


def _centred(values: Array, group: Array) -> Array:
    means = {key: values[group == key].mean(0) for key in set(group.tolist())}
    return values - np.stack([means[key] for key in group.tolist()])


def _without_tail(sizes: Sizes, draws: int = 100) -> dict[str, float]:
    """alpha of matrices as they are at the start: median and the range of most."""
    results = [
        tails(make_weights(2, sizes.width, sizes.width, 100 + seed)[1])["alpha"] for seed in range(draws)
    ]
    low, median, high = np.quantile(results, [0.05, 0.5, 0.95])
    return {"low": float(low), "median": float(median), "high": float(high)}


def projector_findings(geometry: Mapping[str, Any]) -> list[str]:
    """What the projectors and metrics did, in sentences."""
    top = max(run["high"] for run in geometry["runs"])
    runs = [run for run in geometry["runs"] if run["high"] == top]
    last = [run["layers"][-1] for run in runs]

    def mean(end: str, key: str) -> float:
        return float(np.mean([layer[end][key] for layer in last]))

    spread = {
        kind: float(np.mean([layer["end"]["G"][kind]["effective"] for layer in last]))
        for kind in ("within", "across")
    }
    changes = [layer["changes"]["contrast"] for run in geometry["runs"] for layer in run["layers"]]
    grew = sum(change > 0 for change in changes)
    before = float(np.mean([layer["start"]["G"]["within"]["effective"] for layer in last]))
    return [
        f"Projectors under the readout, targets up to {top:g}, means of {len(runs)} seeds: two inputs of one "
        f"class share {percent(mean('start', 'within'))} of the neurons at the start and "
        f"{percent(mean('end', 'within'))} at the end; two of unlike classes "
        f"{percent(mean('start', 'across'))} and {percent(mean('end', 'across'))}. Over all runs and "
        f"layers the contrast grew in {grew} of {len(changes)} cases.",
        f"G's effective rank there is {percent(before)} of the width at the start; at the end "
        f"{percent(spread['within'])} within a class and {percent(spread['across'])} across.",
    ]


def tail_findings(geometry: Mapping[str, Any]) -> list[str]:
    """What the spectra did, and whether the projectors drove it, in sentences."""
    layers = [layer for run in geometry["runs"] for layer in run["layers"]]
    chance, n = geometry["alpha_without_tail"], len(layers)
    plain = {
        end: sum(chance["low"] <= layer[end]["alpha"] <= chance["high"] for layer in layers)
        for end in ("start", "end")
    }
    beyond = [layer["end"]["outlier"] for layer in layers]
    links = geometry["links"]
    along = {key: float(np.mean([layer[key] for layer in layers])) for key in ("along_G", "along_u")}
    first = float(np.mean([layer["first_direction"] for layer in layers]))
    return [
        f"The fitted exponent of a random matrix of this size, which has no tail, is {chance['median']:.1f} "
        f"({chance['low']:.1f} to {chance['high']:.1f} for nine in ten). {plain['start']} of {n} "
        f"matrices are within that range before training and {plain['end']} after.",
        "Rank correlation of the exponent's change with the growth of the contrast: "
        f"{_link(links['alpha'])}. For the exponent of the largest quarter: {_link(links['alpha_quarter'])}.",
        f"The largest eigenvalue ends at {min(beyond):.2f} to {max(beyond):.2f} times the edge of a random "
        f"matrix's bulk. The correlation of its change with the contrast: {_link(links['outlier'])}.",
        f"One direction holds {percent(first)} of the squared change of a weight matrix, on average. "
        f"{percent(along['along_G'])} of it lies in the leading sixteenth of the eigenvectors of the mean G "
        f"at the start, and {percent(along['along_u'])} in that of the activations' second moments; chance "
        "is 6 %.",
    ]


def verdict(links: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What the correlations say of the conjecture."""
    words = {"alpha": "the fitted exponent", "alpha_quarter": "the exponent of the largest quarter"}
    grades = {measure: _grade(links[measure]) for measure in words}
    if max(grades.values()) == 0:
        return (
            "Supported here: where the classes' projectors come apart more, exponents fall more, also among "
            "runs with the same targets."
        )
    if max(grades.values()) == 1:
        return (
            "Supported in part: exponents fall with the contrast over all runs, but not among runs with the "
            "same targets, so that both may follow from how much there is to learn."
        )
    failed = " nor ".join(words[measure] for measure, grade in grades.items() if grade == 2)
    neither = "neither " if min(grades.values()) == 2 else ""
    follows = "falls" if neither else "does not fall"
    message = f"Not supported here: {neither}{failed} {follows} as the contrast between classes grows."
    return message + _outlier(links["outlier"])


def _outlier(link: Mapping[str, Mapping[str, float]]) -> str:
    """What the largest eigenvalue does, where it follows the contrast at all."""
    if link["all_runs"]["low"] <= 0:
        return ""
    alone = "" if link["same_targets"]["low"] > 0 else ", though not among runs with the same targets"
    return f" What grows with it is the largest eigenvalue, one outlier and no tail{alone}."


def _grade(link: Mapping[str, Mapping[str, float]]) -> int:
    """0: falls with the contrast among equals; 1: over all runs only; 2: neither."""
    falls = {name: result["high"] < 0 for name, result in link.items()}
    return 0 if all(falls.values()) else 1 if falls["all_runs"] else 2


def _link(result: Mapping[str, Mapping[str, float]]) -> str:
    words = {"all_runs": "over all runs", "same_targets": "among runs with the same targets"}
    return ", ".join(
        f"{result[key]['rho']:+.2f} [{result[key]['low']:+.2f}, {result[key]['high']:+.2f}] {words[key]}"
        for key in words
    )


def percent(share: float) -> str:
    """With one digit below ten percent."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"
