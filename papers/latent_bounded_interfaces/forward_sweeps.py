"""The forward over depth in parallel sweeps, with the interface's own Jacobians: Picard and Newton.

Statement. m_{k+1} = R_k(m_k), k = 1..K-2, is a chain, and a scan shortens its backward only. Guess all
messages (every m_k is m_1) and run all regions at once, again and again:

    Picard    m_{k+1} ← R_k(m_k)
    Newton    m_{k+1} ← R_k(m_k) + J_k (m'_k - m_k),   m'_k the new value: a scan over affine maps

After i sweeps the first i of the later messages are exact, so K - 2 sweeps always suffice, which is what the
chain costs. A sweep of Picard is one forward F of every region at once, one of Newton J more, about r F. What
is measured is the least number of sweeps to a relative error of 1e-6 in the last message, in float64, on
trained models of eight regions; and what the messages carry: the loss with another row's messages at the last
boundary minus the loss. A chain that forgets is short to solve and carries nothing; the question is whether
one that carries is. Newton needs at most half of K - 2 sweeps to pay, and of those each costs a Jacobian.

Source: ours; Newton over layers is in "SNLP" (arXiv 2605.17842), which calls the Jacobians too dear. Cost:
`presets.py`. Limits: small models, one text; errors of messages, not of losses.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from papers.fit import fit
from papers.latent_bounded_interfaces.interfaces import position_losses
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.staged_runs import bytes_config
from papers.verdicts import Claim, above
from topograd.data import Loader, windows
from topograd.interfaces.ablation import silenced
from topograd.interfaces.jacobian import interface_jacobian, visit
from topograd.interfaces.regions import Regions
from topograd.nn.gpt import GPT
from topograd.nn.interface_config import parse_interface
from topograd.nn.preparation import prepare
from topograd.nn.stack import LayerContext
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology

REGIONS = 8
FORMS = {"published": "published:r={r}", "segments": "S=4,r={r}", "residual": "residual:r={r}"}
LIMIT = 1e-6
ROUNDING = 1e-12
LENGTH = 8
"""Positions of the sequences that are solved: a Jacobian of the residual form has as many times r rows."""
Way = Literal["picard", "newton"]


def run(args: Asked) -> Result:
    """Train a model of each form with each seed, and count sweeps."""
    check_seeds(args.seeds)
    rows: list[Row] = []
    for seed in range(args.seeds):
        for form in FORMS:
            key = {"form": form, "seed": seed}
            make = partial(measure, form, bytes_config(args, seed, batch=8, tiny_batch=2, eval_bytes=20_000))
            rows.append(key | args.kept.row(key, make))
            args.on_more(len(rows), args.seeds * len(FORMS))
    return Result(
        setting=f"{REGIONS} regions of one layer of width {args.width}, {args.steps} steps on bytes.",
        rows=rows,
        tables=(_table(rows),),
        claims=tuple(_claims(rows)),
        seeds=args.seeds,
    )


def measure(form: str, config: TrainConfig) -> Row:
    """Train a model; sweeps of each way, what the messages carry, and how far Picard is after each sweep."""
    config, data = load_data(config)
    context, width = config.model.context, config.model.width
    words = FORMS[form].format(r=min(8, width))
    torch.manual_seed(config.seed)
    stack = GPT(config.gpt.changed(layers=REGIONS))
    first = parse_interface(words).first_region
    plan = prepare(stack, Topology.regions(",".join("1" * REGIONS), words, first_region=first))
    loader = Loader(data.train, context, config.batch, config.seed)
    fit(stack, plan, loader, config.steps, config.optimizer)
    inputs, targets, _ = windows(data.heldout, data.tokenizer, context, config.eval_bytes)
    loss = position_losses(stack, plan, inputs, targets).nanmean().item()
    with silenced(stack, "shuffled"):
        other = position_losses(stack, plan, inputs, targets).nanmean().item()
    regions = Regions.of(stack.double(), plan)
    length = min(LENGTH, context) if form == "residual" else context
    return {
        "ce": loss,
        "carried": other - loss,
        **{way: sweeps(regions, inputs[:2, :length], way) for way in ("picard", "newton")},
    }


def sweeps(regions: Regions, inputs: Tensor, way: Way) -> list[float]:
    """The relative error of the last message after 0, 1, ... sweeps, up to K - 2."""
    stack = regions.stack
    with torch.no_grad():
        x0 = stack.embed(inputs)
        ctx = stack.layer_context(x0, inputs)
        exact = regions.messages(x0, ctx)
    guess = [exact[0].clone() for _ in exact]  # region 0 has no message to guess
    errors = [_error(guess[-1], exact[-1])]
    for _ in range(len(exact) - 1):
        if errors[-1] > ROUNDING:  # else it is solved
            guess = _sweep(regions, guess, ctx, way)
        errors.append(_error(guess[-1], exact[-1]))
    return errors


def _sweep(regions: Regions, guess: Sequence[Tensor], ctx: LayerContext, way: Way) -> list[Tensor]:
    """One sweep of all regions at once; with Newton, the scan over their affine maps behind it."""
    new = [guess[0]]
    for k, old in enumerate(guess[:-1], 1):
        leaf = old.detach().requires_grad_()
        seen = visit(regions, k, leaf, ctx)
        made = seen.message_out.detach()
        if way == "newton":
            J = interface_jacobian(seen, trimmed=False)
            made = made + (J @ (new[-1] - old).flatten(1)[..., None]).view_as(made)
        new.append(made)
    return new


def _error(guess: Tensor, exact: Tensor) -> float:
    return ((guess - exact).norm() / exact.norm()).item()


def needed(errors: Sequence[float]) -> int:
    """The first number of sweeps after which the error stays below the limit."""
    above_limit = [i for i, error in enumerate(errors) if not error < LIMIT]
    return above_limit[-1] + 1 if above_limit else 0


def _by_form(rows: Sequence[Row], form: str) -> list[Row]:
    return [row for row in rows if row["form"] == form]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    """Set before the run: at most half of the chain's sweeps, on a form whose messages are used."""
    half = (REGIONS - 2) / 2
    claims = []
    for form in FORMS:
        own = _by_form(rows, form)
        claims.append(
            above(
                f"{form}: messages are used",
                "another row's messages cost something",
                "CE with another row's messages minus its own",
                [row["carried"] for row in own],
            )
        )
        for way in ("picard", "newton"):
            claims.append(
                above(
                    f"{form}: {way} takes half of the sweeps",
                    f"{half:g} of {REGIONS - 2} sweeps reach {LIMIT:g}",
                    f"{half:g} minus the sweeps that {way} needs",
                    [half - needed(row[way]) for row in own],
                    -0.5,
                )
            )
    return claims


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for form in FORMS:
        own = _by_form(rows, form)
        carried = statistics.fmean(row["carried"] for row in own)
        for way in ("picard", "newton"):
            counts = ", ".join(str(needed(row[way])) for row in own)
            errors = [statistics.median(column) for column in zip(*(row[way] for row in own), strict=True)]
            shown = ", ".join(f"{error:.0e}" for error in errors)
            cells.append((form, way, counts, shown, f"{carried:.4f}"))
    header = ("form", "way", f"sweeps of {REGIONS - 2}, by seed", "median error after 0, 1, ...", "carried")
    return ResultTable(
        f"Sweeps to {LIMIT:g} of the last message, nats that messages carry", header, tuple(cells)
    )
