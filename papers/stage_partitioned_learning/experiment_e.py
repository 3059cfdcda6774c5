"""Experiment E: the effective rank at the end of the first stage, and relays that keep or lose it.

E1. Over the depth sweep, the correlation across partitions of r_eff of the first stage's last hidden state
(eq. 23) with -BPB, seed by seed: positive if a wider representation goes with a better model. "A strong
positive correlation" (§10.7) is read so, for BPB itself is better when smaller. Both follow the depth of the
first stage, so a correlation says nothing about which causes which; the rows allow other readings.

E2. On 2,2,2 the relay behind the first stage becomes a multiplicative gate, a residual gate (eq. 43), or a
bounded sigmoid, the negative control. `kept` is r_eff behind the relay over that before it.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §8.9
(Prop. 8.16, Cor. 8.17), §10.5.5 (Def. 10.17, Prop. 10.18), §10.7 (Experiment E).
Cost: 24 trainings with the preset `small`. Limits. Five partitions with four depths are few points for a
correlation. Relays learn slowly (`training/optimizers.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from papers.outcome import Asked, Row
from papers.staged_runs import (
    SHALLOW,
    SWEEP,
    Arm,
    Sizes,
    chain,
    differences,
    mean,
    spread,
    train_arms,
    values,
)
from papers.verdicts import Claim, Drawing, Found, Series, above
from topograd.data import Text
from topograd.nn.gpt import GPT
from topograd.search.property_readings import edge_ranks
from topograd.topology.dag import own_relay
from topograd.topology.plan import Plan

STRONG = 0.5
"""A correlation above this is called strong; the paper gives no number."""
RELAYS = ("gate", "residual-gate", "sigmoid")


def behind_root(kind: str) -> Arm:
    """2,2,2 with a relay of `kind` between its first two stages."""
    arm = chain(SHALLOW, f"{SHALLOW} {kind}")
    first, second, *rest = arm.topology.stages
    inputs = replace(second.sources[0], relay=own_relay(kind, 1))
    stages = (first, replace(second, sources=(inputs,)), *rest)
    return replace(arm, topology=replace(arm.topology, stages=stages))


ARMS = [chain(partition) for partition in SWEEP]
RELAYED = [behind_root(kind) for kind in RELAYS]


def run(sizes: Sizes, args: Asked) -> Found:
    """Train the sweep and the relays, and judge."""
    rows = train_arms([*ARMS, *RELAYED], sizes, args, probe)
    return Found(
        rows,
        "Effective rank at the end of the first stage; relays behind it",
        ("arm", "BPB", "±", "Δ", "rank", "behind", "kept"),
        tuple(_cells(rows, arm) for arm in (*ARMS, *RELAYED)),
        Drawing(
            "BPB by the effective rank at the end of the first stage",
            "effective rank",
            "bits per byte",
            tuple(_points(rows, arm) for arm in ARMS),
        ),
        claims(rows),
    )


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """E1's correlation, E2's gates, and the control."""
    gates = [
        above(
            f"E2: {kind}",
            f"a {kind.replace('-', ' ')} behind the first stage lowers BPB",
            "BPB with the identity minus that with the gate",
            differences(rows, SHALLOW, f"{SHALLOW} {kind}"),
        )
        for kind in RELAYS[:2]
    ]
    control = f"{SHALLOW} {RELAYS[2]}"
    return (
        above(
            "E1: rank and BPB",
            "the effective rank at the end of the first stage correlates strongly with a better BPB",
            "the correlation of effective rank and -BPB over the sweep",
            correlations(rows),
            STRONG,
        ),
        *gates,
        above(
            "control: BPB",
            "a bounded relay raises BPB (Obs. 8.15)",
            "BPB with the sigmoid minus that with the identity",
            differences(rows, control, SHALLOW),
        ),
        above(
            "control: rank",
            "a bounded relay narrows what it passes on (Prop. 8.16), and a gate does less so (Prop. 10.18)",
            "the rank kept by the gate minus that kept by the sigmoid",
            differences(rows, f"{SHALLOW} gate", control, "kept"),
        ),
    )


def correlations(rows: Sequence[Row]) -> list[float]:
    """Pearson's of r_eff at the first stage's end and -BPB over the sweep, seed by seed; 0 if one is flat."""
    results = []
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        ranks, scores = ([values(own, arm.name, key)[0] for arm in ARMS] for key in ("root_rank", "bpb"))
        flat = len(set(ranks)) == 1 or len(set(scores)) == 1
        results.append(0.0 if flat else float(-np.corrcoef(ranks, scores)[0, 1]))
    return results


def probe(stack: GPT, plan: Plan, text: Text) -> Mapping[str, Any]:
    """The effective rank before and behind the relay of the second stage."""
    edge = next(rank for rank in edge_ranks(stack, plan, text.inputs) if rank.stage == 1)
    return {"root_rank": edge.before, "relayed_rank": edge.after, "kept": edge.after / edge.before}


def _points(rows: Sequence[Row], arm: Arm) -> Series:
    where = statistics.fmean(values(rows, arm.name, "root_rank"))
    return Series.of(arm.name, [where], [values(rows, arm.name)])


def _cells(rows: Sequence[Row], arm: Arm) -> tuple[str, ...]:
    against = f"{mean(rows, arm.name) - mean(rows, SHALLOW):+.4f}" if arm in RELAYED else "–"
    ranks = (f"{mean(rows, arm.name, key):.2f}" for key in ("root_rank", "relayed_rank", "kept"))
    return (arm.name, f"{mean(rows, arm.name):.4f}", spread(rows, arm.name), against, *ranks)
