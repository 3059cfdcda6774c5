"""The answers of `topograd search` as tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from topograd.cli.console import figure, grid, number, pairs, printed, written

Answer = Mapping[str, Any]


def dp_table(answer: Answer) -> Table:
    return pairs([("partition", written(answer["partition"])), ("cost", f"{answer['cost']:g}")])


def soft_table(answer: Answer) -> Table:
    hard = answer["partition"]
    rows = [
        ("run", answer["run"]),
        ("partition", "not hardened yet" if hard is None else written(hard)),
        ("grad_scale after each layer", "  ".join(number(x, 2) for x in answer["grad_scales"])),
        ("expected boundaries", number(answer["expected_boundaries"], 2)),
        ("BPB of what the model predicts", number(answer["bpb"]["prediction"], 3)),
    ]
    return pairs(rows)


def surgery_table(answer: Answer) -> Table:
    bpb = number(answer["bpb"]["prediction"], 3)
    title = f"{answer['run']}: partition {written(answer['partition'])}, BPB {bpb}"
    table = grid(title, "step", "before", "after", "J", "gain", left=("before", "after"))
    for done in answer["operations"]:
        after = written(done["after"]) if done["after"] != done["before"] else "as it is"
        words = (written(done["before"]), after, number(done["utility"]), number(done["gain"]))
        table.add_row(str(done["step"]), *words)
    return table


def pareto_table(answer: Answer) -> Table:
    from topograd.report.pareto import trials_table  # brings matplotlib

    return printed(trials_table(answer))


def choice_table(answer: Answer) -> Table:
    """A column for each run, the best first: there are more readings than runs."""
    rows, weights = answer["runs"], answer["weights"]
    names = [Path(row["run"]).name for row in rows]
    table = grid(f"J for {answer['deployment']}; less is better", "", "weight", *names, overflow="fold")
    table.add_row("partition", "", *(written(row["partition"]) for row in rows))
    table.add_row("J", "", *(number(row["utility"]) for row in rows))
    for name in rows[0]["terms"]:
        sign = "-" if name == "capability" else ""
        weight = f"{sign}{weights.get(name, 1.0):g}"
        table.add_row(name, weight, *(number(row["terms"][name]) for row in rows))
    for name in rows[0]["properties"]:
        table.add_row(name, "", *(figure(row["properties"][name]) for row in rows))
    return table
