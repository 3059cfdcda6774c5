"""Experiment D: boundaries that are learned, with the losses alone and with the worth of usable stages.

Three stages are asked for (Σ(1 - λ) = 2, by a learned multiplier), and boundaries harden as they are learned
(`search/soft.py`). Arms differ in η, what a unit of capability U_cap is worth in bits per byte: 0, which
leaves the losses alone; 0.5, that of the deployment `modular` (`search/utility.py`); and 2. U_cap counts
stages of at least two layers. The partition is the nearest vertex with three stages of any length.

What is built in, and what is not. U_cap is 1 for 2,2,2 and at most 2/3 for the nine others. So 2,2,2 follows
from η alone once η outweighs what the losses say, however the models learn. With ℓ_i the loss of layer i in
bits per byte, as it was measured without U_cap, and Q(π) = Σ ℓ over the ends of the stages of π but the last,

    η* = max over π of (Q(2,2,2) - Q(π)) / (1 - U_cap(π)),  and at least 0

is the least worth that gives 2,2,2. Where η is at least η* with every seed, the answer was not open: then the
claim that boundaries harden inside is not judged, and η* is reported beside it. The paper gives η no number.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
Prop. 8.11, §10.1 (Prop. 10.2), §10.7 (Experiment D); η* is ours.
Cost: nine trainings with six heads each with the preset `small`.
Limits. The derivative of the soft loss by λ_i is minus the loss of layer i, so the losses alone draw
boundaries to where they are small while it is hot. With the preset `small` the later layers end close to one
another: little decides between them, and a longer training may decide otherwise. BPB is that of the last
layer, with the weights as they are: it is that of every partition of this model. η* is of the losses at the
last step, and boundaries are drawn by those of all steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from papers.outcome import Asked, Row, check_seeds
from papers.staged_runs import LAYERS, SHALLOW, Sizes, held_out, order0, values
from papers.verdicts import UNDECIDED, Claim, Drawing, Found, Series, above, every
from topograd.runs.search_config import SoftConfig
from topograd.runs.session import load_data
from topograd.search.dynamic import best_partition
from topograd.search.soft import soft_outcome, soft_run
from topograd.search.utility import DEPLOYMENTS, structural_capability
from topograd.topology.composition import Composition, enumerate_compositions
from topograd.training.runs import start

STAGES = 3
USABLE = 2
"""d_min: the fewest layers of a stage that counts as usable."""
WEIGHTS = {"losses alone": 0.0, "modular": DEPLOYMENTS["modular"].capability, "strong": 2.0}
"""η in bits per byte, by arm."""


def run(sizes: Sizes, args: Asked) -> Found:
    """Learn the boundaries of every arm and seed, and judge."""
    check_seeds(sizes.seeds)
    rows: list[Row] = []
    blind = order0(held_out(*load_data(sizes.config(0))))
    for seed in range(sizes.seeds):
        for arm, weight in WEIGHTS.items():
            learn = partial(_learned, arm, weight, sizes, seed)
            rows.append(args.kept.row({"arm": arm, "seed": seed}, learn) | {"order0": blind})
            args.on_more(len(rows), sizes.seeds * len(WEIGHTS))
    return Found(
        rows,
        "Partitions that boundaries hardened to",
        ("arm", "η", "partitions by seed", "d₀", "U_cap", "BPB", "boundaries", "η*"),
        tuple(_cells(rows, arm) for arm in WEIGHTS),
        _drawing(rows),
        claims(rows),
    )


def _learned(arm: str, weight: float, sizes: Sizes, seed: int) -> Row:
    """One run with soft boundaries; η is turned into nats, which are per byte here."""
    soft = SoftConfig(stages=STAGES, min_depth=USABLE, length=0.0, capability=weight * math.log(2))
    config = replace(soft_run(sizes.config(seed, sizes.soft_steps), soft), save_every=0)
    with TemporaryDirectory() as folder:
        trainer = start(config, Path(folder) / "run")
        results = trainer.train()
        result = soft_outcome(trainer.task.config, trainer.task.extra_state())
    composition = nearest(result["grad_scales"])
    return {
        "arm": arm,
        "seed": seed,
        "partition": list(composition.parts),
        "bpb": results["bpb"]["last"],
        "grad_scales": result["grad_scales"],
        "expected_boundaries": result["expected_boundaries"],
        "losses": result["losses"],
        "first_depth": composition.parts[0],
        "capability": structural_capability(composition, USABLE),
        "needed": needed_worth(result["losses"]),
    }


def nearest(grad_scales: Sequence[float]) -> Composition:
    """The partition with three stages, of any length, whose boundaries lie where λ is least."""
    layers = len(grad_scales) + 1
    open_ = [*grad_scales, 0.0]
    costs = {(a, b): open_[b - 1] for b in range(1, layers + 1) for a in range(b)}
    return best_partition(costs, layers, stages=STAGES).composition


def needed_worth(losses: Sequence[float]) -> float:
    """η* in bits per byte, from the losses of the layers in nats per byte.

    >>> round(needed_worth([9, 3, 9, 3, 9, 9]), 3), round(needed_worth([9, 3, 2, 3, 9, 9]) * math.log(2), 3)
    (0.0, 3.0)
    """

    def cost(pi: Composition) -> float:
        return sum(losses[end - 1] for end in pi.terminals[:-1]) / math.log(2)

    interior = Composition.parse(SHALLOW)
    others = [pi for pi in enumerate_compositions(len(losses), STAGES) if pi != interior]
    gaps = [(cost(interior) - cost(pi)) / (1 - structural_capability(pi, USABLE)) for pi in others]
    return max(0.0, *gaps)


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The collapse, the interior, and the difference between them."""
    alone, *with_worth = WEIGHTS
    deepest = LAYERS - STAGES + 1
    depths = values(rows, alone, "first_depth")
    results = [
        every(
            "collapse",
            "under the losses alone the first stage becomes as deep as three stages allow",
            f"the first stage has {deepest} layers",
            [depth == deepest for depth in depths],
        )
    ]
    for arm in with_worth:
        shallower = zip(depths, values(rows, arm, "first_depth"), strict=True)
        results += [
            _interior(rows, arm, max(values(rows, alone, "needed"))),
            above(
                f"{arm}: shallower",
                f"with U_cap (η = {WEIGHTS[arm]:g}) the first stage is shallower than under the losses alone",
                "the first stage's depth under the losses alone minus that with U_cap, layers,",
                [float(a - b) for a, b in shallower],
            ),
        ]
    return tuple(results)


def _interior(rows: Sequence[Row], arm: str, needed: float) -> Claim:
    """Whether every stage is usable, judged only where the losses could have said otherwise."""
    claim = every(
        f"{arm}: interior",
        f"with U_cap (η = {WEIGHTS[arm]:g}) it hardens where every stage is usable",
        f"every stage has at least {USABLE} layers, if η is below η* with some seed; else not judged",
        [value == 1.0 for value in values(rows, arm, "capability")],
    )
    if WEIGHTS[arm] < needed:
        return claim
    measured = f"{claim.measured}; η outweighs the losses (η* at most {needed:.3f}), so that it was not open"
    return replace(claim, measured=measured, verdict=UNDECIDED)


def _drawing(rows: Sequence[Row]) -> Drawing:
    """λ after every layer, at the coldest."""
    series = []
    for arm in WEIGHTS:
        curves = zip(*(row["grad_scales"] for row in rows if row["arm"] == arm), strict=True)
        series.append(Series.of(arm, range(1, LAYERS), [list(curve) for curve in curves]))
    return Drawing("Where gradient may cross in the end", "after layer", "grad_scale λ", tuple(series))


def _cells(rows: Sequence[Row], arm: str) -> tuple[str, ...]:
    partitions = [",".join(map(str, parts)) for parts in values(rows, arm, "partition")]
    means = [
        statistics.fmean(values(rows, arm, key))
        for key in ("first_depth", "capability", "bpb", "expected_boundaries")
    ]
    numbers = (f"{means[0]:.2f}", f"{means[1]:.2f}", f"{means[2]:.4f}", f"{means[3]:.2f}")
    needed = f"{max(values(rows, arm, 'needed')):.3f}"
    return (arm, f"{WEIGHTS[arm]:g}", "  ".join(partitions), *numbers, needed)
