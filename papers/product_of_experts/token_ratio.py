"""The gap against tokens per parameter, against the layers of a stage, and with rates of each arm's own.

Statement. b(a, r) is the BPB of an arm that was trained on r tokens for each parameter of backprop's model,
each r with its whole schedule and from the same first weights; the gap is

    g(a, r) = 100 (b(a, r) / b(backprop, r) - 1)        percent, by seed

Three readings of a gap (Product of Experts, §5.5, §10.1) say different things of it:

    H-S   structural: it stays, at every r and with tuned rates
    H-E   engineering: more tokens close it, so that g falls from r = 10 to r = 30
    H-O   optimization: rates that were chosen for backprop make it; rates of the arm's own close it

so every arm, backprop too, takes the best of `RATES` times the usual rates, chosen on a seed that judges
nothing, at the first r. What the choice was worth is told beside the gaps. Arms: stages of 1, 2 and 3 of six
layers (`poe_every` of the paper) through a shared head, and stages of 2 with heads of their own (its "unified
per-stage heads", §10.2) at the middle r.

Models: plain GPTs on bytes as in `staged_runs.py`, whose text is longer than the longest training: nothing is
seen twice. Cost: `presets.py`. Source: "Product of Experts" §3.1 (12 % for stages of one layer, 6.6 % for
clusters of five), §5.6, §8.1, §9 items 1, 2, 6, §10.1. Limits. One width; r is of all parameters, a quarter
of which are embeddings and head here. A rate is one factor for all groups of parameters; the schedule is
backprop's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from papers.fit import trajectory
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.gap_arms import Arm
from papers.product_of_experts.gap_training import Given, Training
from papers.staged_runs import bytes_config, minus, order0
from papers.verdicts import Claim, Drawing, Interval, Series, above, each, settled
from topograd.nn.gpt import GPT
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.topology.dag import Topology
from topograd.training.evaluation import evaluate

BACKPROP = "backprop"
STAGES = {1: "stages of 1", 2: "stages of 2", 3: "stages of 3"}
OWN_HEADS = "stages of 2, own heads"
RATIOS: Mapping[str, tuple[float, ...]] = {"tiny": (0.02, 0.04, 0.06), "small": (10.0, 20.0, 30.0)}
RATES = (0.5, 1.0, 2.0)
"""Factors of the usual learning rates, of which each arm takes its best."""
MATRICES = 0.02
"""Muon's usual rate."""
TUNING = 100
"""The seed on which rates are chosen."""
CLOSING = 0.75
"""More tokens close a gap if they leave less than this share of it."""


@dataclass(frozen=True)
class Case:
    """An arm of some length: one training a seed."""

    arm: str
    ratio: float


def topologies() -> dict[str, Topology]:
    """Every arm."""
    chain = Topology.chain("2,2,2")
    return {
        BACKPROP: Topology.chain("6"),
        STAGES[1]: Topology.chain("1,1,1,1,1,1"),
        STAGES[2]: chain,
        STAGES[3]: Topology.chain("3,3"),
        OWN_HEADS: replace(chain, heads="per-stage", own_heads=True),
    }


def cases(ratios: Sequence[float]) -> list[Case]:
    """Every arm at every ratio; heads of one's own at the middle one alone."""
    middle = ratios[len(ratios) // 2]
    return [
        Case(arm, ratio) for ratio in ratios for arm in topologies() if arm != OWN_HEADS or ratio == middle
    ]


def run(args: Asked) -> Result:
    """Choose rates, train every case with every seed, and judge."""
    check_seeds(args.seeds)
    ratios = RATIOS[args.preset]
    todo = [(case, seed) for seed in range(args.seeds) for case in cases(ratios)]
    tuned = [(arm, rate) for arm in topologies() for rate in RATES]
    total = len(tuned) + len(todo)
    given = {seed: Given(config_of(args, seed)) for seed in (TUNING, *range(args.seeds))}
    tries: dict[str, dict[float, float]] = {arm: {} for arm in topologies()}
    for i, (arm, rate) in enumerate(tuned):
        tries[arm][rate] = _row(args, Case(arm, ratios[0]), given[TUNING], rate)["bpb"]
        args.on_more(i + 1, total)
    rates = {arm: min(result, key=result.__getitem__) for arm, result in tries.items()}
    rows: list[Row] = []
    for i, (case, seed) in enumerate(todo):
        rows.append(_row(args, case, given[seed], rates[case.arm]))
        args.on_more(len(tuned) + i + 1, total)
    add_gaps(rows)
    claims = tuple(settled(_claims(rows, ratios), rows))
    return Result(
        setting=_setting(args, rows),
        rows=rows,
        tables=(_table(rows, ratios), _rate_table(tries)),
        findings=tuple(_findings(rows, ratios, tries)),
        drawing=_drawing(rows, ratios),
        claims=claims,
        seeds=args.seeds,
        record={"rates": rates},
    )


def config_of(args: Asked, seed: int) -> TrainConfig:
    """The settings of a training but for its topology, length and rates."""
    return bytes_config(args, seed, batch=16, tiny_batch=4, eval_bytes=60_000, steps=1)


def parameters(config: TrainConfig) -> int:
    """Numbers in a model of backprop's size."""
    return sum(p.numel() for p in GPT(config.gpt).parameters())


def steps_of(config: TrainConfig, ratio: float) -> int:
    """Steps in which such a model sees `ratio` tokens a parameter."""
    return max(1, round(ratio * parameters(config) / (config.batch * config.model.context)))


def scaled(config: OptimizerConfig, factor: float) -> OptimizerConfig:
    """With every learning rate times a factor."""
    return replace(
        config,
        lr_matrix=factor * MATRICES,
        lr_embedding=factor * config.lr_embedding,
        lr_head=factor * config.lr_head,
        lr_scalar=factor * config.lr_scalar,
    )


def _row(args: Asked, case: Case, given: Given, rate: float) -> Row:
    key = {"arm": case.arm, "ratio": case.ratio, "seed": given.config.seed, "rate": rate}
    return args.kept.row(key, partial(_train, case, given, rate))


def _train(case: Case, given: Given, rate: float) -> Row:
    config, text, _ = given.loaded
    steps = steps_of(config, case.ratio)
    training = Training(Arm(case.arm, topologies()[case.arm], settings=partial(scaled, factor=rate)), config)
    losses = training.run(given.batches(config.batch), steps)
    result = evaluate(training.stack, training.plan, text)
    return {
        "arm": case.arm,
        "ratio": case.ratio,
        "seed": config.seed,
        "rate": rate,
        "steps": steps,
        "bpb": result.bpb.prediction,
        "bpb_prefix": result.bpb.prefix,
        "order0": order0(text),
        "trajectory": trajectory(losses),
    }


def add_gaps(rows: Sequence[Row]) -> None:
    """Write each arm's gap to backprop of the same seed and ratio into its row."""
    whole = {(row["ratio"], row["seed"]): row["bpb"] for row in rows if row["arm"] == BACKPROP}
    for row in rows:
        if row["arm"] != BACKPROP:
            row["gap"] = 100 * (row["bpb"] / whole[row["ratio"], row["seed"]] - 1)


def gaps(rows: Sequence[Row], arm: str, ratio: float) -> list[float]:
    """By seed, in percent."""
    return [row["gap"] for row in rows if row["arm"] == arm and row["ratio"] == ratio]


def _claims(rows: Sequence[Row], ratios: Sequence[float]) -> list[Claim]:
    plain = [gaps(rows, STAGES[2], ratio) for ratio in ratios]
    first, middle, last = ratios[0], ratios[len(ratios) // 2], ratios[-1]
    fine, two, coarse = (gaps(rows, name, middle) for name in STAGES.values())
    return [
        each(
            "structural (H-S)",
            "with rates of its own the gap is there at every ratio",
            f"the gap of {STAGES[2]} at r = {', '.join(f'{r:g}' for r in ratios)}, percent,",
            plain,
        ),
        above(
            "tokens do not close it (against H-E)",
            f"at r = {last:g} more than {CLOSING:g} of the gap at r = {first:g} is left",
            f"the gap at r = {last:g} minus {CLOSING:g} of that at r = {first:g}, points,",
            minus(plain[-1], plain[0], CLOSING),
        ),
        each(
            "coarser stages cost less",
            "stages of one layer cost more than clusters (12 % and 6.6 % in the paper)",
            f"the gap of {STAGES[1]} minus that of {STAGES[2]}, and of that minus {STAGES[3]}, at r = "
            f"{middle:g}, points,",
            [minus(fine, two), minus(two, coarse)],
        ),
        above(
            "own heads close some (H-O)",
            "heads of the stages' own take a part of the gap away",
            f"the gap of {STAGES[2]} minus that with own heads at r = {middle:g}, points,",
            minus(two, gaps(rows, OWN_HEADS, middle)),
        ),
    ]


def _setting(args: Asked, rows: Sequence[Row]) -> str:
    config = config_of(args, 0)
    steps = sorted({row["steps"] for row in rows})
    return (
        f"Six layers of width {config.model.width} on bytes, {config.batch} × {config.model.context} tokens "
        f"a step, {', '.join(map(str, steps))} steps; rates chosen for each arm on another seed; "
        f"{args.seeds} seeds."
    )


def _table(rows: Sequence[Row], ratios: Sequence[float]) -> ResultTable:
    cells = []
    for arm in topologies():
        results = []
        for ratio in ratios:
            bpb = [row["bpb"] for row in rows if row["arm"] == arm and row["ratio"] == ratio]
            if not bpb:
                results += ["–", "–"]
                continue
            results.append(f"{statistics.fmean(bpb):.4f}")
            results.append("" if arm == BACKPROP else f"{Interval.of(gaps(rows, arm, ratio))}")
        cells.append((arm, *results))
    header = ("arm", *(name for r in ratios for name in (f"BPB, r = {r:g}", "gap, percent")))
    return ResultTable("By tokens per parameter; gaps with 90 % intervals over seeds", header, tuple(cells))


def _rate_table(tries: Mapping[str, Mapping[float, float]]) -> ResultTable:
    cells = tuple((arm, *(f"{bpb:.4f}" for bpb in result.values())) for arm, result in tries.items())
    header = ("arm", *(f"rates × {rate:g}" for rate in RATES))
    return ResultTable("BPB on the seed that chose the rates, at the first ratio", header, cells)


def _findings(
    rows: Sequence[Row], ratios: Sequence[float], tries: Mapping[str, Mapping[float, float]]
) -> list[str]:
    usual = 100 * (tries[STAGES[2]][1.0] / tries[BACKPROP][1.0] - 1)
    tuned = 100 * (min(tries[STAGES[2]].values()) / min(tries[BACKPROP].values()) - 1)
    curve = ", ".join(f"{statistics.fmean(gaps(rows, STAGES[2], r)):+.2f} % at r = {r:g}" for r in ratios)
    return [
        f"Plain stages of two layers: {curve}.",
        f"On the seed that chose the rates their gap is {usual:+.2f} % with the usual rates and "
        f"{tuned:+.2f} % with both arms at their best.",
    ]


def _drawing(rows: Sequence[Row], ratios: Sequence[float]) -> Drawing:
    series = tuple(
        Series.of(arm, tuple(ratios), [gaps(rows, arm, ratio) for ratio in ratios]) for arm in STAGES.values()
    )
    return Drawing("The gap against tokens per parameter", "tokens per parameter", "gap, percent", series)
