"""`topograd eval core`: the tasks of CORE, at every depth of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import Json, ModelArgument, grid, note, number, out, parse, show
from topograd.cli.score import depth_names, scored_model
from topograd.files import write_json
from topograd.limits import REPEATS, check_numbers
from topograd.pretrained import REFERENCE

if TYPE_CHECKING:
    from topograd.decode.model import Model
    from topograd.evaluation.core import CoreRequest, CoreResult


@dataclass(frozen=True, kw_only=True)
class Core:
    """CORE of a run: 22 tasks by 0, 3 or 10 examples each, centred by chance, at every exit from one pass."""

    model: ModelArgument
    tasks: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """A folder with task files such as copa.jsonl, in it or below it."""
    only: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Some labels, with commas between: copa,piqa."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """At most this many items of each task, the first of a fixed shuffle."""
    depth: Annotated[str | None, tyro.conf.arg(metavar="DEPTH")] = None
    """One depth instead of every exit: full, prefix:J, path:1,3, branches:1-4*3+1-2; pool, router (fitted by
    topograd calibrate) or shrinkage."""
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists that are active, as A,B or A*0.7,B*0.3: the last exit predicts with them."""
    baselines: Literal["v1", "v2"] = "v1"
    """What accuracies are centred by: chance as in v1, or with the three labels that v2 changed."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Another model on the same items: which tasks are won and which lost, at full depth."""
    log: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where each item goes, as a line of JSON; by default a file in RUN/evaluation. What is there is not
    computed again."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, limit=REPEATS)


def run(argv: list[str]) -> int:
    args = parse(Core, argv, "eval core")
    from topograd.evaluation.tasks import chosen_tasks, find_files

    only = tuple(filter(None, (label.strip() for label in (args.only or "").split(","))))
    find_files(args.tasks, chosen_tasks(only))  # an unknown label and a wrong folder are refused at once
    from topograd.convert.model_argument import resolve_model
    from topograd.decode.depths import check_depth
    from topograd.evaluation.core import CoreRequest

    if args.depth is not None:
        check_depth(args.depth)

    request = CoreRequest(args.tasks, only, args.limit, args.depth, added=_added(args.specialists))
    folder = resolve_model(args.model)
    model, found = _evaluate(folder, request, args.log, args.specialists)
    answer = {"run": str(folder), "steps": model.session.step, **found.as_dict(args.baselines)}
    answer["limit"] = args.limit
    answer["depths"] = depth_names(model, args.specialists) if args.depth is None else [args.depth]
    if args.against is not None:
        from topograd.evaluation.polarisation import polarisation

        _, other = _evaluate(resolve_model(args.against), replace(request, added=()), None)
        answer["polarisation"] = {"against": str(args.against), **polarisation(found, other)}
    if answer["absent"]:
        note(f"no file for {', '.join(answer['absent'])}: left out, so this is {answer['name']}")
    if cut := [f"{label} {task['cut']}" for label, task in answer["tasks"].items() if task["cut"]]:
        note(f"prompts longer than the model's context lost their beginning, in items: {', '.join(cut)}")
    whole = args.depth is None and args.specialists is None  # what the report shows of the run itself
    if whole and (place := evaluations_folder(folder)) is not None:
        write_json(place / "core.json", answer | {"weights": model.session.weights})
    show(args.json, answer, _show)
    return 0


def _added(specialists: str | None) -> tuple[tuple[str, str, float], ...]:
    """Specialists by what they are, for the log."""
    if specialists is None:
        return ()
    from topograd.specialists.model import open_named

    opened, weights = open_named(specialists)
    return tuple((name, adapter.digest, weights[name]) for name, adapter in opened.items())


def _evaluate(
    folder: Path, request: CoreRequest, log: Path | None, specialists: str | None = None
) -> tuple[Model, CoreResult]:
    from topograd.cli.progress import counted_by_name
    from topograd.evaluation.core import evaluate_core, log_name

    model = scored_model(folder, specialists)
    if log is None and (place := evaluations_folder(folder)) is not None:
        log = place / log_name(model, request)
    if log is None:
        note(f"{folder} cannot be written to, so no item is logged; give --log FILE to keep them")
    return model, evaluate_core(model, request, log, counted_by_name())


def evaluations_folder(run: Path) -> Path | None:
    """The folder of a run's evaluations; none in one that cannot be written, nor in the package itself."""
    if run.resolve() == REFERENCE.resolve() or not os.access(run, os.W_OK):
        return None
    folder = run / "evaluation"
    folder.mkdir(exist_ok=True)
    return folder


def _show(answer: Mapping[str, Any]) -> None:
    console = out()
    console.print(core_table(answer))
    if "polarisation" in answer:
        console.print(polarisation_table(answer["polarisation"]))


def core_table(answer: Mapping[str, Any]) -> Table:
    """Accuracy and its interval by task and depth, and the centred mean."""
    limit = "" if answer["limit"] is None else f", at most {answer['limit']} items each"
    title = f"{answer['run']}: {answer['name']}, baselines {answer['baselines']}{limit}"
    table = grid(title, "task", "shots", "items", *answer["depths"])
    for label, task in answer["tasks"].items():
        cells = [_cell(x, pair) for x, pair in zip(task["accuracy"], task["interval"], strict=True)]
        table.add_row(label, str(task["shots"]), str(task["items"]), *cells)
    table.add_section()
    cells = [_cell(x, pair, 4) for x, pair in zip(answer["core"], answer["interval"], strict=True)]
    table.add_row(answer["name"], "", "", *cells)
    return table


def polarisation_table(found: Mapping[str, Any]) -> Table:
    """What is won and lost against another run."""
    columns = ("task", "group", "accuracy", "other", "difference", "verdict", "the paper's word")
    table = grid(f"against {found['against']}", *columns, left=columns)
    for row in found["tasks"]:
        change = _cell(row["difference"], row["interval"])
        accuracies = (number(row["accuracy"], 3), number(row["other"], 3))
        table.add_row(row["task"], row["group"], *accuracies, change, row["verdict"], row["paper"])
    return table


def _cell(value: float, interval: list[float], digits: int = 3) -> str:
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
