"""The tables of `topograd bench prompts`: answers by prefix, early exits and drafts by category, drafters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from topograd.cli.console import DASH, number


def prompt_tables(results: Mapping[str, Any]) -> list[Table]:
    """All of them, in the paper's order."""
    answers = [answer_table(name, rows) for name, rows in results["questions"].items()]
    ways = list(results["all"])
    early = [way for way in ways if way.startswith("wand")]
    drafting = [way for way in ways if way.startswith("draft")]
    tables = [*answers, *(category_table(results, way) for way in (*early, *drafting[:1]))]
    if drafting:
        tables.append(drafter_table(results, drafting))
    if results["not_measured"] is not None and tables:
        tables[-1].caption = f"not measured: leaving early ({results['not_measured']})"
    return tables


def answer_table(name: str, rows: list[dict[str, Any]]) -> Table:
    """A row for each prompt: what every exit writes, and the rank of the answer's first token."""
    table = Table(title=f"Eight prompts, {name}: right, and the rank of the answer", title_justify="left")
    table.add_column("prompt", overflow="fold")
    table.add_column("answer")
    exits = range(len(rows[0]["exits"]))
    for k in exits:
        table.add_column(f"stage {k + 1}", justify="right")
    for row in rows:
        marks = [f"{'yes' if each['right'] else 'no'} ({each['rank']})" for each in row["exits"]]
        table.add_row(Text(row["prompt"]), Text(row["answer"].strip()), *marks)
    table.add_section()
    table.add_row("right", "", *(str(sum(row["exits"][k]["right"] for row in rows)) for k in exits))
    return table


def category_table(results: Mapping[str, Any], way: str) -> Table:
    """One way by category."""
    table = Table(title=way, title_justify="left")
    columns = ("category", "prompts", "speed", "same texts", "ties", "stage", "kept")
    for column in columns:
        table.add_column(column, justify="left" if column == "category" else "right")
    for name, ways in results["categories"].items():
        table.add_row(name, *_cells(ways[way]))
    table.add_section()
    table.add_row("all", *_cells(results["all"][way]))
    return table


def drafter_table(results: Mapping[str, Any], drafting: list[str]) -> Table:
    """Each stage as the drafter, over all prompts."""
    table = Table(
        title=f"Draft stages, {results['settings']['drafts']} tokens at a time", title_justify="left"
    )
    for column in ("drafter", "compute", "prompts", "speed", "same texts", "ties", "stage", "kept"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for k, way in enumerate(drafting):
        table.add_row(way, f"{100 * results['compute'][k]:.0f} %", *_cells(results["all"][way]))
    return table


def _cells(way: Mapping[str, Any]) -> list[str]:
    kept = way["acceptance"]
    return [
        str(way["prompts"]),
        number(way["speedup"]["median"], 2),
        number(way["identical"], 2),
        str(way["ties"]),
        number(way["mean_stage"], 2),
        DASH if kept is None else number(kept, 2),
    ]
