"""What a gradient that is cut, late or thin costs, with rates of their own.

Statement. b(a, s) is the BPB of an arm with seed s after N steps (held-out text). All arms of a seed share
the first weights and the order of the data. The gap and the price of an arm, in percent by seed:

    gap      100 (b(a) / b(backprop) - 1)
    price    100 (b(a) / b(whole) - 1)       whole has the same losses and an exact gradient at once

Arms, each with stages of two layers unless it says otherwise:

    backprop        one stage, one loss
    cut             no gradient crosses a border, a loss at every stage
    whole           all gradient crosses; early losses weigh 0.1 of the last one's
    thin b          the same, rounded to b bits at every border at random without bias (`exec/thin.py`)
    late            the same as whole, one step late at every border, weights kept (`exec/late.py`)
    thin 4, late    both
    ... no exits    one loss, at the end; late by layer: six stages of one layer, up to five steps late

Muon's rate is the best on a seed that judges nothing, from `RATES`, for the arms of `TUNED`; where the best
is at an end of those, the next rate beyond is tried too, until the best lies between two others. The other
arms take backprop's or, if they are late, that of late. All other rates are those of every run.

The claims below were set before the first run, after a first look with one to four seeds and rates that were
not tuned (late costs about 1 %, four bits 0.5 %, the cut 3 to 5).

Models: plain GPTs on bytes as in `product_of_experts/gap.py`, six layers, half of its batch. Cost:
`presets.py`; the preset long has the core of the arms, the others all. Limits. One width, one text, one
optimizer; a rate is tuned for Muon alone, and the late embedding keeps AdamW's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from papers.fit import trajectory
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.gap_arms import Arm, early
from papers.product_of_experts.gap_training import Given, Training
from papers.staged_runs import bytes_config, minus, order0
from papers.verdicts import Claim, Drawing, Interval, Series, above, settled, within
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.topology.dag import Topology
from topograd.training.evaluation import evaluate

BACKPROP, CUT, WHOLE, LATE, BOTH = "backprop", "cut", "whole", "late", "thin 4, late"
THIN = {bits: f"thin {bits}" for bits in (8, 4, 3)}
CORE = (BACKPROP, CUT, THIN[4], LATE, BOTH, WHOLE)
"""These come first, and with the preset long they are all."""
TUNED = (BACKPROP, CUT, THIN[4], LATE, BOTH)
"""The others take the rate of backprop or, if they are late, that of late."""
RATES = (0.01, 0.005, 0.02)
"""Of Muon, in the order in which they are tried."""
WIDEST = (0.001, 0.1)
TUNING = 100
"""The seed on which rates are chosen."""
EXITS = 0.1
"""The weight of early losses."""
GOAL = 1.0
"""Percent of backprop's BPB."""
NOTHING = 0.3
"""A price below this, in percent, is none."""


def topologies() -> dict[str, Topology]:
    """Every arm, those of the core first."""
    chain = Topology.chain("2,2,2")
    whole = early(chain.with_grad_scale(1.0), weight=EXITS)
    alone = early(chain.with_grad_scale(1.0), weight=0.0)
    layers = early(Topology.chain("1,1,1,1,1,1", grad_scale=1.0), weight=EXITS)
    return {
        BACKPROP: Topology.chain("6"),
        CUT: chain,
        THIN[4]: whole.with_gradient(bits=4),
        LATE: whole.with_gradient(delay=1),
        BOTH: whole.with_gradient(delay=1, bits=4),
        WHOLE: whole,
        THIN[3]: whole.with_gradient(bits=3),
        THIN[8]: whole.with_gradient(bits=8),
        "late, no exits": alone.with_gradient(delay=1),
        "late by layer": layers.with_gradient(delay=1),
    }


def arms_of(preset: str) -> list[str]:
    """The arms of a preset."""
    return list(CORE if preset == "long" else topologies())


def run(args: Asked) -> Result:
    """Choose rates, train every arm with every seed, and judge."""
    check_seeds(args.seeds)
    arms = arms_of(args.preset)
    given = {seed: Given(config_of(args, seed)) for seed in (TUNING, *range(args.seeds))}
    rows: list[Row] = []
    tries: dict[str, dict[float, float]] = {}
    tuning = len(TUNED) * len(RATES)
    total = tuning + len(arms) * args.seeds
    for i, (rate, arm) in enumerate(itertools.product(RATES, TUNED)):
        tries.setdefault(arm, {})[rate] = _row(args, arm, given[TUNING], rate)["bpb"]
        args.on_more(i + 1, total)
    for arm in TUNED:
        tries[arm] = _tuned(args, arm, given[TUNING], tries[arm])
    rates = {arm: best(tries[tuned_as(arm)]) for arm in arms}
    todo = [(arm, seed) for seed in range(args.seeds) for arm in arms]
    for arm, seed in sorted(todo, key=lambda one: one[0] == WHOLE):  # which decides least
        rows.append(_row(args, arm, given[seed], rates[arm]))
        args.on_more(tuning + len(rows), total)
    add_gaps(rows)
    return Result(
        setting=_setting(args),
        rows=rows,
        tables=(_table(rows), _rate_table(tries)),
        findings=tuple(_findings(rows)),
        drawing=_drawing(rows),
        claims=tuple(settled(_claims(rows), rows)),
        seeds=args.seeds,
        record={"rates": rates},
    )


def tuned_as(arm: str) -> str:
    """The arm whose rate an arm takes.

    >>> tuned_as("cut"), tuned_as("thin 8"), tuned_as("late by layer")
    ('cut', 'backprop', 'late')
    """
    return arm if arm in TUNED else LATE if "late" in arm else BACKPROP


def config_of(args: Asked, seed: int) -> TrainConfig:
    """The settings of a training but for its topology and rate."""
    return bytes_config(args, seed, batch=4, tiny_batch=4, eval_bytes=60_000)


def best(tried: Mapping[float, float]) -> float:
    """The rate with the least BPB."""
    return min(tried, key=tried.__getitem__)


def next_rate(tried: Mapping[float, float]) -> float | None:
    """The rate to try after these: beyond the end at which the best lies, or none if it lies between.

    >>> next_rate({0.01: 2.0, 0.005: 1.9, 0.02: 2.1}), next_rate({0.01: 1.8, 0.005: 1.9, 0.02: 2.1})
    (0.0025, None)
    """
    chosen = best(tried)
    low, high = min(tried), max(tried)
    beyond = chosen / 2 if chosen == low else chosen * 2 if chosen == high else None
    return beyond if beyond is not None and WIDEST[0] < beyond < WIDEST[1] else None


def with_rate(config: OptimizerConfig, rate: float) -> OptimizerConfig:
    """With another rate of Muon."""
    return replace(config, lr_matrix=rate)


def _tuned(args: Asked, arm: str, given: Given, tried: dict[float, float]) -> dict[float, float]:
    """BPB by rate on the tuning seed, with further rates until the best lies between two others."""
    while (rate := next_rate(tried)) is not None:
        tried[rate] = _row(args, arm, given, rate)["bpb"]
    return dict(sorted(tried.items()))


def _row(args: Asked, arm: str, given: Given, rate: float) -> Row:
    key = {"arm": arm, "seed": given.config.seed, "rate": rate}
    return args.kept.row(key, partial(_train, arm, given, rate))


def _train(name: str, given: Given, rate: float) -> Row:
    config, text, _ = given.loaded
    began = time.process_time()
    training = Training(Arm(name, topologies()[name], settings=partial(with_rate, rate=rate)), config)
    training.loop.seed = config.seed
    losses = training.run(given.batches(config.batch), config.steps)
    result = evaluate(training.stack, training.plan, text)
    return {
        "arm": name,
        "seed": config.seed,
        "rate": rate,
        "bpb": result.bpb.prediction,
        "bpb_prefix": result.bpb.prefix,
        "order0": order0(text),
        "trajectory": trajectory(losses),
        "processor_seconds": time.process_time() - began,
    }


def add_gaps(rows: Sequence[Row]) -> None:
    """Write each arm's gap to backprop, and its price over the whole gradient, into its row."""
    bpb = {(row["arm"], row["seed"]): row["bpb"] for row in rows}
    for row in rows:
        row["gap"] = 100 * (row["bpb"] / bpb[BACKPROP, row["seed"]] - 1)
        row["price"] = 100 * (row["bpb"] / bpb[WHOLE, row["seed"]] - 1)


def of(rows: Sequence[Row], arm: str, key: str = "gap") -> list[float]:
    """A reading of an arm by seed."""
    return [row[key] for row in rows if row["arm"] == arm]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    costs = "its gap to backprop, percent,"
    return [
        above("the cut costs", "stages without gradient are worse than backprop", costs, of(rows, CUT)),
        above(
            f"four bits: below {GOAL:g} %",
            f"four bits across every border come within {GOAL:g} % of backprop",
            f"{GOAL:g} minus its gap, percent,",
            [GOAL - gap for gap in of(rows, THIN[4])],
        ),
        above(
            "four bits are not free",
            "rounding costs something beside the same losses with the whole gradient",
            "the price of thin 4, percent,",
            of(rows, THIN[4], "price"),
        ),
        above(
            "late beats the cut",
            "a gradient that is one step late at each of two borders is better than none",
            "the gap of the cut minus that of late, points,",
            minus(of(rows, CUT), of(rows, LATE)),
        ),
        above(
            f"late: below {GOAL:g} %",
            f"three stages with a late gradient come within {GOAL:g} % of backprop",
            f"{GOAL:g} minus its gap, percent,",
            [GOAL - gap for gap in of(rows, LATE)],
        ),
        above(
            "late and thin beats the cut",
            "so do both together",
            "the gap of the cut minus that of thin 4, late, points,",
            minus(of(rows, CUT), of(rows, BOTH)),
        ),
        *(_eight(prices) for prices in [of(rows, THIN[8], "price")] if prices),
    ]


def _eight(prices: Sequence[float]) -> Claim:
    return within(
        "eight bits are free",
        f"rounding to eight bits costs less than {NOTHING:g} %",
        "the price of thin 8, percent,",
        prices,
        NOTHING,
    )


def _setting(args: Asked) -> str:
    config = config_of(args, 0)
    return (
        f"Six layers of width {config.model.width} on bytes, {config.steps} steps of {config.batch} × "
        f"{config.model.context} tokens; Muon's rate chosen for each arm on another seed; {args.seeds} seeds."
    )


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        exits = [statistics.fmean(stage) for stage in zip(*(row["bpb_prefix"] for row in mine), strict=True)]
        cells.append(
            (
                arm,
                f"{mine[0]['rate']:g}",
                f"{statistics.fmean(of(rows, arm, 'bpb')):.4f}",
                str(Interval.of(of(rows, arm))),
                str(Interval.of(of(rows, arm, "price"))),
                ", ".join(f"{bpb:.3f}" for bpb in exits),
            )
        )
    header = ("arm", "rate", "BPB", "gap to backprop, %", "price over whole, %", "BPB of the exits")
    return ResultTable("Gaps with 90 % intervals over seeds", header, tuple(cells))


def _rate_table(tries: Mapping[str, Mapping[float, float]]) -> ResultTable:
    rates = sorted({rate for tried in tries.values() for rate in tried})
    cells = tuple(
        (arm, *(f"{tried[rate]:.4f}" if rate in tried else "–" for rate in rates))
        for arm, tried in tries.items()
    )
    header = ("arm", *(f"rate {rate:g}" for rate in rates))
    return ResultTable("BPB on the seed that chose the rates", header, cells)


def _findings(rows: Sequence[Row]) -> list[str]:
    return [
        f"{arm}: {Interval.of(of(rows, arm))} % from backprop, {len(of(rows, arm))} seeds."
        for arm in dict.fromkeys(row["arm"] for row in rows)
        if arm != BACKPROP
    ]


def losses_gap(rows: Sequence[Row], arm: str) -> list[list[float]]:
    """The gap of the last stage's training loss to backprop's along the training, percent, point by seed."""
    curves = []
    for row in (row for row in rows if row["arm"] == arm):
        (other,) = (r for r in rows if r["arm"] == BACKPROP and r["seed"] == row["seed"])
        pairs = zip(row["trajectory"], other["trajectory"], strict=True)
        curves.append([100 * (mine["losses"][-1] / whole["losses"][-1] - 1) for mine, whole in pairs])
    return [list(point) for point in zip(*curves, strict=True)]


def _drawing(rows: Sequence[Row]) -> Drawing:
    series = []
    for arm in (arm for arm in CORE if arm != BACKPROP):
        points = losses_gap(rows, arm)
        places = [(i + 1) / len(points) for i in range(len(points))]
        series.append(Series.of(arm, places, points))
    return Drawing(
        "The gap along the training", "share of the steps", "gap of the loss, percent", tuple(series)
    )
