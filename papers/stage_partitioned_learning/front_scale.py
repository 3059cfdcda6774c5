"""Does the front of BPB and memory keep its shape with scale, and does the gap shrink or grow?

Statement. A scale is a number of layers L and a width; its models have n parameters and are trained on
`RATIOS` tokens for each of them, so that steps grow as n does. At each scale: backprop, K = 2 and K = 4 equal
stages, and stages of one layer, all through a shared head and with the usual rates. By scale and seed

    g(K, n)  = 100 (b(K, n) / b(backprop, n) - 1)          the gap, percent
    slope_K  = least squares of g(K, ·) over log10 n         points for ten times the parameters

K = 2 and 4 have gradient depths L / 2 and L / 4 and as many layers before their first exit: these shares do
not change with scale, and the measured peak of a step (over backprop's) is read beside them. So the front of
(BPB, activation layers) keeps its shape if it has the same of backprop, K = 2 and K = 4 at every scale; it
has all three where coarser stages have the smaller BPB.

Models: plain GPTs on bytes as in `staged_runs.py`; the arms of a seed and scale share first weights and data.
Cost: `presets.py`. Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and
Local Learning" §10.6 (level 5; L = 12 to 96, 300M to 70B parameters, stated and not run), Corollary 8.12, P2,
P4. It leaves open which way the gap goes: that claim "held" if the gap shrinks and "failed" if it grows.
Limits. Parameters span a factor of 3.3 and L is 4 and 8; from the second scale to the third L grows alone.
Two fifths of the smallest models are embeddings and head. Rates are the same at every scale, and r is
that of the paper's shortest budget. With L = 4 stages of one layer are K = 4.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from papers.fit import trajectory
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.gap_arms import Arm
from papers.product_of_experts.gap_training import Given, Training
from papers.product_of_experts.token_ratio import parameters, steps_of
from papers.staged_runs import Sizes, minus, order0
from papers.verdicts import Claim, Drawing, Interval, Series, above, each, every, settled
from topograd.runs.config import TrainConfig
from topograd.search.front import pareto_front
from topograd.search.measured import Trained
from topograd.search.properties import read_properties
from topograd.topology.dag import Topology


@dataclass(frozen=True)
class Scale:
    """How large the models are."""

    layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.layers} × {self.width}"

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of stages, from backprop on."""
        return tuple(dict.fromkeys((1, *FIXED, self.layers)))

    def config(self, preset: str, seed: int) -> TrainConfig:
        """The settings of a training but for its topology and length."""
        tiny = preset == "tiny"
        config = Sizes(
            width=self.width,
            context=16 if tiny else 64,
            batch=2 if tiny else 8,
            steps=1,
            soft_steps=0,
            eval_bytes=600 if tiny else 60_000,
            seeds=1,
        ).config(seed)
        return replace(config, model=config.model.changed(layers=self.layers))


FIXED = (2, 4)
"""Numbers of stages that every scale has."""
SCALES: Mapping[str, tuple[Scale, ...]] = {
    "tiny": (Scale(4, 8), Scale(8, 8)),
    "small": (Scale(4, 16), Scale(4, 24), Scale(8, 24)),
}
RATIOS: Mapping[str, float] = {"tiny": 0.02, "small": 10.0}
"""Tokens for each parameter."""
ALONE = "stages of one layer"


def topology(scale: Scale, stages: int) -> Topology:
    """Equal stages with a shared head."""
    return Topology.chain(",".join([str(scale.layers // stages)] * stages))


def run(args: Asked) -> Result:
    """Train every arm at every scale with every seed, and judge."""
    check_seeds(args.seeds)
    scales, ratio = SCALES[args.preset], RATIOS[args.preset]
    total = args.seeds * sum(len(scale.counts) for scale in scales)
    rows: list[Row] = []
    for seed in range(args.seeds):
        for scale in scales:
            given = Given(scale.config(args.preset, seed))
            for stages in scale.counts:
                key = {"scale": str(scale), "stages": stages, "seed": seed, "ratio": ratio}
                rows.append(args.kept.row(key, partial(_train, scale, stages, given, ratio)))
                args.on_more(len(rows), total)
    add_gaps(rows)
    return Result(
        setting=_setting(args, scales, ratio),
        rows=rows,
        tables=(_table(rows, scales),),
        findings=tuple(_findings(rows, scales)),
        drawing=_drawing(rows, scales),
        claims=tuple(learned(claims(rows, scales), rows, scales)),
        seeds=args.seeds,
        record={"ratio": ratio},
    )


def _train(scale: Scale, stages: int, given: Given, ratio: float) -> Row:
    config, text, _ = given.loaded
    steps = steps_of(config, ratio)
    training = Training(Arm(f"K = {stages}", topology(scale, stages)), config)
    losses = training.run(given.batches(config.batch), steps)
    names = ("bpb", "gradient_depth", "activation_layers", "peak_bytes", "exit_layers")
    result = read_properties(Trained(training.stack, training.plan, text), names)
    return {
        "arm": f"{scale}, K = {stages}",
        "scale": str(scale),
        "stages": stages,
        "seed": config.seed,
        "parameters": parameters(config),
        "steps": steps,
        "bpb": result["bpb"],
        "gradient_share": result["gradient_depth"] / scale.layers,
        "activation_share": result["activation_layers"] / scale.layers,
        "peak_bytes": result["peak_bytes"],
        "exit_share": result["exit_layers"][0] / scale.layers,
        "order0": order0(text),
        "trajectory": trajectory(losses),
    }


def add_gaps(rows: Sequence[Row]) -> None:
    """Write into each row its gap to backprop of the same scale and seed, and its peak over backprop's."""
    whole = {(row["scale"], row["seed"]): row for row in rows if row["stages"] == 1}
    for row in rows:
        base = whole[row["scale"], row["seed"]]
        row["gap"] = 100 * (row["bpb"] / base["bpb"] - 1)
        row["peak_share"] = row["peak_bytes"] / base["peak_bytes"]


def by_seed(rows: Sequence[Row], scale: Scale, stages: int, key: str = "gap") -> list[float]:
    """A reading of an arm at a scale."""
    return [row[key] for row in rows if row["scale"] == str(scale) and row["stages"] == stages]


def scale_slopes(rows: Sequence[Row], scales: Sequence[Scale], stages: int) -> list[float]:
    """By how many points the gap of K stages changes for ten times the parameters, seed by seed."""
    across = [_log_parameters(rows, scale) for scale in scales]
    curves = zip(*(by_seed(rows, scale, stages) for scale in scales), strict=True)
    return [float(np.polyfit(across, curve, 1)[0]) for curve in curves]


def on_front(rows: Sequence[Row], scale: Scale) -> list[set[int]]:
    """Which of backprop and the fixed numbers of stages are on the front of BPB and memory, seed by seed."""
    results = []
    for seed in sorted({row["seed"] for row in rows}):
        here = [
            r for r in rows if r["seed"] == seed and r["scale"] == str(scale) and r["stages"] in (1, *FIXED)
        ]
        retained = pareto_front([(row["bpb"], row["activation_share"]) for row in here])
        results.append({row["stages"] for row, on in zip(here, retained, strict=True) if on})
    return results


def claims(rows: Sequence[Row], scales: Sequence[Scale]) -> list[Claim]:
    """Which way the gap goes with scale, and whether the order of the arms stays."""
    told = ", ".join(map(str, scales))
    fronts = [on_front(rows, scale) for scale in scales]
    return [
        *(
            above(
                f"the gap shrinks, K = {stages}",
                f"the gap of {stages} stages falls with scale (left open, §10.6 level 5; failed: it grows)",
                "the fall of the gap for ten times the parameters, points,",
                [-slope for slope in scale_slopes(rows, scales, stages)],
            )
            for stages in FIXED
        ),
        each(
            "backprop is best at every scale",
            "no interior configuration is BPB-optimal (Corollary 8.12)",
            f"the gap of {FIXED[0]} stages at {told}, percent,",
            [by_seed(rows, scale, FIXED[0]) for scale in scales],
        ),
        each(
            "coarser stages cost less at every scale",
            "BPB is BP-descending (Corollary 8.12): the next finer equal stages have the larger gap",
            f"the gap of each finer arm minus that of the next coarser at {told}, points,",
            [
                minus(by_seed(rows, scale, fine), by_seed(rows, scale, coarse))
                for scale in scales
                for coarse, fine in zip(scale.counts[1:], scale.counts[2:], strict=False)
            ],
        ),
        every(
            "the front keeps its shape",
            "the same of backprop, K = 2 and K = 4 are on it at every scale (left open, §10.6 level 5)",
            "the front of BPB and activation layers has the same arms at every scale",
            [all(on == seed[0] for on in seed) for seed in zip(*fronts, strict=True)],
        ),
    ]


def learned(result: Sequence[Claim], rows: Sequence[Row], scales: Sequence[Scale]) -> list[Claim]:
    """The claims, all undecided where at some scale models know less than how often each byte occurs."""
    judged = list(result)
    for scale in scales:
        judged = settled(judged, [row for row in rows if row["scale"] == str(scale)])
    return judged


def _log_parameters(rows: Sequence[Row], scale: Scale) -> float:
    return math.log10(by_seed(rows, scale, 1, "parameters")[0])


def _setting(args: Asked, scales: Sequence[Scale], ratio: float) -> str:
    config = scales[0].config(args.preset, 0)
    return (
        f"Plain GPTs on bytes of {', '.join(map(str, scales))} (layers × width), {config.batch} × "
        f"{config.model.context} tokens a step, {ratio:g} tokens a parameter; {args.seeds} seeds."
    )


def _table(rows: Sequence[Row], scales: Sequence[Scale]) -> ResultTable:
    shares = ("gradient_share", "activation_share", "peak_share", "exit_share")
    cells = []
    for scale in scales:
        for stages in scale.counts:
            arm = partial(by_seed, rows, scale, stages)
            gap = "" if stages == 1 else str(Interval.of(arm()))
            counted = f"{arm('parameters')[0]:,}", f"{arm('steps')[0]:,}"
            result = (f"{statistics.fmean(arm(key)):.3f}" for key in shares)
            cells.append(
                (f"{scale}, K = {stages}", *counted, f"{statistics.fmean(arm('bpb')):.4f}", gap, *result)
            )
    header = (
        "arm",
        "parameters",
        "steps",
        "BPB",
        "gap, percent",
        "gradient depth / L",
        "activation layers / L",
    )
    return ResultTable(
        "By scale, layers × width; gaps with 90 % intervals over seeds",
        (*header, "peak over backprop's", "first exit / L"),
        tuple(cells),
    )


def _findings(rows: Sequence[Row], scales: Sequence[Scale]) -> list[str]:
    sentences = []
    for stages in FIXED:
        gaps = ", ".join(f"{statistics.fmean(by_seed(rows, s, stages)):+.2f} % at {s}" for s in scales)
        sentences.append(f"The gap of K = {stages}: {gaps}.")
    gaps = ", ".join(f"{statistics.fmean(by_seed(rows, s, s.layers)):+.2f} % at {s}" for s in scales)
    return [*sentences, f"The gap of {ALONE}: {gaps}."]


def _drawing(rows: Sequence[Row], scales: Sequence[Scale]) -> Drawing:
    across = [_log_parameters(rows, scale) for scale in scales]
    series = [Series.of(f"K = {k}", across, [by_seed(rows, scale, k) for scale in scales]) for k in FIXED]
    alone = Series.of(ALONE, across, [by_seed(rows, scale, scale.layers) for scale in scales])
    return Drawing("The gap against scale", "log10 parameters", "gap, percent", (*series, alone))
