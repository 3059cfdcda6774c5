"""`topograd study`: the experiments and tables of the papers, run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from papers.listing import STUDIES, asked_for, kept_rows, run_study, study_named
from papers.outcome import Asked
from papers.outcome import asked as asked_of
from papers.presets import SIZES, Preset, size_of
from topograd.cli.console import Json, make_folder, note, out, parse_one_of, print_json
from topograd.cli.progress import counted
from topograd.errors import ConfigError, RunError, TopogradError
from topograd.files import read_json
from topograd.limits import REPEATS, SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class List:
    """Every study, with what its paper predicts, the sizes of its presets and the minutes that they take."""

    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a study: its tables, a page with figures, and what came of the prediction.

    What is measured is kept beside the page, so a study that is ended goes on where it was.
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="NAME")] = None
    """One of those that `study list` names."""
    all: bool = False
    """Every study that has the preset, one after another; those that are done already are left alone."""
    preset: Preset = "small"
    """tiny takes seconds and decides little, small minutes, demo hours; `study list` has them all."""
    steps: int | None = None
    """Steps of every training, where a study has a choice; by default the preset's."""
    width: int | None = None
    """Width of every model, where a study has a choice."""
    seeds: int | None = None
    """Seeds of every arm, where a study has a choice."""
    data: str | None = None
    """Of studies on pictures: a folder of IDX or CIFAR binary files; scikit-learn's digits by default."""
    fresh: bool = False
    """Measure everything again, also what an earlier run has kept."""
    out: Path = Path("runs/studies")
    """Where NAME.html, NAME.json and figures go; those of an earlier run are replaced."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=REPEATS, width=SIZE, seeds=REPEATS)
        if self.all and self.name is not None:
            raise ConfigError(f"--all is given and so is {self.name}; give one of them")


_QUESTIONS: dict[str, type[List | Run]] = {"list": List, "run": Run}


def run(argv: list[str]) -> int:
    """List the studies or run one or all, and return the exit code."""
    asked = parse_one_of(_QUESTIONS, argv, "study")
    show: Callable[[Mapping[str, Any]], None]
    if isinstance(asked, List):
        answer, show = {"studies": _listed()}, _show_list
    elif asked.all:
        answer, show = {"studies": _run_all(asked)}, _show_all
    else:
        answer, show = _run(asked), _show
    if asked.json:
        print_json(answer)
    else:
        show(answer)
    return 0


def _listed() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "title": study.title,
            "prediction": study.prediction,
            "presets": {preset: size.as_dict() for preset, size in SIZES[name].items()},
        }
        for name, study in STUDIES.items()
    ]


def _asked(asked: Run, name: str) -> Asked:
    """The study as it is asked for, with what is kept of earlier runs."""
    study_named(name)
    given: dict[str, int | None] = {"steps": asked.steps, "width": asked.width, "seeds": asked.seeds}
    if asked.all:  # what a study has no choice of is left to it
        has = size_of(name, asked.preset).as_dict()
        given = {size: number for size, number in given.items() if size in has}
    return asked_of(
        name,
        asked.preset,
        steps=given.get("steps"),
        width=given.get("width"),
        seeds=given.get("seeds"),
        data=asked.data if STUDIES[name].pictures or not asked.all else None,
        on_more=counted(name),
    )


def _run(asked: Run) -> dict[str, Any]:
    if asked.name is None:
        raise ConfigError("missing from topograd study run: NAME; give the name of a study, or --all")
    return _run_one(_asked(asked, asked.name), asked)


def _run_one(study: Asked, asked: Run) -> dict[str, Any]:
    from papers.study_page import write_study  # matplotlib

    make_folder(asked.out)
    kept = kept_rows(study, asked.out, asked.fresh)
    if study.size.minutes >= 1:
        note(f"{study.study}: about {study.size.minutes:g} minutes of one core at the preset's own sizes")
    record = run_study(replace(study, kept=kept))
    if kept.found:
        note(f"{kept.found} measurements are of an earlier run, from {kept.file}; --fresh makes them again")
    return {**record, "page": str(write_study(asked.out, record))}


def _run_all(asked: Run) -> list[dict[str, Any]]:
    """Every study that has the preset; what cannot be run here says why, and the others go on."""
    found = []
    for name in STUDIES:
        if asked.preset not in SIZES[name]:
            continue
        study = _asked(asked, name)
        before = None if asked.fresh else _finished(study, asked.out)
        if before is not None:
            found.append({"study": name, "state": "done before", "verdict": before["verdict"]})
            continue
        try:
            record = _run_one(study, asked)
        except TopogradError as problem:
            note(f"{name}: {problem}")
            found.append({"study": name, "state": "not run", "why": str(problem)})
        else:
            kept = {key: record[key] for key in ("verdict", "seconds", "page")}
            found.append({"study": name, "state": "done", **kept})
    return found


def _finished(study: Asked, folder: Path) -> dict[str, Any] | None:
    """The record of an earlier run that was asked for in the same way."""
    file = folder / f"{study.study}.json"
    try:
        record = read_json(file)
    except RunError:
        return None
    same = isinstance(record, dict) and record.get("asked") == asked_for(study)
    return record if same else None


def all_table(answer: Mapping[str, Any]) -> Table:
    """What came of every study."""
    table = Table()
    for column in ("study", "state", "verdict"):
        table.add_column(column, no_wrap=column == "study")
    for study in answer["studies"]:
        table.add_row(study["study"], study["state"], str(study.get("verdict") or study.get("why") or "–"))
    return table


def list_table(answer: Mapping[str, Any]) -> Table:
    """Names, minutes by preset, and predictions."""
    table = Table()
    for column in ("name", "minutes", "what its paper predicts"):
        table.add_column(column, no_wrap=column == "name")
    for study in answer["studies"]:
        minutes = (f"{preset} {size['minutes']:g}" for preset, size in study["presets"].items())
        table.add_row(study["name"], "\n".join(minutes), study["prediction"])
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


def _show_list(answer: Mapping[str, Any]) -> None:
    out().print(list_table(answer))


def _show_all(answer: Mapping[str, Any]) -> None:
    out().print(all_table(answer))


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
