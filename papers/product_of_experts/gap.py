"""What cutting the gradient costs, and what closes the gap: at equal steps, equal time, equal memory.

Statement. b(a) is the BPB of an arm after N steps (held-out text), b₀(x) that of backprop after x N steps,
read off its own trainings of several lengths, each with its whole schedule, linearly in log x between them.
An arm's step takes ρ times backprop's time and μ times its memory. Gaps in percent:

    equal steps             100 (b(a) / b₀(1) - 1)
    equal time              100 (b(a) / b₀(ρ) - 1)
    equal time and memory   100 (b(a) / b₀(ρ / ρ_v) - 1)

where v is the fastest way to run backprop within μ: as it is, its layers recomputed (activation
checkpointing), or its batch in 2 or 4 parts. Positive is worse than backprop. The arms are in `gap_arms.py`;
they share the seed's first weights and the order of the data; those that are not of the core have the first
seed alone. Each gap has a 90 % interval over seeds
(`verdicts.py`). The goal is that of one arm: below 1 % at equal steps, and no gap (the interval includes 0 or
lies below) at equal time or in equal memory. Where backprop is not clearly better than plain stages, the size
decides nothing, and the verdict says so.

Models: plain GPTs on bytes with the presets tiny, small and long, as in `staged_runs.py`; the demo's model
and data with the preset demo. The presets long and demo have the arms that decide, and no others. Source: the
question and the arms are ours; "Product of Experts" §3.1 has 6 % at 1.3 billion parameters, and leaves open
what would close it. Cost: `presets.py`. Limits. The best arm is chosen among many by the same seeds that
judge it, so its gap is a little too small. Learning rates are those that suit backprop. ρ is of one machine
and small models, whose heads are a large part of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from papers.fit import trajectory
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.composition import fit_weights, half_logits
from papers.product_of_experts.gap_arms import (
    ARMS,
    BACKPROP,
    DECIDING,
    DEMO,
    LAYERS,
    LONGER,
    SAVING,
    STAGED,
    TINY,
    Arm,
)
from papers.product_of_experts.gap_costs import costs
from papers.product_of_experts.gap_training import Given, Training
from papers.staged_runs import bytes_config, order0, values
from papers.verdicts import (
    FAILED,
    HELD,
    UNDECIDED,
    Claim,
    Drawing,
    Interval,
    Series,
    above,
    settled,
)
from topograd.data import Text
from topograd.runs.config import TrainConfig, preset
from topograd.training.evaluation import evaluate

POOLED = "staged, fitted pool"
GOAL = 1.0
"""Percent at equal steps."""
KINDS = {"steps": "equal steps", "time": "equal time", "memory": "equal time and memory"}
Curve = Mapping[float, float]
"""BPB of backprop by its length."""


def run(args: Asked) -> Result:
    """Train every arm with every seed, measure what steps cost, and judge."""
    check_seeds(args.seeds)
    arms = {"tiny": TINY, "small": ARMS, "long": DECIDING, "demo": DEMO}[args.preset]
    todo = [(arm, seed) for seed in range(args.seeds) for arm in arms if arm.core or not seed]
    todo.sort(key=lambda one: not one[0].core)  # what decides comes first
    measured = args.kept.row({"costs": [arm.name for arm in arms]}, partial(_costs, args, arms))
    args.on_more(1, 1 + len(todo))
    rows: list[Row] = []
    given = [Given(config_of(args, seed)) for seed in range(args.seeds)]
    for i, (arm, seed) in enumerate(todo):
        result = args.kept.rows({"arm": arm.name, "seed": seed}, partial(_train, arm, given[seed]))
        rows += [{**row, **_cost(measured, row["arm"])} for row in result]
        args.on_more(2 + i, 1 + len(todo))
    add_gaps(rows, {arm.name: measured[arm.name] for arm in SAVING})
    claims = tuple(settled(_claims(rows), rows))
    return Result(
        setting=_setting(args),
        rows=rows,
        tables=(_table(rows), _saving_table(measured)),
        findings=tuple(_findings(rows)),
        drawing=_drawing(rows),
        claims=claims,
        seeds=args.seeds,
        record={"costs": measured},
    )


def config_of(args: Asked, seed: int) -> TrainConfig:
    """The settings of a training but for its topology."""
    if args.preset == "demo":
        config = preset("small", seed=seed, steps=args.steps, eval_every=0)
        return replace(config, model=config.model.changed(width=args.width))
    return bytes_config(args, seed, batch=8, tiny_batch=4, eval_bytes=60_000)


def _train(arm: Arm, given: Given) -> list[Row]:
    """One arm with one seed; plain stages are read a second time, pooled."""
    config, text, _ = given.loaded
    steps = max(1, round(config.steps * arm.length))
    training = Training(arm, config)
    losses = training.run(given.batches(config.batch * arm.batch), steps)
    result = evaluate(training.stack, training.plan, text)
    row = {
        "arm": arm.name,
        "seed": config.seed,
        "bpb": result.bpb.prediction,
        "bpb_prefix": result.bpb.prefix,
        "length": arm.length,
        "steps": steps,
        "tokens": steps * config.batch * arm.batch * config.model.context,
        "order0": order0(text),
        "trajectory": trajectory(losses),
    }
    if arm.name != STAGED:
        return [row]
    return [row, {**row, "arm": POOLED, "bpb": pooled_bpb(training, text)}]


@torch.no_grad()
def pooled_bpb(training: Training, text: Text) -> float:
    """BPB of the stages' Log-OP, weights fitted to one half of the windows and read on the other, twice."""
    halves = [half_logits(training.stack, training.plan, text, part) for part in (0, 1)]
    nats = 0.0
    for (logits, targets), (test, wanted) in (halves, halves[::-1]):
        weights = fit_weights(logits, targets)
        nats += float(F.cross_entropy(torch.einsum("k,knv->nv", weights, test), wanted, reduction="sum"))
    return nats / (math.log(2) * text.nbytes)


def _costs(args: Asked, arms: Sequence[Arm]) -> Row:
    given = Given(config_of(args, 0))
    config, _, _ = given.loaded
    measured = [arm for arm in arms if arm.length == 1]
    result: Row = costs([*measured, *SAVING], config, next(given.batches(config.batch)))
    return result


def _cost(measured: Mapping[str, Row], arm: str) -> Row:
    """What an arm's steps cost; backprop of another length is backprop, and the pool is of plain stages."""
    name = STAGED if arm in (POOLED, LONGER) else BACKPROP if arm.startswith(BACKPROP) else arm
    return {**measured[name], "step_time_ratio": measured[name]["step_time"]["median"]}


def add_gaps(rows: Sequence[Row], saving: Mapping[str, Row]) -> None:
    """Write the three gaps of each arm of backprop's length into its row."""
    for seed in sorted({row["seed"] for row in rows}):
        mine = [row for row in rows if row["seed"] == seed]
        curve = {row["length"]: row["bpb"] for row in mine if row["arm"].startswith(BACKPROP)}
        for row in mine:
            if row["arm"].startswith(BACKPROP):
                continue
            if row["length"] != 1:
                row["gap_length"] = 100 * (row["bpb"] / at_length(curve, row["length"]) - 1)
                continue
            time = row["step_time_ratio"]
            room = time / fastest(row["memory_ratio"], saving)
            for kind, length in (("steps", 1.0), ("time", time), ("memory", room)):
                row[f"gap_{kind}"] = 100 * (row["bpb"] / at_length(curve, length) - 1)


def fastest(memory: float, saving: Mapping[str, Row]) -> float:
    """The time, over backprop's, of the fastest way to run it in `memory`; of the leanest where none fits."""
    ways = {name: (cost["memory_ratio"], cost["step_time"]["median"]) for name, cost in saving.items()}
    ways[BACKPROP] = (1.0, 1.0)
    fitting = [time for size, time in ways.values() if size <= memory]
    return min(fitting) if fitting else min(ways.values())[1]


def at_length(curve: Curve, length: float) -> float:
    """Backprop's BPB after a training of `length`: linear in its logarithm, the outer slopes going on.

    >>> [round(at_length({1.0: 2.0, 2.0: 1.8, 4.0: 1.7}, length), 6) for length in (2**0.5, 4, 8)]
    [1.9, 1.7, 1.6]
    """
    lengths = sorted(curve)
    if len(lengths) == 1:
        return curve[lengths[0]]
    behind = next((i for i, known in enumerate(lengths) if known >= length), len(lengths) - 1)
    low, high = lengths[max(behind, 1) - 1], lengths[max(behind, 1)]
    share = math.log(length / low) / math.log(high / low)
    return curve[low] + share * (curve[high] - curve[low])


def _names(rows: Sequence[Row]) -> list[str]:
    """The arms that have gaps, in order."""
    return list(dict.fromkeys(row["arm"] for row in rows if "gap_steps" in row))


def _best(rows: Sequence[Row], kind: str, names: Sequence[str] | None = None) -> str:
    """The arm with the smallest gap, of those with all seeds."""
    names = _names(rows) if names is None else names
    many = max(len(values(rows, arm)) for arm in names)
    whole = [arm for arm in names if len(values(rows, arm)) == many]
    return min(whole, key=lambda arm: statistics.fmean(values(rows, arm, f"gap_{kind}")))


def _claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """Whether the size decides; then the goals, each by the arm that comes nearest."""
    wins = above(
        "backprop wins",
        "at this size backprop is clearly better than stages that hear nothing of one another",
        "the gap of plain stages at equal steps, percent,",
        values(rows, STAGED, "gap_steps"),
    )
    decides = wins.verdict == HELD
    best = _best(rows, "steps")
    below = above(
        f"below {GOAL:g} % at equal steps",
        f"some way to train in stages comes within {GOAL:g} %; nearest: {best}",
        f"{GOAL:g} minus its gap, percent,",
        [GOAL - gap for gap in values(rows, best, "gap_steps")],
    )
    return wins, _if(decides, below), *(_if(decides, _no_gap(rows, kind)) for kind in ("time", "memory"))


def _no_gap(rows: Sequence[Row], kind: str) -> Claim:
    best = _best(rows, kind)
    gaps = values(rows, best, f"gap_{kind}")
    result = Interval.of(gaps)
    verdict = UNDECIDED if len(gaps) < 2 else FAILED if result.low > 0 else HELD
    return Claim(
        f"no gap at {KINDS[kind]}",
        f"some way to train in stages is as good as backprop; nearest: {best}",
        "held if the 90 % interval of its gap includes 0 or lies below, failed if above",
        str(result),
        verdict,
        tuple(gaps),
    )


def _if(decides: bool, claim: Claim) -> Claim:
    return claim if decides else replace(claim, verdict=UNDECIDED)


def _setting(args: Asked) -> str:
    config = config_of(args, 0)
    model = config.model
    what = "the demo's model and data" if args.preset == "demo" else "plain GPTs on bytes"
    return (
        f"Six layers of width {model.width} ({what}), {config.steps} steps of {config.batch} × "
        f"{model.context} tokens, {args.seeds} seeds."
    )


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        first = mine[0]
        gaps = [
            _short(Interval.of([row[f"gap_{kind}"] for row in mine])) if "gap_steps" in first else "–"
            for kind in KINDS
        ]
        numbers = (statistics.fmean(row["bpb"] for row in mine), first["step_time_ratio"] * first["length"])
        cells.append(
            (
                arm,
                f"{numbers[0]:.4f}",
                *gaps,
                f"{numbers[1]:.2f}",
                f"{first['memory_ratio']:.2f}",
                str(first["gradient_depth"]),
                f"{first['traffic']:.1f}",
            )
        )
    header = ("arm", "BPB", *KINDS.values(), "time", "memory", "gradient depth", "traffic")
    caption = "Gaps to backprop in percent with 90 % intervals over seeds; time and memory over backprop's"
    return ResultTable(caption, header, tuple(cells))


def _short(result: Interval) -> str:
    if math.isinf(result.low):
        return f"{result.mean:+.2f}"
    return f"{result.mean:+.2f} [{result.low:+.2f}, {result.high:+.2f}]"


def _saving_table(measured: Mapping[str, Row]) -> ResultTable:
    cells = tuple(
        (
            arm.name,
            f"{measured[arm.name]['step_time']['median']:.2f}",
            f"{measured[arm.name]['memory_ratio']:.2f}",
        )
        for arm in SAVING
    )
    return ResultTable("Backprop in less memory, which learns the same", ("way", "time", "memory"), cells)


def _findings(rows: Sequence[Row]) -> list[str]:
    results = []
    cut = [row["arm"] for row in rows if "gap_steps" in row and row["gradient_depth"] < LAYERS]
    for kind, words in KINDS.items():
        best, local = _best(rows, kind), _best(rows, kind, list(dict.fromkeys(cut)))
        gap, cut_gap, plain = (
            _short(Interval.of(values(rows, arm, f"gap_{kind}"))) for arm in (best, local, STAGED)
        )
        results.append(
            f"At {words}: nearest to backprop is {best}, {gap} %; of those that cut the gradient {local}, "
            f"{cut_gap} %; plain stages {plain} %."
        )
    if values(rows, LONGER):
        longer = _short(Interval.of(values(rows, LONGER, "gap_length")))
        tokens = {
            name: next(row["tokens"] for row in rows if row["arm"] == name) for name in (STAGED, LONGER)
        }
        results.append(
            f"Plain stages beside backprop after {tokens[STAGED]:,} and {tokens[LONGER]:,} tokens: "
            f"{_short(Interval.of(values(rows, STAGED, 'gap_steps')))} and {longer} %."
        )
    depths = [row["gradient_depth"] for row in rows if "gap_steps" in row]
    gaps = [row["gap_steps"] for row in rows if "gap_steps" in row]
    if len(set(depths)) > 1:
        slope = float(np.polyfit(depths, gaps, 1)[0])
        results.append(
            f"The gap at equal steps changes by {slope:+.2f} points for each layer of gradient depth."
        )
    return results


def _drawing(rows: Sequence[Row]) -> Drawing:
    """The gap against gradient depth, memory and traffic, each over backprop's."""
    names = _names(rows)
    by_arm = {name: next(row for row in rows if row["arm"] == name) for name in names}
    whole = {"gradient_depth": 6.0, "memory_ratio": 1.0, "traffic": 4.0}
    words = {"gradient_depth": "gradient depth", "memory_ratio": "memory", "traffic": "traffic"}
    series = []
    for key, full in whole.items():
        places, ordered = zip(*sorted((by_arm[name][key] / full, name) for name in names), strict=True)
        series.append(Series.of(words[key], places, [values(rows, name, "gap_steps") for name in ordered]))
    return Drawing(
        "The gap at equal steps, against what an arm needs", "over backprop's", "gap, percent", tuple(series)
    )
