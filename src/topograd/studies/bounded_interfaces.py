"""The three studies of bounded interfaces as `topograd study` runs them: quality, leak and Jacobians.

What is measured, and why, is in `interfaces.py`, `leak.py` and `jacobians.py`. Source: "LBI: Parallel Scan
Backpropagation via Latent Bounded Interfaces", Tables 2, 6 and 7, §3.1, appendix F.
Cost with the preset `small`, on one core: about a minute for each of the 70 trainings of `interfaces`, three
minutes for `leak`, four for `jacobians`. `python -m topograd.studies.interfaces` keeps trainings in a file
and goes on where it was.
"""

from __future__ import annotations

import statistics
from typing import get_args

from rich.table import Table

from topograd.nn.config import Architecture
from topograd.studies import interfaces, jacobians, leak
from topograd.studies.outcome import OnMore, Preset, Result, ResultTable, Row, refuse_seeds


def run_interfaces(preset: Preset, seeds: int | None, on_more: OnMore) -> Result:
    """Dense, shallow and bounded models of all architectures, and the sweeps; tiny: two of them, briefly."""
    tiny = preset == "tiny"
    seeds = seeds or (1 if tiny else 3)
    kinds = get_args(Architecture)
    cases = [case for kind in kinds for case in interfaces.headline(kind, range(seeds))]
    cases = cases[:4:2] if tiny else [*cases, *(case for kind in kinds for case in interfaces.sweeps(kind))]
    steps = 2 if tiny else interfaces.STEPS
    rows: list[Row] = []
    for case in cases:
        key = dict(zip(interfaces.KEY, case.key(steps), strict=True))
        rows.append(key | interfaces.train_case(case, steps))
        on_more(len(rows), len(cases))
    return Result(
        setting=f"Plain models of width {interfaces.WIDTH} on bytes, {steps} steps each.",
        rows=rows,
        tables=(plain(interfaces.table(rows)),),
        seeds=seeds,
    )


def run_leak(preset: Preset, seeds: int | None, on_more: OnMore) -> Result:
    """Random tokens, and text from prefixes, each with the published interface and a causal one.

    With the preset tiny a few steps on random tokens.
    """
    refuse_seeds("leak", seeds)
    tiny = preset == "tiny"
    rows: list[Row] = []
    for interface in (leak.LEAKY, leak.CAUSAL):
        row: Row = {"interface": interface, "iid": leak.iid_loss(interface, 5 if tiny else 500)}
        rows.append(row if tiny else row | leak.text_losses(interface))
        on_more(len(rows), 2)
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


def run_jacobians(preset: Preset, seeds: int | None, on_more: OnMore) -> Result:
    """Every architecture while it is trained; tiny: two steps of one."""
    refuse_seeds("jacobians", seeds)
    kinds, steps = (get_args(Architecture)[:1], 2) if preset == "tiny" else (get_args(Architecture), 300)
    rows: list[Row] = []
    tables, findings = [], []
    for i, kind in enumerate(kinds):
        looks = jacobians.watched(kind, steps)
        rows += [{"architecture": kind, **look} for look in looks]
        tables.append(plain(jacobians.table(kind, looks)))
        first, last = (statistics.fmean(look["rms"]) for look in (looks[0], looks[-1]))
        findings.append(f"{kind}: ‖J‖_F/√n goes from {first:.2g} to {last:.2g} in {steps} steps.")
        on_more(i + 1, len(kinds))
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
