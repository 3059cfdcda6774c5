"""Three ways to find where boundaries belong, with the same budget: do they choose better than chance?

Each way may train for N steps, and names a partition of six layers in three stages. All ten partitions are
then trained for N steps from the seed's first weights, so the choice is judged by what it gives, and not by
what the search thought of it.

    dp        N/2 steps of backprop, then probes of every interval of layers, N/2 steps in all; the least sum
              of stage costs by dynamic programming (`search/stage_costs.py`, `search/dynamic.py`)
    soft      N steps with learned boundaries, whose number is held at two (`search/soft.py`)
    surgery   N steps from 2,2,2, a boundary moved every N/10 steps if it lowers BPB (`search/surgery.py`)

    gain      mean BPB of the ten partitions - BPB of the chosen one: 0 is chance
    regret    BPB of the chosen one - that of the best of the ten

Gain and regret are of one seed; intervals are over seeds (`verdicts.py`). Source: "Stage-Partitioned
Learning: A Configuration Space Between Backpropagation and Local Learning" §10.2; the comparison is ours.
Cost: `presets.py`. Limits. BPB alone is asked for, which speaks for a deep first stage (Lemma 8.1), so a rule
of thumb, 4,1,1, stands beside them. Steps are counted and not time: a probe's step is cheaper than a whole
one, a soft one has six heads. The differences between partitions are small at this size.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from papers.outcome import Asked, Row
from papers.staged_runs import (
    LAYERS,
    SHALLOW,
    Sizes,
    chain,
    held_out,
    same_batches,
    train_arm,
    train_arms,
    values,
)
from papers.verdicts import Claim, Drawing, Found, Interval, Series, above
from topograd.runs.search_config import SoftConfig, SurgeryConfig
from topograd.runs.session import load_data
from topograd.search.dynamic import best_partition
from topograd.search.soft import soft_outcome, soft_run
from topograd.search.stage_costs import probe_costs
from topograd.search.surgery import surgery_outcome, surgery_run
from topograd.topology.composition import Composition, enumerate_compositions
from topograd.training.runs import start

STAGES = 3
OPERATIONS = 10
RULE = "4,1,1"
PARTITIONS = tuple(str(pi) for pi in enumerate_compositions(LAYERS, STAGES))


def run(sizes: Sizes, args: Asked) -> Found:
    """Search in every way with every seed, train all partitions, and judge the choices."""
    rows = train_arms([chain(partition) for partition in PARTITIONS], sizes, args)
    choices: dict[str, list[str]] = {way: [] for way in WAYS}
    for seed in range(sizes.seeds):
        for way, search in WAYS.items():
            result = args.kept.row({"search": way, "seed": seed}, partial(_searched, search, sizes, seed))
            choices[way].append(result["partition"])
    choices["always " + RULE] = [RULE] * sizes.seeds
    return Found(
        rows,
        "What a search chose, over seeds; BPB, less is better",
        ("way", "chosen", "BPB", "gain over chance", "regret"),
        tuple(_cells(rows, way, chosen) for way, chosen in choices.items()),
        _drawing(rows),
        claims(rows, choices),
    )


def _searched(search: Callable[[Sizes, int], str], sizes: Sizes, seed: int) -> Row:
    return {"partition": search(sizes, seed)}


def by_costs(sizes: Sizes, seed: int) -> str:
    """The partition of least stage costs, probed on a model that backprop trained for half of the steps."""
    half = max(1, sizes.steps // 2)
    config, data = load_data(sizes.config(seed, half))
    stack, _, _ = train_arm(chain(str(LAYERS)), config, same_batches(config, data))
    probes = LAYERS * (LAYERS + 1) // 2
    batches = same_batches(replace(config, steps=max(1, half // probes), seed=seed + 1000), data)
    costs = probe_costs(copy.deepcopy(stack), batches, held_out(config, data))
    return str(best_partition(costs, LAYERS, stages=STAGES).composition)


def by_soft_boundaries(sizes: Sizes, seed: int) -> str:
    """The partition that learned boundaries harden to."""
    config = soft_run(sizes.config(seed), SoftConfig(stages=STAGES, length=0.0))
    with TemporaryDirectory() as folder:
        trainer = start(replace(config, save_every=0), Path(folder) / "run")
        trainer.train()
        parts = soft_outcome(trainer.task.config, trainer.task.extra_state())["partition"]
    return str(Composition.of(parts))


def by_surgery(sizes: Sizes, seed: int) -> str:
    """The partition that a run ends with whose boundaries are moved by what they do to BPB."""
    moves = SurgeryConfig(
        every=max(1, sizes.steps // OPERATIONS), deployment="datacenter", min_depth=1, stages=STAGES
    )
    config = sizes.config(seed).changed(partition=SHALLOW, heads="per-stage")
    with TemporaryDirectory() as folder:
        trainer = start(replace(surgery_run(config, moves), save_every=0), Path(folder) / "run")
        trainer.train()
        parts = surgery_outcome(trainer.task.config, trainer.task.extra_state())["partition"]
    return str(Composition.of(parts))


WAYS: Mapping[str, Callable[[Sizes, int], str]] = {
    "dp": by_costs,
    "soft": by_soft_boundaries,
    "surgery": by_surgery,
}


def gains(rows: Sequence[Row], chosen: Sequence[str]) -> list[float]:
    """By seed: the mean BPB of all partitions minus that of the chosen one."""
    every = [values(rows, partition) for partition in PARTITIONS]
    chance = [statistics.fmean(seed) for seed in zip(*every, strict=True)]
    return [mean - values(rows, pi)[seed] for seed, (mean, pi) in enumerate(zip(chance, chosen, strict=True))]


def regrets(rows: Sequence[Row], chosen: Sequence[str]) -> list[float]:
    """By seed: the BPB of the chosen partition minus that of the best."""
    best = [min(seed) for seed in zip(*(values(rows, pi) for pi in PARTITIONS), strict=True)]
    return [values(rows, pi)[seed] - least for seed, (pi, least) in enumerate(zip(chosen, best, strict=True))]


def claims(rows: Sequence[Row], choices: Mapping[str, Sequence[str]]) -> tuple[Claim, ...]:
    """Each way against chance."""
    return tuple(
        above(
            f"{way}: better than chance",
            f"{way} names a better partition than one that is drawn",
            "the mean BPB of all partitions minus that of the chosen one",
            gains(rows, chosen),
        )
        for way, chosen in choices.items()
    )


def _cells(rows: Sequence[Row], way: str, chosen: Sequence[str]) -> tuple[str, ...]:
    bpb = statistics.fmean(values(rows, pi)[seed] for seed, pi in enumerate(chosen))
    gain, regret = Interval.of(gains(rows, chosen)), statistics.fmean(regrets(rows, chosen))
    return (way, "  ".join(chosen), f"{bpb:.4f}", str(gain), f"{regret:.4f}")


def _drawing(rows: Sequence[Row]) -> Drawing:
    """BPB of all partitions by the depth of their first stage."""
    by_depth: dict[int, list[str]] = {}
    for partition in PARTITIONS:
        by_depth.setdefault(Composition.parse(partition).parts[0], []).append(partition)
    points = {
        depth: [value for pi in several for value in values(rows, pi)]
        for depth, several in sorted(by_depth.items())
    }
    series = Series.of("all partitions", list(points), list(points.values()))
    return Drawing("Ten partitions in three stages", "layers of the first stage", "BPB", (series,))
