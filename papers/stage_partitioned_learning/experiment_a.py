"""Experiment A: stages that correct the sum of the ones before, instead of predicting alone.

The depth sweep twice: with cross-entropy at every stage, which predicts by its last stage, and with the
residual Log-OP (eq. 42), which predicts by the sum of the logits. Beside BPB stands U_k (eq. 35), by how many
nats stage k improves the running sum.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.5.4 (structural prediction), §10.7 (Experiment A). Cost: 30 trainings with the preset `small`.
Limits. U_k favours the residual objective by its form: stages that each predict alone double the logits when
they are summed, and the sum is too sure of itself, so U_k is negative there even where stages agree and are
right. That U_k rises does not say that later stages help. So `gain` stands beside it, BPB of the first stage
minus that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from papers.outcome import Asked, Row
from papers.staged_runs import (
    SWEEP,
    TAILS,
    Arm,
    Sizes,
    chain,
    differences,
    mean,
    slopes,
    spread,
    tail_use,
    train_arms,
    values,
)
from papers.verdicts import Claim, Drawing, Found, Series, above, outside

PLAIN = [chain(partition, f"{partition} alone") for partition in SWEEP]
RESIDUAL = [chain(partition, f"{partition} residual", "residual") for partition in SWEEP]


def run(sizes: Sizes, args: Asked) -> Found:
    """Train both sweeps and judge."""
    rows = train_arms([*PLAIN, *RESIDUAL], sizes, args)
    for row in rows:
        row["gain"] = row["bpb_prefix"][0] - row["bpb"]
    return Found(
        rows,
        "Stages that predict alone, and that correct the sum (residual Log-OP)",
        ("arm", "BPB", "±", "gain", "U of stage 1", "U of stage 2"),
        tuple(_cells(rows, arm) for arm in (*PLAIN, *RESIDUAL)),
        Drawing(
            "BPB by the depth of the first stage",
            "layers in the first stage",
            "bits per byte",
            (_curve("cross-entropy, last stage", rows, PLAIN), _curve("residual, sum", rows, RESIDUAL)),
        ),
        claims(rows),
    )


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The three questions of the experiment."""
    plain, residual = slopes(rows, PLAIN), slopes(rows, RESIDUAL)
    flatter = [abs(a) - abs(b) for a, b in zip(plain, residual, strict=True)]
    more = [b - a for a, b in zip(tail_use(rows, PLAIN), tail_use(rows, RESIDUAL), strict=True)]
    layer = sum(map(abs, plain)) / len(plain)
    return (
        above(
            "weaker slope",
            "the dependence of BPB on the depth of the first stage weakens",
            "the slope's size with cross-entropy minus that with the residual objective, BPB for each layer,",
            flatter,
        ),
        above(
            "tail use",
            "later stages are more useful: U_k rises for k > 0",
            "the mean U_k of later stages with the residual objective minus that with cross-entropy, nats,",
            more,
        ),
        outside(
            "tails differ",
            "3,2,1 and 3,1,2 are no longer the same",
            "residual BPB of 3,2,1 minus that of 3,1,2, against half a layer's fall with cross-entropy,",
            differences(rows, *(f"{partition} residual" for partition in TAILS)),
            layer / 2,
        ),
    )


def _curve(name: str, rows: Sequence[Row], arms: Sequence[Arm]) -> Series:
    return Series.of(name, [arm.depth for arm in arms], [values(rows, arm.name) for arm in arms])


def _cells(rows: Sequence[Row], arm: Arm) -> tuple[str, ...]:
    used = [row["usefulness"] for row in rows if row["arm"] == arm.name]
    means = [sum(of[k] for of in used) / len(used) for k in (1, 2)]
    gain = f"{mean(rows, arm.name, 'gain'):+.4f}"
    return (
        arm.name,
        f"{mean(rows, arm.name):.4f}",
        spread(rows, arm.name),
        gain,
        *(f"{u:+.4f}" for u in means),
    )
