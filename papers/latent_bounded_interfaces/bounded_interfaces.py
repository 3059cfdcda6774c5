"""Two studies of bounded interfaces as `python -m papers run` runs them: the leak, and Jacobians in training.

What is measured, and why, is in `leak.py` and `jacobians.py`. Source: "LBI: Parallel Scan Backpropagation via
Latent Bounded Interfaces", §3.1, appendix F.
Cost with the preset `small`, on one core: three minutes for `leak`, four for `jacobians`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import get_args

from rich.table import Table

from papers.latent_bounded_interfaces import jacobians, leak
from papers.outcome import Asked, Result, ResultTable, Row
from topograd.nn.config import Architecture


def run_leak(args: Asked) -> Result:
    """Random tokens, and text from prefixes, each with the published interface and a causal one.

    With the preset tiny a few steps on random tokens.
    """
    steps = args.parts("steps")
    tiny = len(steps) == 1
    rows: list[Row] = []
    for interface in (leak.LEAKY, leak.CAUSAL):
        rows.append(args.kept.row({"interface": interface}, partial(_leak, interface, steps)))
        args.on_more(len(rows), 2)
    tokens = ResultTable(
        f"Random tokens: nats per token; no honest model is below {leak.FLOOR:.4f}",
        ("interface", "cross entropy"),
        tuple((row["interface"], f"{row['iid']:.4f}") for row in rows),
    )
    text = ResultTable(
        f"Text: nats per byte; early is the first {leak.EARLY} positions",
        ("interface", "teacher-forced", "prefix only", "early, forced", "early, prefix only"),
        tuple((row["interface"], *(f"{row[key]:.4f}" for key in list(row)[2:])) for row in rows),
    )
    return Result(
        setting="The published interface, which is not causal, and a causal one of the same rank.",
        rows=rows,
        tables=(tokens,) if tiny else (tokens, text),
    )


def _leak(interface: str, steps: Sequence[int]) -> Row:
    """Its loss on random tokens and, where steps are given for it, on text."""
    row: Row = {"interface": interface, "iid": leak.iid_loss(interface, steps[0])}
    return row if len(steps) == 1 else row | leak.text_losses(interface, steps[1])


def run_jacobians(args: Asked) -> Result:
    """Every architecture while it is trained; tiny: two steps of one."""
    steps = args.steps
    kinds = get_args(Architecture)[: 1 if args.preset == "tiny" else None]
    rows: list[Row] = []
    tables, findings = [], []
    for i, kind in enumerate(kinds):
        looks = args.kept.rows({"architecture": kind}, partial(jacobians.watched, kind, steps))
        rows += [{"architecture": kind, **look} for look in looks]
        tables.append(plain(jacobians.table(kind, looks)))
        first, last = (statistics.fmean(look["rms"]) for look in (looks[0], looks[-1]))
        findings.append(f"{kind}: ‖J‖_F/√n goes from {first:.2g} to {last:.2g} in {steps} steps.")
        args.on_more(i + 1, len(kinds))
    return Result(
        setting=f"Models of regions with the interface {jacobians.INTERFACE}, {steps} steps on bytes.",
        rows=rows,
        tables=tuple(tables),
        findings=tuple(findings),
    )


def plain(table: Table) -> ResultTable:
    """A table for the terminal as text."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    header = tuple(str(column.header) for column in table.columns)
    return ResultTable(str(table.title), header, tuple(zip(*columns, strict=True)))
