"""What the fields of a network do while it learns: kernels by layer, frozen kernels by width, stages.

The paper leaves its section on numerical observations empty; this study fills it. Five parts:

    layers     K's parts during one run: which layer carries the decay of the residual, and when. A layer's
               part rᵀ K^{[l]} r = |Σ_β r^β z_l^β (u_{l-1}^β)ᵀ|²/N² is the length of its gradient, squared
    depths     what each layer carried over whole runs, for several depths and seeds
    drift      max over the run of |r - r_frozen| over |r(0)|, against width: with targets as they are, and,
               as a control, with targets drawn toward Y(0) by 1/√N, where kernels freeze
    geometry   projectors, pullback metrics and tails, and the conjecture of §10.3 (`tail_conjecture.py`)
    staged     what a step does to the residual of each stage, and what K of the stages says it does

Networks and tasks are those of `field_networks.py`. Every sentence is made from the numbers; none says more.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), sections
9 and 10.3. Cost: about a minute and a half on one core with the preset `small`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papers.gram_metrics.checks import gentle_step
from papers.gram_metrics.field_networks import (
    LEADING,
    Data,
    Sizes,
    Weights,
    descent,
    make_task,
    make_weights,
    reading_steps,
    sizes_of,
)
from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.kernel import kernel, kernel_of
from papers.gram_metrics.prediction import frozen
from papers.gram_metrics.staged import staged_kernel
from papers.gram_metrics.tail_conjecture import geometry, percent, projector_findings, tail_findings, verdict
from papers.outcome import Asked, Result, ResultTable

WORDS = {"teacher": "a generated teacher", "digits": "scikit-learn's digits, even against odd"}
Part = Mapping[str, Any]


def teacher(args: Asked) -> Result:
    """The study on a generated teacher."""
    return study("teacher", args)


def digits(args: Asked) -> Result:
    """The study on scikit-learn's digits."""
    return study("digits", args)


def study(data: Data, args: Asked) -> Result:
    """Every part."""
    sizes, done = sizes_of(args), 0
    total = 2 + len(sizes.depths) * sizes.depth_seeds + len(sizes.widths) * sizes.drift_seeds
    total += len(sizes.highs) * sizes.seeds

    def on_run() -> None:
        nonlocal done
        done += 1
        args.on_more(done, total)

    parts: dict[str, Any] = {"layers": layers_during_training(data, sizes)}
    on_run()
    parts["depths"] = shares_by_depth(data, sizes, on_run)
    parts["drift"] = drift_by_width(data, sizes, on_run)
    parts["geometry"] = geometry(data, sizes, on_run)
    parts["staged"] = staged_residuals(data, sizes)
    on_run()
    return Result(
        setting=(
            f"Networks of {sizes.depth} layers of {sizes.width} neurons, without biases, that learn "
            f"{WORDS[data]}, from {sizes.examples} examples by plain gradient descent. The output is the "
            "mean of the last layer."
        ),
        rows=parts["depths"],
        tables=(_depth_table(parts["depths"]),),
        findings=tuple(findings(parts)),
        verdict=verdict(parts["geometry"]["links"]),
        record={"data": data, "sizes": asdict(sizes), **parts},
    )


def layers_during_training(data: Data, sizes: Sizes) -> dict[str, Any]:
    """K's parts along one run."""
    task = make_task(data, sizes.examples, sizes.unseen, sizes.width, seed=0)
    weights = make_weights(sizes.depth, sizes.width, task.inputs.shape[1], seed=0)
    start = kernel(weights, task.inputs)
    eta = gentle_step(start.total)
    wanted, rows = reading_steps(sizes.steps, sizes.readings), []
    carried = torch.zeros(sizes.depth, dtype=torch.float64)
    for moment in descent(weights, task.inputs, task.targets(), eta, sizes.steps):
        decays = torch.stack([drive.square().sum() for drive in moment.drives.values()])
        carried += decays
        if moment.t in wanted:
            K = kernel_of(moment.state, moment.state)
            moved = (K.layers - start.layers).flatten(1).norm(dim=1) / start.layers.flatten(1).norm(dim=1)
            rows.append(
                {
                    "step": moment.t,
                    "loss": float(moment.residual.square().mean()),
                    "accuracy": task.accuracy(moment.weights),
                    "decay_shares": (decays / decays.sum()).tolist(),
                    "traces": (K.layers.diagonal(dim1=1, dim2=2).mean(1)).tolist(),
                    "Q": [float(moment.state.Q(i).diagonal().mean()) for i in range(sizes.depth)],
                    "S": [float(moment.state.S(i).diagonal().mean()) for i in range(1, sizes.depth + 1)],
                    "moved": moved.tolist(),
                    **_alignment(K.total, moment.residual),
                }
            )
    return {"eta": eta, "rows": rows, "carried": (carried / carried.sum()).tolist()}


def _alignment(K: Tensor, r: Tensor) -> dict[str, float]:
    """r and K's eigenvectors: its share in the leading ones, and rᵀKr/rᵀr over the mean eigenvalue."""
    shares = (torch.linalg.eigh(K).eigenvectors.T @ r).square() / r.square().sum()
    speed = (r @ K @ r) / r.square().sum() / K.diagonal().mean()
    return {"leading_share": float(shares[-LEADING:].sum()), "speed": float(speed)}


def shares_by_depth(data: Data, sizes: Sizes, on_run: Callable[[], None]) -> list[dict[str, Any]]:
    """What each layer carried of the loss's decay over a whole run, the first layer first."""
    rows = []
    for depth in sizes.depths:
        for seed in range(sizes.depth_seeds):
            task = make_task(data, sizes.examples, sizes.unseen, sizes.width, seed)
            weights = make_weights(depth, sizes.width, task.inputs.shape[1], seed)
            eta = gentle_step(kernel(weights, task.inputs).total)
            carried = torch.zeros(depth, dtype=torch.float64)
            for moment in descent(weights, task.inputs, task.targets(), eta, sizes.steps):
                carried += torch.stack([drive.square().sum() for drive in moment.drives.values()])
            shares = (carried / carried.sum()).tolist()
            rows.append({"depth": depth, "seed": seed, "carried": shares})
            on_run()
    return rows


def drift_by_width(data: Data, sizes: Sizes, on_run: Callable[[], None]) -> dict[str, Any]:
    """How far the frozen kernel's run is from the true one, by width and seed."""
    rows: list[dict[str, Any]] = []
    for width in sizes.widths:
        for seed in range(sizes.drift_seeds):
            rows.append({"width": width, "seed": seed, **_drifts(data, sizes, width, seed)})
            on_run()
    logs = np.log([row["width"] for row in rows])
    slopes = {
        kind: float(np.polyfit(logs, np.log([row[kind] for row in rows]), 1)[0])
        for kind in ("plain", "control")
    }
    return {"rows": rows, "slopes": slopes}


def _drifts(data: Data, sizes: Sizes, width: int, seed: int) -> dict[str, float]:
    """The drift with the targets as they are, and with targets near Y(0)."""
    task = make_task(data, sizes.drift_examples, 0, width, seed)
    weights = make_weights(sizes.depth, width, task.inputs.shape[1], seed)
    K, start = kernel(weights, task.inputs).total, state_of(weights, task.inputs).Y
    eta, result = gentle_step(K), {}
    near = (sizes.widths[0] / width) ** 0.5
    for kind, factor in (("plain", 1.0), ("control", near)):
        targets = start + factor * (task.targets() - start)
        predicted = frozen(weights, task.inputs, targets, eta=eta, steps=sizes.drift_steps).residuals
        moments = descent(weights, task.inputs, targets, eta, sizes.drift_steps)
        true = torch.stack([moment.residual for moment in moments])
        result[kind] = float((true - predicted).norm(dim=1).max() / true[0].norm())
    return result


def staged_residuals(data: Data, sizes: Sizes) -> dict[str, Any]:
    """Two stages that learn together: one step of each residual, measured and predicted."""
    stages = (sizes.depth // 2, sizes.depth - sizes.depth // 2)
    task = make_task(data, sizes.examples, sizes.unseen, sizes.width, seed=0)
    weights = make_weights(sizes.depth, sizes.width, task.inputs.shape[1], seed=0)
    targets, wanted, rows = task.targets(), reading_steps(sizes.steps, sizes.readings), []
    eta = gentle_step(kernel(weights, task.inputs).total)
    for t in range(sizes.steps + 1):
        after, outputs = _staged_step(weights, task.inputs, targets, eta, stages)
        if t in wanted:
            K = staged_kernel(weights, task.inputs, stages)
            moved = _staged_step(after, task.inputs, targets, eta, stages)[1] - outputs
            together, own = K.drift(targets, eta), K.own_drift(targets, eta)
            rows.append(
                {
                    "step": t,
                    "losses": (outputs - targets).square().mean(1).tolist(),
                    "missed_together": _relative(together, moved),
                    "missed_own": _relative(own, moved),
                }
            )
        weights = after
    return {"eta": eta, "stages": list(stages), "rows": rows, "accuracy": task.accuracy(weights)}


def _staged_step(
    weights: Weights, inputs: Tensor, targets: Tensor, eta: float, stages: Sequence[int]
) -> tuple[Weights, Tensor]:
    """The weights after a step of every stage on its own loss, and the outputs (stages, M) before it."""
    after: Weights = []
    outputs, u, start = [], inputs, 0
    for size in stages:
        now, later = descent(weights[start : start + size], u, targets, eta, 1)
        after += later.weights
        outputs.append(now.state.Y)
        u, start = now.state.u[size], start + size
    return after, torch.stack(outputs)


def _relative(predicted: Tensor, measured: Tensor) -> list[float]:
    """|predicted - measured| over |measured|, for each stage."""
    return ((predicted - measured).norm(dim=1) / measured.norm(dim=1)).tolist()


def findings(parts: Part) -> list[str]:
    """What came out, in the order of the parts."""
    return [
        *_layers(parts["layers"]),
        _depths(parts["depths"]),
        *_drift(parts["drift"]),
        *projector_findings(parts["geometry"]),
        *tail_findings(parts["geometry"]),
        *_staged(parts["staged"]),
    ]


def _layers(layers: Part) -> list[str]:
    first, last = layers["rows"][0], layers["rows"][-1]
    carried, traces = layers["carried"], np.array(last["traces"])
    most, largest = int(np.argmax(carried)), int(np.argmax(traces))
    unlike = "" if most == largest else ": what a layer carries cannot be told from its trace"
    return [
        f"From the first layer to the last, the layers carried {', '.join(map(percent, carried))} of the "
        f"loss's decay over the run; layer {most + 1} carried most. Of K's trace at the end the largest part "
        f"is that of layer {largest + 1}, {percent(traces[largest] / traces.sum())}{unlike}.",
        f"K's trace went to {sum(last['traces']) / sum(first['traces']):.2f} times that of the start, and "
        f"its parts moved by {', '.join(f'{moved:.2f}' for moved in last['moved'])} of their own length.",
        f"At the start the {LEADING} leading eigenvectors of K hold {percent(first['leading_share'])} of "
        f"the residual, and it falls {first['speed']:.2f} times as fast as along a mean eigenvector. At the "
        f"end they hold {percent(last['leading_share'])}, and it falls {last['speed']:.2f} times as fast.",
        f"Loss {first['loss']:.3f} to {last['loss']:.5f}; {percent(last['accuracy'])} of the unseen inputs "
        "are on their side of the middle.",
    ]


def _depths(rows: Sequence[Part]) -> str:
    falling = sum(row["carried"] == sorted(row["carried"], reverse=True) for row in rows)
    depths, seeds = sorted({row["depth"] for row in rows}), len({row["seed"] for row in rows})
    return (
        f"Of {len(rows)} runs with {', '.join(map(str, depths))} layers and {seeds} seeds each, what a layer "
        f"carried falls from the first layer to the last in {falling}."
    )


def _depth_table(rows: Sequence[Part]) -> ResultTable:
    most = max(row["depth"] for row in rows)
    cells = []
    for row in rows:
        shares = [percent(share) for share in row["carried"]]
        cells.append((f"{row['depth']} layers, seed {row['seed']}", *shares, *["–"] * (most - len(shares))))
    header = ("run", *(f"layer {layer + 1}" for layer in range(most)))
    return ResultTable("What each layer carried of the loss's decay", header, tuple(cells))


def _drift(drift: Part) -> list[str]:
    rows, slopes = drift["rows"], drift["slopes"]
    widths, seeds = sorted({row["width"] for row in rows}), len({row["seed"] for row in rows})

    def mean(kind: str, width: int) -> str:
        return percent(float(np.mean([row[kind] for row in rows if row["width"] == width])))

    ends = (widths[0], widths[-1])
    plain, control = ([mean(kind, width) for width in ends] for kind in ("plain", "control"))
    sentences = [
        f"The frozen kernel's residuals are off by up to {plain[0]} of |r(0)| at width {ends[0]} and "
        f"{plain[1]} at width {ends[1]} (means of {seeds} seeds): the error goes as width to the power "
        f"{slopes['plain']:.2f}.",
        f"With targets drawn toward Y(0) by 1/√width it goes from {control[0]} to {control[1]}, as width to "
        f"the power {slopes['control']:.2f}.",
    ]
    if slopes["plain"] > -0.25 and slopes["control"] < -0.4:
        sentences.append(
            "So a small residual freezes the kernel, and width only where the residual shrinks with it. "
            "Under the mean as readout the fields move by an amount of order one at any width."
        )
    return sentences


def _staged(staged: Part) -> list[str]:
    rows, stages = staged["rows"], len(staged["stages"])
    together, own = (
        [float(np.median([row[key][k] for row in rows])) for k in range(stages)]
        for key in ("missed_together", "missed_own")
    )
    return [
        f"Stages of {' and '.join(map(str, staged['stages']))} layers. One step of each stage's residual is "
        f"predicted by all blocks of K with an error of {_list(together)} (medians over the run, first stage "
        "first).",
        f"By its own block alone the error is {_list(own)}, and {_list(rows[0]['missed_own'])} at the start: "
        "the difference is what the stages below do to a stage's inputs.",
    ]


def _list(shares: Sequence[float]) -> str:
    return " and ".join(percent(share) for share in shares)
