"""What a gradient that is cut, late or thin costs, with rates of their own.

Statement. b(a, s) is the BPB of an arm with seed s after N steps (held-out text). All arms of a seed share
the first weights and the order of the data. The gap and the price of an arm, in percent by seed:

    gap      100 (b(a) / b(backprop) - 1)
    price    100 (b(a) / b(whole) - 1)       whole has the same losses and an exact gradient at once

Arms, each with stages of two layers (`edge_arms.py` has them and others):

    backprop        one stage, one loss
    cut             no gradient crosses a border, a loss at every stage
    whole           all gradient crosses; early losses weigh 0.1 of the last one's
    thin 4          the same, rounded to four bits at every border at random without bias (`exec/thin.py`)
    late            the same as whole, one step late at every border, weights kept (`exec/late.py`)
    thin 4, late    both

The rate of the layers' matrices (Muon's) is the best on a seed that judges nothing, from `RATES`, for the
arms that have one of their own; where the best is at an end of those, the next rate beyond is tried too,
until the best lies between two others. The other arms take that of another (`Way.rate_of`). All other rates
are those of every run.

The claims below were set before the first run, after a first look with one to four seeds and rates that were
not tuned (late costs about 1 %, four bits 0.5 %, the cut 3 to 5).

Models: plain GPTs on bytes as in `product_of_experts/gap.py`, six layers, half of its batch. Cost:
`presets.py`. Other questions about the same arms: `edge_questions.py`. Limits. One width, one text, one
optimizer; a rate is tuned for the matrices alone, and the late embedding keeps AdamW's.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from papers.beyond.edge_arms import BACKPROP, BOTH, CUT, LATE, THIN, WHOLE, Way, ways
from papers.fit import trajectory
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.gap_arms import Arm
from papers.product_of_experts.gap_training import Given, Training
from papers.staged_runs import bytes_config, minus, order0
from papers.verdicts import Claim, Drawing, Interval, Series, above, settled
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.training.evaluation import evaluate

RATES = (0.01, 0.005, 0.02)
"""Of Muon, in the order in which they are tried."""
WIDEST = (0.0001, 0.1)
TUNING = 100
"""The seed on which rates are chosen."""
GOAL = 1.0
"""Percent of backprop's BPB."""


@dataclass(frozen=True)
class Question:
    """Arms that are compared, and what is claimed of them."""

    arms: Mapping[str, Way]
    claims: Callable[[Sequence[Row]], list[Claim]]
    rates: Sequence[float] = RATES
    widest: tuple[float, float] = WIDEST
    """No rate outside of these is tried."""
    chosen: Mapping[str, float] = field(default_factory=dict)
    """Rates that another study chose on the same seed."""
    optimizer: str = "muon+adamw"

    @property
    def tuned(self) -> list[str]:
        """The arms whose rate is chosen here."""
        return [arm for arm, way in self.arms.items() if way.rate_of is None and arm not in self.chosen]

    def rates_of(self, tries: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
        """The rate of every arm, from the BPB that the rates of some have."""
        own = {**self.chosen, **{arm: best(tried) for arm, tried in tries.items()}}
        return {arm: own[way.rate_of or arm] for arm, way in self.arms.items()}


def run(args: Asked) -> Result:
    """The first question: three stages, Muon."""
    core = (BACKPROP, CUT, THIN[4], LATE, BOTH, WHOLE)
    return answer(args, Question({arm: ways()[arm] for arm in core}, core_claims))


def answer(args: Asked, question: Question) -> Result:
    """Choose rates, train every arm with every seed, and judge."""
    check_seeds(args.seeds)
    trained = partial(_row, args, question)
    given = {seed: Given(config_of(args, seed, question.optimizer)) for seed in (TUNING, *range(args.seeds))}
    tries: dict[str, dict[float, float]] = {}
    tuning = len(question.tuned) * len(question.rates)
    total = tuning + len(question.arms) * args.seeds
    for i, (rate, arm) in enumerate(itertools.product(question.rates, question.tuned)):
        tries.setdefault(arm, {})[rate] = trained(arm, given[TUNING], rate)["bpb"]
        args.on_more(i + 1, total)
    for arm, tried in tries.items():
        while (beyond := next_rate(tried, question.widest)) is not None:
            tried[beyond] = trained(arm, given[TUNING], beyond)["bpb"]
    rates = question.rates_of(tries)
    rows: list[Row] = []
    for seed, arm in itertools.product(range(args.seeds), question.arms):
        rows.append(trained(arm, given[seed], rates[arm]))
        args.on_more(tuning + len(rows), total)
    add_gaps(rows)
    tables = [_table(rows), *([_rate_table(tries)] if tries else [])]
    return Result(
        setting=_setting(args, question),
        rows=rows,
        tables=tuple(tables),
        findings=tuple(_findings(rows)),
        drawing=_drawing(rows),
        claims=tuple(settled(question.claims(rows), rows)),
        seeds=args.seeds,
        record={"rates": rates},
    )


def config_of(args: Asked, seed: int, optimizer: str = "muon+adamw") -> TrainConfig:
    """The settings of a training but for its topology and rate."""
    config = bytes_config(args, seed, batch=4, tiny_batch=4, eval_bytes=60_000)
    return replace(config, optimizer=replace(config.optimizer, name=optimizer))


def best(tried: Mapping[float, float]) -> float:
    """The rate with the least BPB."""
    return min(tried, key=tried.__getitem__)


def next_rate(tried: Mapping[float, float], widest: tuple[float, float] = WIDEST) -> float | None:
    """The rate to try after these: beyond the end at which the best lies, or none if it lies between.

    >>> next_rate({0.01: 2.0, 0.005: 1.9, 0.02: 2.1}), next_rate({0.01: 1.8, 0.005: 1.9, 0.02: 2.1})
    (0.0025, None)
    """
    chosen = best(tried)
    low, high = min(tried), max(tried)
    beyond = chosen / 2 if chosen == low else chosen * 2 if chosen == high else None
    return beyond if beyond is not None and widest[0] < beyond < widest[1] else None


def _row(args: Asked, question: Question, arm: str, given: Given, rate: float) -> Row:
    edges = hashlib.blake2b(repr(question.arms[arm].topology).encode(), digest_size=8).hexdigest()
    key = {
        "arm": arm,
        "edges": edges,
        "optimizer": question.optimizer,
        "seed": given.config.seed,
        "rate": rate,
    }
    return args.kept.row(key, partial(_train, arm, question.arms[arm], given, rate))


def training_of(name: str, way: Way, config: TrainConfig, rate: float) -> Training:
    """An arm before its first step."""

    def settings(usual: OptimizerConfig) -> OptimizerConfig:
        own = replace(usual, lr_matrix=rate)
        return own if way.settings is None else way.settings(own)

    training = Training(Arm(name, way.topology, settings=settings), config)
    training.loop.seed = config.seed
    if way.change is not None:
        way.change(training)
    return training


def _train(name: str, way: Way, given: Given, rate: float) -> Row:
    config, text, _ = given.loaded
    began = time.process_time()
    training = training_of(name, way, config, rate)
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
    """Write each arm's gap to backprop, and its price over the whole gradient if there is one, in its row."""
    bpb = {(row["arm"], row["seed"]): row["bpb"] for row in rows}
    for row in rows:
        for key, base in (("gap", BACKPROP), ("price", WHOLE)):
            if (base, row["seed"]) in bpb:
                row[key] = 100 * (row["bpb"] / bpb[base, row["seed"]] - 1)


def of(rows: Sequence[Row], arm: str, key: str = "gap") -> list[float]:
    """A reading of an arm by seed."""
    return [row[key] for row in rows if row["arm"] == arm]


def near(rows: Sequence[Row], arm: str, prediction: str, goal: float = GOAL) -> Claim:
    """The claim that an arm's gap is below so many percent."""
    effect = f"{goal:g} minus its gap, percent,"
    return above(f"{arm}: below {goal:g} %", prediction, effect, [goal - gap for gap in of(rows, arm)])


def better(rows: Sequence[Row], arm: str, base: str, prediction: str) -> Claim:
    """The claim that an arm's gap is smaller than another's."""
    effect = f"the gap of {base} minus that of {arm}, points,"
    return above(f"{arm} beats {base}", prediction, effect, minus(of(rows, base), of(rows, arm)))


def core_claims(rows: Sequence[Row]) -> list[Claim]:
    """Those of cut, thin and late edges, of the arms that there are."""
    has = {row["arm"] for row in rows}
    claims = [
        above(
            "the cut costs",
            "stages without gradient are worse than backprop",
            "its gap to backprop, percent,",
            of(rows, CUT),
        )
    ]
    if THIN[4] in has:
        words = f"four bits across every border come within {GOAL:g} % of backprop"
        claims.append(near(rows, THIN[4], words))
    if WHOLE in has:
        claims.append(
            above(
                "four bits are not free",
                "rounding costs something beside the same losses with the whole gradient",
                "the price of thin 4, percent,",
                of(rows, THIN[4], "price"),
            )
        )
    words = "a gradient that is one step late at each of two borders is better than none"
    claims.append(better(rows, LATE, CUT, words))
    claims.append(near(rows, LATE, f"three stages with a late gradient come within {GOAL:g} % of backprop"))
    if BOTH in has:
        claims.append(better(rows, BOTH, CUT, "so is one that is late and thin"))
    return claims


def _setting(args: Asked, question: Question) -> str:
    config = config_of(args, 0)
    whose = "Muon's" if question.optimizer == "muon+adamw" else "AdamW's"
    taken = "".join(f"; {arm} takes {rate:g}" for arm, rate in question.chosen.items())
    return (
        f"Six layers of width {config.model.width} on bytes, {config.steps} steps of {config.batch} × "
        f"{config.model.context} tokens; {whose} rate chosen for each arm on another seed{taken}; "
        f"{args.seeds} seeds."
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
                str(Interval.of(of(rows, arm, "price"))) if "price" in mine[0] else "–",
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
    for arm in dict.fromkeys(row["arm"] for row in rows if row["arm"] != BACKPROP):
        points = losses_gap(rows, arm)
        places = [(i + 1) / len(points) for i in range(len(points))]
        series.append(Series.of(arm, places, points))
    return Drawing(
        "The gap along the training", "share of the steps", "gap of the loss, percent", tuple(series)
    )
