"""`topograd study`: the experiments and tables of the papers, run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, make_folder, note, out, parse_one_of, print_json
from topograd.cli.progress import counted
from topograd.limits import REPEATS, check_numbers
from topograd.studies.listing import STUDIES, run_study, study_named
from topograd.studies.outcome import Preset


@dataclass(frozen=True, kw_only=True)
class List:
    """Every study, with what its paper predicts."""

    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a study: its tables, a page with figures, and what came of the prediction."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """One of those that `study list` names."""
    preset: Preset = "small"
    """tiny takes seconds and decides little, small minutes, and more than an hour for `interfaces`."""
    seeds: int | None = None
    """Seeds of every arm, where a study has a choice; by default the preset's."""
    data: str | None = None
    """Of studies on pictures: a folder of IDX or CIFAR binary files; scikit-learn's digits by default."""
    out: Path = Path("runs/studies")
    """Where NAME.html, NAME.json and figures go; those of an earlier run are replaced."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, seeds=REPEATS)


_QUESTIONS: dict[str, type[List | Run]] = {"list": List, "run": Run}


def run(argv: list[str]) -> int:
    """List the studies or run one, and return the exit code."""
    asked = parse_one_of(_QUESTIONS, argv, "study")
    if isinstance(asked, List):
        answer: dict[str, Any] = {"studies": _listed()}
    else:
        answer = _run(asked)
    if asked.json:
        print_json(answer)
    elif isinstance(asked, List):
        out().print(list_table(answer))
    else:
        _show(answer)
    return 0


def _listed() -> list[dict[str, str]]:
    return [
        {"name": name, "title": study.title, "prediction": study.prediction}
        for name, study in STUDIES.items()
    ]


def _run(asked: Run) -> dict[str, Any]:
    study_named(asked.name)
    from topograd.report.study import write_study  # matplotlib

    make_folder(asked.out)
    if asked.preset == "small":
        note(f"{asked.name}: some minutes")
    record = run_study(asked.name, asked.preset, asked.seeds, counted(asked.name), asked.data)
    return {**record, "page": str(write_study(asked.out, record))}


def list_table(answer: Mapping[str, Any]) -> Table:
    """Names and predictions."""
    table = Table()
    for column in ("name", "what its paper predicts"):
        table.add_column(column, no_wrap=column == "name")
    for study in answer["studies"]:
        table.add_row(study["name"], study["prediction"])
    return table


def result_table(found: Mapping[str, Any]) -> Table:
    """One of the study's tables."""
    table = Table(title=found["caption"], title_justify="left")
    for i, column in enumerate(found["header"]):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    for row in found["rows"]:
        table.add_row(*row)
    return table


def claims_table(answer: Mapping[str, Any]) -> Table:
    """Each claim, what was measured of it, and its verdict."""
    table = Table()
    for column in ("claim", "measured, over seeds", "verdict"):
        table.add_column(column)
    for claim in answer["claims"]:
        table.add_row(claim["name"], claim["measured"], claim["verdict"])
    return table


def _show(answer: Mapping[str, Any]) -> None:
    console = out()
    for found in answer["tables"]:
        console.print(result_table(found))
    if answer["claims"]:
        console.print(claims_table(answer))
    for words in answer["findings"]:
        console.print(f"- {words}", highlight=False)
    console.print(f"The paper: {answer['prediction']}")
    if answer["verdict"] is not None:
        console.print(f"Verdict: {answer['verdict']}")
    console.print(f"Page: {Path(answer['page']).resolve()}", soft_wrap=True)
