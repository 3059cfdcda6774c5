"""Experiment D: boundaries that are learned, with the losses alone and with the worth of usable stages.

Three stages are asked for (Σ(1 - λ) = 2, by a learned multiplier), and boundaries harden as they are learned
(`search/soft.py`). Arms differ in η, what a unit of capability U_cap is worth in bits per byte: 0, which
leaves the losses alone; 0.5, that of the deployment `modular` (`search/utility.py`); and 2. U_cap counts
stages of at least two layers. The partition is the nearest vertex with three stages of any length, so that
neither answer is built in: of the ten, only 2,2,2 has three stages of two layers, and only 4,1,1 has the
largest first stage.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
Prop. 8.11, §10.1 (Prop. 10.2), §10.7 (Experiment D). The paper gives η no number.
Cost: nine trainings with six heads each with the preset `small`.
Limits. The derivative of the soft loss by λ_i is minus the loss of layer i, so the losses alone draw
boundaries to where they are small while it is hot. With the preset `small` layers 2 to 6 end within 0.05 nats
of one another: little decides between them, and a longer training may decide otherwise. BPB is read at the
last layer, with the weights as they are: it is that of every partition of this model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from topograd.runs.session import load_data
from topograd.search.dynamic import best_partition
from topograd.search.soft import SoftConfig, learn_boundaries
from topograd.search.utility import DEPLOYMENTS, structural_capability
from topograd.studies.staged_runs import LAYERS, OnMore, Sizes, check_seeds, held_out, order0, values
from topograd.studies.verdicts import Claim, Drawing, Found, Row, Series, above, every
from topograd.topology.composition import Composition

STAGES = 3
USABLE = 2
"""d_min: the fewest layers of a stage that counts as usable."""
WEIGHTS = {"losses alone": 0.0, "modular": DEPLOYMENTS["modular"].capability, "strong": 2.0}
"""η in bits per byte, by arm."""


def run(sizes: Sizes, seeds: int, on_more: OnMore) -> Found:
    """Learn the boundaries of every arm and seed, and judge."""
    check_seeds(seeds)
    rows: list[Row] = []
    blind = order0(held_out(*load_data(sizes.config(0))))
    for seed in range(seeds):
        for arm, weight in WEIGHTS.items():
            rows.append(_learned(arm, weight, sizes, seed) | {"order0": blind})
            on_more(len(rows), seeds * len(WEIGHTS))
    return Found(
        rows,
        "Partitions that boundaries hardened to",
        ("arm", "η", "partitions by seed", "d₀", "U_cap", "BPB", "boundaries"),
        tuple(_cells(rows, arm) for arm in WEIGHTS),
        _drawing(rows),
        claims(rows),
    )


def _learned(arm: str, weight: float, sizes: Sizes, seed: int) -> Row:
    """One training with soft boundaries; η is turned into nats, which are per byte here."""
    config = SoftConfig(stages=STAGES, min_depth=USABLE, length=0.0, capability=weight * math.log(2))
    found = learn_boundaries(sizes.config(seed, sizes.soft_steps), config)
    composition = nearest(found.transmissivities)
    return {
        "arm": arm,
        "seed": seed,
        "partition": list(composition.parts),
        "bpb": found.readings["bpb"]["last"],
        "transmissivities": found.transmissivities,
        "expected_boundaries": found.expected_boundaries,
        "losses": found.losses,
        "first_depth": composition.parts[0],
        "capability": structural_capability(composition, USABLE),
    }


def nearest(transmissivities: Sequence[float]) -> Composition:
    """The partition with three stages, of any length, whose boundaries lie where λ is least."""
    layers = len(transmissivities) + 1
    open_ = [*transmissivities, 0.0]
    costs = {(a, b): open_[b - 1] for b in range(1, layers + 1) for a in range(b)}
    return best_partition(costs, layers, stages=STAGES).composition


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The collapse, the interior, and the difference between them."""
    alone, *with_worth = WEIGHTS
    deepest = LAYERS - STAGES + 1
    depths = values(rows, alone, "first_depth")
    found = [
        every(
            "collapse",
            "under the losses alone the first stage becomes as deep as three stages allow",
            f"the first stage has {deepest} layers",
            [depth == deepest for depth in depths],
        )
    ]
    for arm in with_worth:
        usable = values(rows, arm, "capability")
        shallower = zip(depths, values(rows, arm, "first_depth"), strict=True)
        found += [
            every(
                f"{arm}: interior",
                f"with U_cap (η = {WEIGHTS[arm]:g}) it hardens where every stage is usable",
                f"every stage has at least {USABLE} layers",
                [value == 1.0 for value in usable],
            ),
            above(
                f"{arm}: shallower",
                f"with U_cap (η = {WEIGHTS[arm]:g}) the first stage is shallower than under the losses alone",
                "the first stage's depth under the losses alone minus that with U_cap, layers,",
                [float(a - b) for a, b in shallower],
            ),
        ]
    return tuple(found)


def _drawing(rows: Sequence[Row]) -> Drawing:
    """λ after every layer, at the coldest."""
    series = []
    for arm in WEIGHTS:
        curves = zip(*(row["transmissivities"] for row in rows if row["arm"] == arm), strict=True)
        series.append(Series.of(arm, range(1, LAYERS), [list(curve) for curve in curves]))
    return Drawing("Where gradient may cross in the end", "after layer", "transmissivity λ", tuple(series))


def _cells(rows: Sequence[Row], arm: str) -> tuple[str, ...]:
    partitions = [",".join(map(str, parts)) for parts in values(rows, arm, "partition")]
    means = [
        statistics.fmean(values(rows, arm, key))
        for key in ("first_depth", "capability", "bpb", "expected_boundaries")
    ]
    numbers = (f"{means[0]:.2f}", f"{means[1]:.2f}", f"{means[2]:.4f}", f"{means[3]:.2f}")
    return (arm, f"{WEIGHTS[arm]:g}", "  ".join(partitions), *numbers)
