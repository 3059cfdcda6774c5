"""Whether the spectrum of a checkpoint's adjoints says how wide an interface must be.

Statement. `topograd interfaces rank` gives the smallest r whose directions hold a share of the energy of the
adjoints at a boundary (`interfaces/adjoint_rank.py`). Is that the r that a model needs? A dense model is
trained, residual interfaces of r directions are put into it at the boundaries of regions 2,2,2, and it goes
on for a quarter of its steps. The directions are the leading ones of its adjoints; for one r also those of
its hidden states and random ones, and a model that has the interfaces from its first step on. An arm keeps

    share = (CE(shallow) - CE(arm)) / (CE(shallow) - CE(dense))

of what depth is worth. Dense went on like the arms, shallow is the last region alone, and all have taken the
same number of steps. The energy of an arm is the share that its r directions hold, the smaller of the two
boundaries'.

Rates: the matrices' rate of the first part is that of `interface_verdict.py`, 0.02; that of the second is
the best of a grid on a seed that is not judged, one for models that go on as they are and one for those that
interfaces are put into. The claims are in `_claims` and were set before the first run; that these two need
rates of their own was seen with one seed. Source: "LBI: Parallel Scan Backpropagation via Latent Bounded
Interfaces" §A, which leaves the effective interface rank open; the study is ours. Cost: `presets.py`.
Limits: width 48, a megabyte of text.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from papers.fit import best_between, fit
from papers.latent_bounded_interfaces.interface_verdict import ARMS, REGIONS, TUNING_SEED, Arm, build
from papers.latent_bounded_interfaces.interfaces import position_losses
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.staged_runs import bytes_config
from papers.verdicts import Claim, above, percent
from topograd.data import Loader, Prepared, windows
from topograd.interfaces.adjoint_rank import boundary_adjoints, energy_rank
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.interface_directions import begin_interfaces

FIRST_RATE = 0.02
GRID = (0.005, 0.01, 0.02)
READ = 16
"""Batches of training text whose adjoints are read."""
ENOUGH = 0.9
"""The share of energy, and of depth, of the first claim."""
NEAR = 0.1
"""How far the share of energy may be from the share kept."""
EIGHTHS = (1, 2, 4, 6)
"""The ranks, in eighths of the width."""
MIDDLE = 2
"""The eighths at which directions are compared."""


def run(args: Asked) -> Result:
    """Every arm with every seed, and the claims."""
    check_seeds(args.seeds)
    rates = tuple(_tuned(args, cut) for cut in (False, True))
    rows: list[Row] = []
    for seed in range(args.seeds):
        rows += args.kept.rows({"seed": seed}, partial(measure, _config(args, seed), rates))
        args.on_more(seed + 1, args.seeds)
    return Result(
        setting=f"Six layers of width {args.width} in regions {REGIONS}: {args.steps} steps dense, then "
        f"{args.steps // 4} as they are, the matrices at {rates[0]:g}, or with interfaces, at {rates[1]:g}.",
        rows=rows,
        tables=(_table(rows),),
        claims=tuple(_claims(rows)),
        seeds=args.seeds,
    )


def _config(args: Asked, seed: int) -> TrainConfig:
    return bytes_config(args, seed, batch=8, tiny_batch=2, eval_bytes=60_000)


def _tuned(args: Asked, cut: bool) -> float:
    """The rate of the second part, with interfaces at the middle rank or without."""
    if args.preset == "tiny":
        return FIRST_RATE
    words = f"residual:r={args.width * MIDDLE // 8},basis=adjoints" if cut else None

    def loss(rate: float) -> float:
        def make() -> Row:
            study = Trainings(_config(args, TUNING_SEED), (rate, rate))
            return {"ce": study.loss(*study.continued(study.dense(), words))}

        return float(args.kept.row({"tuning": rate, "cut": cut}, make)["ce"])

    return best_between(GRID, loss)


class Trainings:
    """The trainings of one seed, and their losses on held-out text."""

    def __init__(self, config: TrainConfig, rates: tuple[float, ...]) -> None:
        """`rates` are of the second part, without and with interfaces."""
        self.config = config
        self.plain, self.cut = (OptimizerConfig(lr_matrix=rate) for rate in rates)
        self.data: Prepared = load_data(config)[1]

    def loader(self, part: int) -> Loader:
        """Batches of the first or the second part of a training."""
        return Loader(
            self.data.train, self.config.model.context, self.config.batch, 2 * self.config.seed + part
        )

    def dense(self, arm: Arm = ARMS["dense"]) -> tuple[Stack, Plan]:
        """A model after the first part."""
        stack, plan = build(arm, self.config)
        fit(stack, plan, self.loader(0), self.config.steps, OptimizerConfig(lr_matrix=FIRST_RATE))
        return stack, plan

    def continued(self, trained: tuple[Stack, Plan], interface: str | None = None) -> tuple[Stack, Plan]:
        """A copy after the second part, with interfaces at its boundaries or as it is."""
        stack, plan = copy.deepcopy(trained[0]), trained[1]
        if interface is not None:
            plan = prepare(stack, Topology.regions(REGIONS, interface))
            begin_interfaces(stack, plan, self.cut, self.loader(0), steps=0)
        rates = self.plain if interface is None else self.cut
        fit(stack, plan, self.loader(1), max(1, self.config.steps // 4), rates)
        return stack, plan

    def loss(self, stack: Stack, plan: Plan) -> float:
        inputs, targets, _ = windows(
            self.data.heldout, self.data.tokenizer, self.config.model.context, self.config.eval_bytes
        )
        return position_losses(stack, plan, inputs, targets).nanmean().item()


def measure(config: TrainConfig, rates: tuple[float, ...]) -> list[Row]:
    """All arms of a seed."""
    study, width = Trainings(config, rates), config.model.width
    trained = study.dense()
    spectra = boundary_spectra(study, *trained)
    needed = max(energy_rank(singular, ENOUGH) for singular in spectra)

    def row(arm: str, model: tuple[Stack, Plan], rank: int) -> Row:
        held = min(energy(singular, rank) for singular in spectra)
        return {"seed": config.seed, "arm": arm, "r": rank, "energy": held, "ce": study.loss(*model)}

    rows = [row("dense", study.continued(trained), width)]
    rows.append(row("shallow", study.continued(study.dense(ARMS["shallow"])), 0))
    ranks = {f"adjoints, r = {part}/8 d": width * part // 8 for part in EIGHTHS}
    for arm, rank in {**ranks, "adjoints, r as read": needed}.items():
        rows.append(row(arm, study.continued(trained, f"residual:r={rank},basis=adjoints"), rank))
    middle = width * MIDDLE // 8
    for basis in ("hidden", "fixed"):
        words = f"residual:r={middle},basis={basis}"
        rows.append(row(f"{basis}, r = {MIDDLE}/8 d", study.continued(trained, words), middle))
    scratch = study.dense(replace(ARMS["residual, r = d/4"], interface=f"residual:r={middle}"))
    return [*rows, row(f"from scratch, r = {MIDDLE}/8 d", study.continued(scratch), middle)]


def boundary_spectra(study: Trainings, stack: Stack, plan: Plan) -> list[torch.Tensor]:
    """The singular values of the adjoints at the boundaries of the regions."""
    loader, ends = study.loader(0), [stage.stop - 1 for stage in Topology.chain(REGIONS).stages[:-1]]
    seen: list[list[torch.Tensor]] = []
    for _ in range(READ):
        adjoints = boundary_adjoints(stack, plan, *next(loader))
        seen.append([adjoints[end].flatten(0, -2).double() for end in ends])
    return [torch.linalg.svdvals(torch.cat(parts)) for parts in zip(*seen, strict=True)]


def energy(singular: torch.Tensor, rank: int) -> float:
    """The share of Σ σ² that the `rank` largest hold."""
    squares = singular.square()
    return (squares[:rank].sum() / squares.sum()).item() if rank else 0.0


def of(rows: Sequence[Row], arm: str, key: str = "ce") -> list[float]:
    """A reading of an arm, seed by seed."""
    return [row[key] for row in rows if row["arm"] == arm]


def kept(rows: Sequence[Row], arm: str) -> list[float]:
    """The share of what depth is worth that an arm keeps, by seed."""
    dense, shallow = of(rows, "dense"), of(rows, "shallow")
    return [(s - own) / (s - d) for d, s, own in zip(dense, shallow, of(rows, arm), strict=True)]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    def minus(left: str, right: str) -> list[float]:
        return [a - b for a, b in zip(of(rows, left), of(rows, right), strict=True)]

    ranks = [f"adjoints, r = {part}/8 d" for part in EIGHTHS]
    by_rank = [
        [abs(k - e) for k, e in zip(kept(rows, arm), of(rows, arm, "energy"), strict=True)] for arm in ranks
    ]
    off = [statistics.fmean(seed) for seed in zip(*by_rank, strict=True)]
    middle = f"r = {MIDDLE}/8 d"
    return [
        above(
            "depth is worth something",
            "six layers beat two",
            "CE of shallow minus that of dense",
            minus("shallow", "dense"),
        ),
        above(
            "the rank that is read is enough",
            f"directions with {ENOUGH:.0%} of the energy keep as much of depth",
            "the share kept at the r that is read",
            kept(rows, "adjoints, r as read"),
            ENOUGH,
        ),
        above(
            "energy says what is kept",
            f"the share of energy is within {NEAR:g} of the share of depth that is kept, over all r",
            f"{NEAR:g} minus the mean distance over the ranks",
            [NEAR - one for one in off],
        ),
        above(
            "directions of adjoints beat random ones",
            "a checkpoint keeps more through the leading directions of its adjoints",
            f"CE with random directions minus that with adjoints', {middle}",
            minus(f"fixed, {middle}", f"adjoints, {middle}"),
        ),
        above(
            "they beat those of hidden states",
            "gradient says better than values what a boundary must carry",
            f"CE with directions of hidden states minus that with adjoints', {middle}",
            minus(f"hidden, {middle}", f"adjoints, {middle}"),
        ),
        above(
            "a checkpoint is a good start",
            "interfaces that are put into a dense checkpoint are better than those from the first step on",
            f"CE from scratch minus that from a checkpoint with random directions, {middle}",
            minus(f"from scratch, {middle}", f"fixed, {middle}"),
        ),
    ]


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        joined = arm not in ("dense", "shallow")
        cells.append(
            (
                arm,
                ", ".join(f"{rank:g}" for rank in sorted({*of(rows, arm, "r")})) if joined else "–",
                percent(of(rows, arm, "energy")) if arm.startswith("adjoints") else "–",
                ", ".join(f"{ce:.4f}" for ce in of(rows, arm)),
                percent(kept(rows, arm)) if joined else "–",
            )
        )
    header = ("arm", "r", "energy of adjoints, 90 %", "CE by seed", "share of depth kept, 90 %")
    return ResultTable("Nats a byte of held-out text", header, tuple(cells))
