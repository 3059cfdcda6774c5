"""A table of ratios, which several benchmarks print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from topograd.cli.console import DASH, number


def ratio_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Ratios with their quartiles, and the goals where a row has one."""
    goals = any(row["goal"] is not None for row in rows)
    table = Table(title=title, title_justify="left")
    for column in ("what", "ratio", "quartiles", *(("goal", "met") if goals else ())):
        name = column == "what"
        table.add_column(column, justify="left" if name else "right", no_wrap=not name)
    for row in rows:
        spread = row["spread"]
        cells = [row["name"], number(row["ratio"], 2)]
        cells.append(f"{number(spread['low'], 2)}–{number(spread['high'], 2)}")
        if goals:
            met = {True: "yes", False: "no", None: DASH}[row["met"]]
            cells += [DASH if row["goal"] is None else f"≤ {row['goal']}", met]
        table.add_row(*cells)
    return table
