"""Rates predicted and measured on networks set by hand, and on statistical models: three quick questions."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from papers.limits import check_total
from topograd.cli.console import DASH, Json, note, number
from topograd.cli.progress import counted
from topograd.limits import DEPTH, SEED, SIZE, check_numbers

if TYPE_CHECKING:
    from papers.dead_directions.catalogue import Cell


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Every network of the catalogue, every node: the rate that theory gives, and the one measured."""

    seed: int = 0
    """Draws the weights that theory leaves free."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, seed=SEED)

    def answer(self) -> dict[str, Any]:
        from papers.dead_directions.catalogue import catalogue  # torch

        began, cells, count = time.perf_counter(), 0, counted("cells measured")

        def on_cell(cell: Cell, total: int) -> None:
            nonlocal cells
            cells += 1
            count(cells, total)
            if not cell.ok:
                note(f"not as predicted: {cell.name}: {cell.predicted} predicted, {cell.measured} measured")

        result = catalogue(seed=self.seed, on_cell=on_cell)
        return {"cells": [asdict(cell) for cell in result], "seconds": time.perf_counter() - began}

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [catalogue_table(answer)]


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rates of a chain: G_1 .. G_L, A_0 .. A_{L-1}, and their products."""

    depth: int = 6
    """L, the layers of the chain."""
    width: int = 8
    """Units of each layer."""
    activation: Literal["linear", "relu", "gelu", "tanh"] = "linear"
    """What each layer applies."""
    seed: int = 0
    """Draws the weights that theory leaves free."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, depth=DEPTH, width=(2, SIZE[1]), seed=SEED)
        check_total(self.depth * self.width**2, "--depth or --width")

    def answer(self) -> dict[str, Any]:
        from papers.dead_directions.catalogue import ladder  # torch

        return dict(ladder(self.depth, self.width, self.activation, seed=self.seed))

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [ladder_table(answer)]


@dataclass(frozen=True, kw_only=True)
class Families:
    """Statistical models with a known singularity: the order read from exact Fisher and divergence."""

    json: Json = False

    def answer(self) -> dict[str, Any]:
        from papers.dead_directions.families.table import family_rows  # torch

        return {"families": family_rows()}

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [families_table(answer["families"])]


_NUMBERED = re.compile(r"_\d+(?=\[|\)?$)")
"""The number of a node, at the end of a cell's name."""


def catalogue_table(answer: Mapping[str, Any]) -> Table:
    """Predicted and measured side by side: a row for each network and kind of node."""
    cells = answer["cells"]
    good = sum(cell["ok"] for cell in cells)
    title = f"{good} of {len(cells)} cells as predicted, {answer['seconds']:.0f} s"
    table = Table(title=title, title_justify="left")
    for column in ("network: nodes", "predicted", "measured", "ok", "note"):
        table.add_column(column, overflow="fold")
    for name, group in itertools.groupby(cells, key=lambda cell: _NUMBERED.sub("", cell["name"])):
        row = list(group)
        predicted, measured = (" ".join(number(c[key], 2) for c in row) for key in ("predicted", "measured"))
        notes = dict.fromkeys(c["note"] for c in row)
        table.add_row(
            name, predicted, measured, "yes" if all(c["ok"] for c in row) else "NO", "; ".join(notes)
        )
    return table


def ladder_table(answer: Mapping[str, Sequence[float]]) -> Table:
    """One row for each layer."""
    table = Table(title="powers of t", title_justify="left")
    for column in ("layer l", "G_l", "A_{l-1}", "A_{l-1} G_l"):
        table.add_column(column, justify="right")
    for layer, slopes in enumerate(zip(answer["G"], answer["A"], answer["product"], strict=True), start=1):
        table.add_row(str(layer), *(number(slope, 3) for slope in slopes))
    return table


def families_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each family; a family without an order says so."""
    table = Table(title="order k from Fisher ~ t^(2k-2), KL ~ t^2k, F t²/K -> 2k²", title_justify="left")
    for column in ("family", "k", "Fisher", "KL", "F t²/K", "2k²"):
        table.add_column(column, justify="left" if column == "family" else "right", overflow="fold")
    for row in rows:
        order, limit = (DASH if row[key] is None else str(row[key]) for key in ("order", "limit"))
        slopes = (number(row[key], 3) for key in ("fisher_slope", "kl_slope", "leading_ratio"))
        table.add_row(row["family"], order, *slopes, limit)
    return table
