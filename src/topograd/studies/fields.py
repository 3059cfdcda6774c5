"""What the fields of a network do while it learns: kernels by layer, frozen kernels by width, stages.

The paper leaves its section on numerical observations empty; this study fills it. Four parts:

    layers     K's parts during one run: which layer carries the decay of the residual, and when. A layer's
               part rᵀ K^{[l]} r = |Σ_β r^β z_l^β (u_{l-1}^β)ᵀ|²/N² is the length of its gradient, squared
    drift      max over the run of |r - r_frozen| over |r(0)|, against width: with targets as they are, and,
               as a control, with targets drawn toward Y(0) by 1/√N, where kernels freeze
    geometry   projectors, pullback metrics and tails, and the conjecture of §10.3 (`fields_geometry.py`)
    staged     what a step does to the residual of each stage, and what K of the stages says it does

Networks and tasks are those of `fields_runs.py`; sentences are made in `fields_summary.py`.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio), sections
9 and 10.3. Cost: about a minute on one core with the preset `small`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topograd.fields.checks import gentle_step
from topograd.fields.field_state import state_of
from topograd.fields.kernel import kernel, kernel_of
from topograd.fields.prediction import frozen
from topograd.fields.staged import staged_kernel
from topograd.studies.fields_geometry import geometry
from topograd.studies.fields_runs import (
    LEADING,
    PRESETS,
    Data,
    OnMore,
    Preset,
    Sizes,
    Weights,
    descent,
    make_task,
    make_weights,
    reading_steps,
)
from topograd.studies.fields_summary import summary


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


def drift_by_width(data: Data, sizes: Sizes, on_more: OnMore) -> dict[str, Any]:
    """How far the frozen kernel's run is from the true one, by width and seed."""
    rows: list[dict[str, Any]] = []
    total = len(sizes.widths) * sizes.drift_seeds
    for width in sizes.widths:
        for seed in range(sizes.drift_seeds):
            rows.append({"width": width, "seed": seed, **_drifts(data, sizes, width, seed)})
            on_more(len(rows), total)
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
    eta, found = gentle_step(K), {}
    near = (sizes.widths[0] / width) ** 0.5
    for kind, factor in (("plain", 1.0), ("control", near)):
        targets = start + factor * (task.targets() - start)
        predicted = frozen(weights, task.inputs, targets, eta=eta, steps=sizes.drift_steps).residuals
        moments = descent(weights, task.inputs, targets, eta, sizes.drift_steps)
        true = torch.stack([moment.residual for moment in moments])
        found[kind] = float((true - predicted).norm(dim=1).max() / true[0].norm())
    return found


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


def study(data: Data, preset: Preset, on_more: Callable[[str], OnMore]) -> dict[str, Any]:
    """Every part, as plain numbers; `on_more(part)` is told how far a part is."""
    began, sizes = time.perf_counter(), PRESETS[preset]
    record: dict[str, Any] = {"data": data, "preset": preset, "sizes": asdict(sizes)}
    record["layers"] = layers_during_training(data, sizes)
    record["drift"] = drift_by_width(data, sizes, on_more("widths and seeds"))
    record["geometry"] = geometry(data, sizes, on_more("runs of the conjecture"))
    record["staged"] = staged_residuals(data, sizes)
    record |= summary(record)
    record["seconds"] = time.perf_counter() - began
    return record
