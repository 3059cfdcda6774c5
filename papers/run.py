"""`python -m papers run`: one study or all of them, each with its tables, its page and its record."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from papers import PROGRAM
from papers.kept import Kept, NotMeasured
from papers.outcome import Asked
from papers.outcome import asked as asked_of
from papers.presets import SIZES, Preset, size_of
from papers.studies import STUDIES, study_named
from topograd import __version__
from topograd.cli.console import Json, make_folder, note, out, parse, print_json
from topograd.cli.progress import counted
from topograd.errors import ConfigError, RunError, TopogradError
from topograd.files import read_json
from topograd.limits import REPEATS, SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a study: its tables, a page with figures, and what came of the prediction.

    What is measured is kept beside the page, so a study that is ended goes on where it was.
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="NAME")] = None
    """One of those that `list` names."""
    all: bool = False
    """Every study that has the preset, one after another; those that are done already are left alone."""
    preset: Preset = "small"
    """tiny takes seconds and decides little, small minutes, demo hours; `list` has them all."""
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
    judge: bool = False
    """Measure nothing: judge what an earlier run has kept, which may have been ended early."""
    out: Path = Path("runs/studies")
    """Where NAME.html, NAME.json and figures go; those of an earlier run are replaced."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=REPEATS, width=SIZE, seeds=REPEATS)
        if self.all and self.name is not None:
            raise ConfigError(
                f"--all is given and so is {self.name}",
                setting="all",
                given=self.name,
                remedy="give one of them",
            )
        if self.judge and self.fresh:
            raise ConfigError(
                "--judge measures nothing and --fresh everything", setting="judge", remedy="give one of them"
            )


def run(argv: list[str]) -> int:
    """Run one study or all, and return the exit code."""
    args = parse(Run, argv, "run", program=PROGRAM)
    if args.all:
        answer: dict[str, Any] = {"studies": _run_all(args)}
    elif args.name is not None:
        answer = _run_one(_asked(args, args.name), args)
    else:
        raise ConfigError(f"missing from {PROGRAM} run: NAME", remedy="give the name of a study, or --all")
    if args.json:
        print_json(answer)
    elif args.all:
        out().print(all_table(answer))
    else:
        _show(answer)
    return 0


def setting_of(args: Asked) -> dict[str, Any]:
    """What every row of a run depends on, beside what names it."""
    return {
        "study": args.study,
        "preset": args.preset,
        "steps": args.size.as_dict().get("steps"),
        "width": args.size.as_dict().get("width"),
        "data": args.data,
        "topograd": __version__,
        "python": platform.python_version(),
    }


def asked_for(args: Asked) -> dict[str, Any]:
    """The same, and how many seeds: what a whole run depends on."""
    return {**setting_of(args), "seeds": args.size.seeds}


def run_study(args: Asked) -> dict[str, Any]:
    """Run a study and give everything that it found as plain numbers and words."""
    study = study_named(args.study)
    if args.data is not None and not study.pictures:
        raise ConfigError(
            f"data is {args.data!r}, and this study has data of its own",
            setting="data",
            given=args.data,
            remedy="leave it out",
        )
    began = time.perf_counter()
    result = study.run(args)
    return {
        "study": args.study,
        "title": study.title,
        "preset": args.preset,
        "asked": asked_for(args),
        "seeds": result.seeds,
        "prediction": study.prediction,
        "setting": result.setting,
        "rows": result.rows,
        "tables": [asdict(table) for table in result.tables],
        "findings": list(result.findings),
        "figure": None if result.drawing is None else asdict(result.drawing),
        "claims": [asdict(claim) for claim in result.claims],
        "verdict": result.verdict,
        **result.record,
        "seconds": time.perf_counter() - began,
    }


def _asked(args: Run, name: str) -> Asked:
    """The study as it is asked for, with what is kept of earlier runs."""
    study_named(name)
    given: dict[str, int | None] = {"steps": args.steps, "width": args.width, "seeds": args.seeds}
    if args.all:  # what a study has no choice of is left to it
        has = size_of(name, args.preset).as_dict()
        given = {size: number for size, number in given.items() if size in has}
    return asked_of(
        name,
        args.preset,
        steps=given.get("steps"),
        width=given.get("width"),
        seeds=given.get("seeds"),
        data=args.data if STUDIES[name].pictures or not args.all else None,
        on_more=counted(name),
    )


def _run_one(study: Asked, args: Run) -> dict[str, Any]:
    from papers.study_page import write_study  # matplotlib

    make_folder(args.out)
    name = study_named(study.study).rows or study.study
    file = args.out / f"{name}.rows.jsonl"
    setting = {**setting_of(study), "study": name}
    retained = Kept(file, setting, args.fresh, measure=not args.judge)
    if args.judge:
        record = _judged(replace(study, kept=retained), file)
    else:
        if study.size.minutes >= 1:
            note(f"{study.study}: about {study.size.minutes:g} minutes of one core at the preset's own sizes")
        record = run_study(replace(study, kept=retained))
    if retained.found and not args.judge:
        note(
            f"{retained.found} measurements are of an earlier run, from {retained.file}; --fresh repeats them"
        )
    return {**record, "page": str(write_study(args.out, record))}


def _judged(study: Asked, file: Path) -> dict[str, Any]:
    """The record of the rows in a file: of all that the study can judge, or of the seeds that are whole."""
    if not file.is_file():  # some studies keep nothing, and would run
        raise NotMeasured(setting="judge", given=file, remedy="run the study without --judge first")
    most = study.size.seeds or 1
    for seeds in range(most, 0, -1):
        size = study.size.changed(study.study, seeds=seeds if seeds < most else None)
        try:
            record = run_study(replace(study, size=size))
        except NotMeasured:
            if seeds == 1:
                raise
        else:
            return {**record, "asked": {**record["asked"], "judge": True}}  # not what a whole run asks for
    raise AssertionError("one seed is tried at least")


def _run_all(args: Run) -> list[dict[str, Any]]:
    """Every study that has the preset; what cannot be run here says why, and the others go on."""
    results = []
    for name in STUDIES:
        if args.preset not in SIZES[name]:
            continue
        study = _asked(args, name)
        before = None if args.fresh else _finished(study, args.out)
        if before is not None:
            results.append({"study": name, "state": "done before", "verdict": before["verdict"]})
            continue
        try:
            record = _run_one(study, args)
        except TopogradError as problem:
            note(f"{name}: {problem}")
            results.append({"study": name, "state": "not run", "why": str(problem)})
        else:
            retained = {key: record[key] for key in ("verdict", "seconds", "page")}
            results.append({"study": name, "state": "done", **retained})
    return results


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


def result_table(result: Mapping[str, Any]) -> Table:
    """One of the study's tables."""
    table = Table(title=result["caption"], title_justify="left")
    for i, column in enumerate(result["header"]):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    for row in result["rows"]:
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
    for result in answer["tables"]:
        console.print(result_table(result))
    if answer["claims"]:
        console.print(claims_table(answer))
    for words in answer["findings"]:
        console.print(f"- {words}", highlight=False)
    console.print(f"The paper: {answer['prediction']}")
    if answer["verdict"] is not None:
        console.print(f"Verdict: {answer['verdict']}")
    console.print(f"Page: {Path(answer['page']).resolve()}", soft_wrap=True)
