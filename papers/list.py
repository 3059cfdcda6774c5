"""`python -m papers list`: every study, by paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from papers import PROGRAM
from papers.presets import SIZES
from papers.reproduction import PAPERS
from papers.studies import STUDIES
from topograd.cli.console import Json, out, parse, print_json

GROUPS = {**PAPERS, "beyond": "Questions of ours that no paper tests"}


@dataclass(frozen=True, kw_only=True)
class List:
    """Every study, with what its paper predicts, the sizes of its presets and the minutes that they take."""

    json: Json = False


def run(argv: list[str]) -> int:
    """List the studies, and return the exit code."""
    args, studies = parse(List, argv, "list", program=PROGRAM), listed()
    if args.json:
        print_json({"studies": studies})
        return 0
    for paper, title in GROUPS.items():
        out().print(list_table(title, [study for study in studies if study["paper"] == paper]))
    return 0


def listed() -> list[dict[str, Any]]:
    """Every study as plain numbers and words."""
    return [
        {
            "name": name,
            "paper": study.paper,
            "title": study.title,
            "prediction": study.prediction,
            "presets": {preset: size.as_dict() for preset, size in SIZES[name].items()},
        }
        for name, study in STUDIES.items()
    ]


def list_table(title: str, studies: Sequence[dict[str, Any]]) -> Table:
    """Names, minutes by preset, and predictions."""
    table = Table(title=title, title_justify="left")
    for column in ("name", "minutes", "what is predicted"):
        table.add_column(column, no_wrap=column == "name")
    for study in studies:
        minutes = (f"{preset} {size['minutes']:g}" for preset, size in study["presets"].items())
        table.add_row(study["name"], "\n".join(minutes), study["prediction"])
    return table
