"""Which changes leave a chain's rates as they are (Table 9), and what memorising does to them (Corollary 39).

Table 9. For each primitive the networks of the catalogue (`catalogue/`), with random live blocks,
are probed with several seeds: the largest distance of a slope of G from its prediction.

Corollary 39. A linear chain of L = 4 under a softmax with the canonical approach t → 0 and labels that are
its own most likely classes at t = 0; inputs are scaled so that every sample's most likely logit is 1 above
the next. The logits are multiplied by s. With p the probabilities, y the labels, and G_l the dead entry

    expected    Σ_c p_c (s δ_l^{(c)})²     labels drawn from the model
    empirical   (s δ_l^{(y)})²             labels of the data

the paper says that under perfect memorisation, p_y → 1, the empirical entry goes to 0 and loses the rate, and
that the expected one keeps it. Two ways there:

    confidence   s fixed: the same network, surer of itself
    growing      s = κ log(1/t), so that p_y → 1 along the approach: 1 - p_y ~ t^κ

Derived here. At the output δ is of size 1 - p_y for the empirical entry, and of mean square p_y (1 - p_y) for
the expected one; what is below only multiplies it by powers of t. So with s fixed both have the slopes
2(L - l), however sure the network is. With s growing the empirical slope gains 2κ and the expected one κ: the
condition of Theorem 36 (no perfect classifier) does not hold. G_l / G_L keeps the ladder in both. Entries are
read over s², which is no power of t.

Symbols. L layers, d = 8. Cost: about ten seconds.
Source: "Dead Directions: Geometric Singular Learning" appendix B.2 (Table 9; its numbers are lost in the text
that we have), Corollary 39, Theorem 36.
Limits. Weights set by hand; the study `grokking` has the same two entries along a training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from papers.dead_directions.catalogue.cells import compare, tolerance
from papers.dead_directions.catalogue.networks import trace_chain
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.verdicts import Claim, above, within
from topograd.geometry.rates import fit_rate, log_grid
from topograd.geometry.rules.architectures import Architecture, Chain

DEPTH, SAMPLES = 4, 300
SURE = (1.0, 8.0, 30.0)
"""s where it is fixed: at 30, 1 - p_y is 1e-13."""
GROWING = (1, 2)
"""κ"""
LOW = (1e-6, 1e-5)
"""t where s grows: classes behind the second add t^{κ (margin - 1)}, which is 0.06 of a slope at 0.01."""
SMALL = 0.05
ACTIVATIONS = ("linear", "relu", "gelu")
PRIMITIVES: dict[str, tuple[Architecture, ...]] = {
    "several directions, rank 2 (Theorem 106)": tuple(
        Chain(4, activation=kind, exponents=((1, 2, 1, 2), (2, 1, 3, 1))) for kind in ACTIVATIONS
    ),
    "several directions, full sweep": tuple(
        Chain(len(rows[0]), activation=kind, exponents=rows)
        for rows in (
            ((1, 1, 1),),
            ((2, 1, 1),),
            ((1, 1, 1), (1, 1, 1)),
            ((1, 2, 3), (3, 2, 1)),
            ((1, 1, 1, 1), (2, 2, 2, 2)),
            ((1, 2, 1), (2, 1, 2), (1, 1, 3)),
        )
        for kind in ACTIVATIONS
    ),
    "cross-entropy, expected Fisher (Theorem 36)": (
        Chain(4, loss="cross-entropy"),
        Chain(4, activation="gelu", loss="cross-entropy"),
    ),
    "no bias (Theorem 112)": (Chain(4), Chain(4, activation="gelu")),
    "biases (Theorem 112)": tuple(
        Chain(4, activation=kind, bias=power) for kind in ("linear", "gelu") for power in (1, 2)
    ),
    "rotation, linear (Proposition 118)": (Chain(4, rotation=0.1), Chain(4, rotation=0.5)),
}


def run(args: Asked) -> Result:
    """Both parts with every seed."""
    check_seeds(args.seeds)
    rows: list[Row] = []
    parts = {"table": table_rows, "memorised": memorised_rows}
    keys = [(seed, name) for seed in range(args.seeds) for name in parts]
    for done, (seed, name) in enumerate(keys, 1):
        rows += args.kept.rows({"part": name, "seed": seed}, partial(parts[name], seed))
        args.on_more(done, len(keys))
    judged = (*table_claims(rows), *memorised_claims(rows))
    return Result(
        setting=(
            f"Weights set by hand, random live blocks, {args.seeds} seeds. Memorising: a linear chain of "
            f"{DEPTH} layers under a softmax that is sure of its own labels."
        ),
        rows=rows,
        tables=(primitive_table(rows), slope_table(rows)),
        claims=judged,
        seeds=args.seeds,
    )


def table_rows(seed: int) -> list[Row]:
    """For every primitive: how many entries of G were read, how far the worst is off, and what is allowed."""
    rows: list[Row] = []
    for name, networks in PRIMITIVES.items():
        off, allowed = [], []
        for network in networks:
            for cell in compare(network, seed=seed):
                if ": G_" in cell.name:
                    result = math.inf if cell.measured is None else abs(cell.measured - (cell.predicted or 0))
                    off.append(result)
                    allowed.append(result / tolerance(network))
        rows.append(
            {"primitive": name, "seed": seed, "read": len(off), "off": max(off), "share": max(allowed)}
        )
    return rows


def memorised_rows(seed: int) -> list[Row]:
    """Slopes of both entries at every layer, s fixed and s growing."""
    rows: list[Row] = []
    t = log_grid(1e-3, 3e-2)
    for s in SURE:
        rows += _slopes(seed, t, torch.full_like(t, s), {"way": "confidence", "s": s, "power": 0})
    t = log_grid(*LOW)
    for power in GROWING:
        rows += _slopes(seed, t, -power * t.log(), {"way": "growing", "s": None, "power": power})
    return rows


def _slopes(seed: int, t: Tensor, scale: Tensor, message: Row) -> list[Row]:
    rows: list[Row] = []
    for estimator, entries in dead_entries(t, scale, seed).items():
        gains = {"empirical": 2, "expected": 1}[estimator] * message["power"]
        for layer, values in enumerate(entries, 1):
            rate = fit_rate(t, values, estimator=f"{estimator} Fisher")
            rows.append(
                {
                    **message,
                    "seed": seed,
                    "estimator": estimator,
                    "layer": layer,
                    "ladder": 2 * (DEPTH - layer),
                    "ours": 2 * (DEPTH - layer) + gains,
                    "slope": rate.slope,
                    "refused": rate.refused,
                    "least": float(values.min()),
                }
            )
    return rows


def dead_entries(t: Tensor, scale: Tensor, seed: int) -> dict[str, list[Tensor]]:
    """By estimator, for every layer the dead entry over s² at every t."""
    grid = torch.cat((t, t.new_zeros(1)))  # the labels are those at t = 0
    trace = trace_chain(Chain(DEPTH, loss="cross-entropy"), grid, SAMPLES, seed)
    top = trace.outputs[-1].detach().topk(2, dim=-1)
    unit = 1 / (top.values[:, 0] - top.values[:, 1])  # of the inputs, for a margin of 1: the chain is linear
    s = torch.cat((scale, scale[-1:]))[:, None, None]
    p = (trace.outputs.detach() * unit[:, None] * s).softmax(-1)
    nodes = [reading.at for reading in trace.backward.values()]
    result = {name: [torch.zeros_like(t) for _ in nodes] for name in ("empirical", "expected")}
    for c in range(p.shape[-1]):
        cotangent = p.clone()
        cotangent[..., c] = -(p.sum(-1) - p[..., c])  # p_c - 1 without its cancellation
        deltas = torch.autograd.grad(trace.outputs, nodes, cotangent, retain_graph=True)
        for i, (delta, reading) in enumerate(zip(deltas, trace.backward.values(), strict=True)):
            squares = (delta @ reading.along).square()[:-1]
            result["expected"][i] += (p[:-1, :, c] * squares).mean(1)
            result["empirical"][i] += (squares * (top.indices[:, 0] == c)).mean(1)
    return result


def table_claims(rows: Sequence[Row]) -> list[Claim]:
    """One for each row of Table 9."""
    return [
        within(
            name,
            "the rates of the plain ladder, direction by direction",
            "the worst distance of a slope over its tolerance",
            [row["share"] for row in rows if row.get("primitive") == name],
            1.0,
        )
        for name in PRIMITIVES
    ]


def _off(rows: Sequence[Row], estimator: str, way: str, against: str, s: float | None = None) -> list[float]:
    """By seed, how far the worst layer's slope is from `against`; nan where one was refused."""
    result: dict[int, list[float]] = {}
    for row in rows:
        if row.get("estimator") == estimator and row["way"] == way and s in (None, row["s"]):
            off = math.nan if row["slope"] is None else abs(row["slope"] - row[against])
            result.setdefault(row["seed"], []).append(off)
    return [math.nan if any(map(math.isnan, all_)) else max(all_) for all_ in result.values()]


def memorised_claims(rows: Sequence[Row]) -> list[Claim]:
    """What Corollary 39 and its probe say, and what we derive instead."""
    effect = "the worst distance of a slope from the ladder"
    sure = SURE[-1]
    return [
        within(
            "a sure network: expected entry (B.2)",
            "it recovers the ladder",
            effect,
            _off(rows, "expected", "confidence", "ladder", sure),
            SMALL,
        ),
        above(
            "a sure network: empirical entry (B.2)",
            "it admits no clean slope once the data are memorised",
            effect,
            _off(rows, "empirical", "confidence", "ladder", sure),
            SMALL,
        ),
        above(
            "memorising along the approach: empirical entry (Corollary 39)",
            "it vanishes faster than the ladder",
            effect,
            _off(rows, "empirical", "growing", "ladder"),
            SMALL,
        ),
        within(
            "memorising along the approach: expected entry (Corollary 39)",
            "it keeps the rates of Theorem 36",
            effect,
            _off(rows, "expected", "growing", "ladder"),
            SMALL,
        ),
        *(
            within(
                f"memorising along the approach: {estimator} entry gains {gain} (ours)",
                "the power of 1 - p_y comes on top",
                "the worst distance of a slope from the ladder plus that",
                _off(rows, estimator, "growing", "ours"),
                SMALL,
            )
            for estimator, gain in (("empirical", "2κ"), ("expected", "κ"))
        ),
    ]


def primitive_table(rows: Sequence[Row]) -> ResultTable:
    """Table 9 with our numbers."""
    cells = []
    for name, networks in PRIMITIVES.items():
        own = [row for row in rows if row.get("primitive") == name]
        off = max(row["off"] for row in own)
        cells.append((name, str(len(networks)), str(sum(row["read"] for row in own)), f"{off:.4f}"))
    header = ("primitive", "networks", "slopes read", "worst distance from the prediction")
    return ResultTable("What keeps the ladder (Table 9)", header, tuple(cells))


def slope_table(rows: Sequence[Row]) -> ResultTable:
    """The slopes of the first seed, layer by layer."""
    cells = []
    ways = [("confidence", s, 0) for s in SURE] + [("growing", None, power) for power in GROWING]
    for way, s, power in ways:
        for estimator in ("expected", "empirical"):
            own = [
                row
                for row in rows
                if row.get("estimator") == estimator
                and (row["way"], row["s"], row["power"]) == (way, s, power)
                and row["seed"] == 0
            ]
            slopes = ("refused" if row["slope"] is None else f"{row['slope']:.3f}" for row in own)
            name = f"s = {s:g}" if s is not None else f"s = {power} log 1/t"
            cells.append((f"{name}, {estimator}", *slopes, f"{own[-1]['least']:.1e}"))
    layers = (f"layer {layer}" for layer in range(1, DEPTH + 1))
    header = ("labels", *layers, "least entry at the output")
    return ResultTable("Slopes of the dead entry, first seed", header, tuple(cells))
