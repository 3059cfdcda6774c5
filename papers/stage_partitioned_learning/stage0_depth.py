"""The Stage-0 depth sweep: does BPB fall with the depth of the first stage, and as in the paper's table?

Three stages with a head each, the first of 1 to 4 of six layers, and backprop beside them: one stage with one
head, the corner ((6), shared) of the space. BPB is that of what a chain predicts, its last stage; those of
the sum and the mean of the stages' logits are in the rows. The paper pools by a uniform Log-OP, which fixes
the stages' weights and not their scale, so neither is the obvious one.

Sizes differ by a factor of a thousand, so the tables are compared by shares: d_0 / L across, and up by how
many percent BPB is above that of the deepest first stage which both have, 4 of 6 and 8 of 12 layers.

BPB is also read after a quarter, a half and three quarters of the steps, on the way to the end of the one
schedule (§8.4: is the order there already, and do the configurations come apart?).

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning",
Lemma 8.1, §8.3 (table), §8.4 (Obs. 1 to 3), Corollary 8.12. Cost: 18 trainings.
Limits. At (4, 1, 1) the paper's sweep still goes on to (10, 1, 1), whose share 5/6 six layers in three stages
do not have. The paper has one seed and no BPB of backprop in its table. Backprop's one head moves about half
as fast as the heads of the partitions, which are a shared matrix plus a delta.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from papers.outcome import Asked, Row
from papers.staged_runs import (
    LAYERS,
    SWEEP,
    TAILS,
    Arm,
    Sizes,
    bpb_at,
    chain,
    differences,
    mean,
    slopes,
    spread,
    train_arms,
    values,
)
from papers.verdicts import Claim, Drawing, Found, Series, above, each, within

PAPER: Mapping[str, float] = {
    "2,5,5": 0.9663,
    "3,5,4": 0.9514,
    "4,4,4": 0.9340,
    "5,4,3": 0.9262,
    "6,3,3": 0.9180,
    "8,2,2": 0.9043,
    "9,2,1": 0.9008,
    "9,1,2": 0.9012,
    "10,1,1": 0.8958,
}
"""Final validation BPB by partition, §8.3: 12 layers, 362M parameters, one seed."""
TWINS: Mapping[str, str] = {"1,3,2": "2,5,5", "2,2,2": "4,4,4", "3,2,1": "6,3,3", "4,1,1": "8,2,2"}
"""The paper's partition with the same share of layers in its first stage."""
DEEPEST = "4,1,1"
RISING = ("1,3,2", "2,2,2", "3,2,1", "4,1,1")
BACKPROP = str(LAYERS)
SHARES = (0.25, 0.5, 0.75)
"""Of a training, at which BPB is read on the way."""


def run(sizes: Sizes, args: Asked) -> Found:
    """Train the sweep and backprop, and judge."""
    sweep, backprop = [chain(partition) for partition in SWEEP], chain(BACKPROP, heads="shared")
    rows = train_arms([*sweep, backprop], sizes, args, shares=SHARES)
    header = ("partition", "BPB", "±", "% above", "paper", "its BPB", "% above", "diff.")
    return Found(
        rows,
        "Bits per byte by the depth of the first stage, beside §8.3; % above 4,1,1 and above 8,2,2",
        header,
        tuple(_cells(rows, arm) for arm in (*sweep, backprop)),
        _drawing(rows, sweep),
        claims(rows, sweep),
    )


def claims(rows: Sequence[Row], sweep: Sequence[Arm]) -> tuple[Claim, ...]:
    """The lemma as a trend and step by step, the observations of §8.4, and backprop."""
    falls = _falls(rows, sweep)
    layer = abs(sum(falls) / len(falls))
    steps = [differences(rows, a, b) for a, b in itertools.pairwise(RISING)]
    best = [min(curve) for curve in zip(*(values(rows, arm.name) for arm in sweep), strict=True)]
    gaps = [inner - outer for inner, outer in zip(best, values(rows, BACKPROP), strict=True)]
    return (
        above(
            "trend",
            "BPB falls with the depth of the first stage (Lemma 8.1)",
            "the fall of BPB for each layer",
            falls,
        ),
        each("monotone", "no step rises (Lemma 8.1)", "the fall of BPB to the next depth", steps),
        above(
            "diminishing returns",
            "a further layer in the first stage gains less where it is deep already (Obs. 1)",
            "the fall of BPB from one layer to two minus that from three to four",
            [first - last for first, last in zip(steps[0], steps[-1], strict=True)],
        ),
        within(
            "tails",
            "the order of the tails does not matter (Obs. 2)",
            "BPB of 3,2,1 minus that of 3,1,2, against half a layer's fall,",
            differences(rows, *TAILS),
            layer / 2,
        ),
        each(
            "stable",
            "the order by the depth of the first stage is there on the way already (Obs. 3)",
            "the fall of BPB for each layer after a quarter, a half and three quarters of the steps",
            [_falls(rows, sweep, bpb_at(share)) for share in SHARES],
        ),
        above(
            "widens",
            "the configurations come further apart as training goes on (Obs. 3)",
            "the fall of BPB for each layer at the end minus that after a quarter of the steps",
            [end - early for end, early in zip(falls, _falls(rows, sweep, bpb_at(SHARES[0])), strict=True)],
        ),
        above(
            "backprop is best",
            "no interior configuration is optimal in BPB (Corollary 8.12)",
            "the best partition's BPB minus backprop's",
            gaps,
        ),
    )


def _falls(rows: Sequence[Row], sweep: Sequence[Arm], key: str = "bpb") -> list[float]:
    """By how much BPB falls for each layer of the first stage, seed by seed."""
    return [-slope for slope in slopes(rows, sweep, key)]


def excess(bpb: float, deepest: float) -> float:
    """By how many percent BPB is above that of the deepest first stage."""
    return 100 * (bpb / deepest - 1)


def _cells(rows: Sequence[Row], arm: Arm) -> tuple[str, ...]:
    ours = excess(mean(rows, arm.name), mean(rows, DEEPEST))
    own = (arm.name, f"{mean(rows, arm.name):.4f}", spread(rows, arm.name))
    if arm.name not in TWINS:
        return (*own, f"{ours:+.2f}", "–", "–", "–", "–")
    twin = TWINS[arm.name]
    theirs = excess(PAPER[twin], PAPER[TWINS[DEEPEST]])
    beside = (f"{PAPER[twin]:.4f}", f"{theirs:+.2f}", f"{ours - theirs:+.2f}")
    return (*own, f"{ours:+.2f}", twin, *beside)


def _drawing(rows: Sequence[Row], sweep: Sequence[Arm]) -> Drawing:
    """Percent above the deepest first stage: ours with bars, and the paper's points."""
    deepest = values(rows, DEEPEST)
    curves = [
        [excess(bpb, base) for bpb, base in zip(values(rows, arm.name), deepest, strict=True)]
        for arm in sweep
    ]
    ours = Series.of("ours, six layers", [arm.depth / LAYERS for arm in sweep], curves)
    paper = [chain(partition) for partition in PAPER]
    base = PAPER[TWINS[DEEPEST]]
    theirs = Series.of(
        "the paper's, 12 layers",
        [arm.depth / 12 for arm in paper],
        [[excess(PAPER[arm.name], base)] for arm in paper],
    )
    return Drawing(
        "BPB by the depth of the first stage",
        "share of the layers in the first stage",
        "BPB, percent above d₀ / L = 2/3",
        (ours, theirs),
    )
