"""`topograd report`: explain a run in one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.cli.console import Folder, Json, note, parse, show
from topograd.errors import ConfigError
from topograd.files import read_json
from topograd.runs.folder import Run

if TYPE_CHECKING:
    from topograd.report.data import RunData


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the report.html of a run, or of a specialist, and its figures; of a fine-tuned run also what each
    layer learned and forgot."""

    folder: Folder
    """The folder of the run or specialist; the page is written there."""
    against: Path | None = None
    """Another run to compare it with; the one of a single stage is called backprop."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Report, argv, "report")
    from topograd.runs.adapter import is_adapter

    if is_adapter(args.folder):
        return _specialist(args)
    from topograd.report.page import write_report  # matplotlib: only once there is something to do
    from topograd.runs.session import read_settings

    if read_settings(Run.open(args.folder)).model.task == "images":
        return _images(args)
    stages, staged = _read(args.folder)
    backprop = None
    if args.against is not None:
        others, backprop = _read(args.against)
        if stages == 1 < others:
            staged, backprop = backprop, staged
        elif others > 1:
            raise ConfigError(
                f"{args.folder} has {stages} stages and {args.against} has {others}",
                remedy=(
                    "a report compares with backprop, a run of one stage: see topograd compare for others"
                ),
            )
    page = write_report(
        Run.open(args.folder).report_file, staged, backprop, None, shares=_shares(args.folder)
    )
    names = {"staged": staged.name, "backprop": backprop.name if backprop else None}
    show(args.json, {"run": str(args.folder), "report": str(page), **names}, _page)
    return 0


def _shares(folder: Path) -> dict[str, Any] | None:
    """What each layer of a fine-tuned run learned and forgot, where it kept its old text."""
    from topograd.training.layer_shares import has_old_text, layer_shares

    if not has_old_text(folder):
        return None
    note("reading what each layer learned and forgot")
    return layer_shares(folder)


def _specialist(args: Report) -> int:
    """The report of a specialist: what it learned, and that its base did not move."""
    from topograd.report.specialist import write_specialist_report
    from topograd.specialists.attach import open_specialist
    from topograd.specialists.finetune import training_records

    if args.against is not None:
        raise ConfigError(
            f"{args.folder} is a specialist, which is compared with its base alone", remedy="leave --against"
        )
    adapter, records = open_specialist(args.folder), training_records(args.folder)
    if not records:
        raise ConfigError(
            f"{args.folder} was not trained yet, so there is nothing to report",
            remedy="topograd specialist finetune",
        )
    name, base = args.folder.resolve().name, adapter.base.folder.name
    page = write_specialist_report(args.folder / "report.html", name, adapter.settings, base, records)
    show(args.json, {"specialist": str(args.folder), "report": str(page)}, _page)
    return 0


def _images(args: Report) -> int:
    """The report of a run on images, with images that its stages get right and wrong."""
    from topograd.report.images import write_image_report
    from topograd.runs.session import open_run
    from topograd.training.image_evaluation import examples

    _, data = _read(args.folder)
    other = None if args.against is None else _read(args.against)[1]
    if other is not None and "accuracy" not in other.evaluation:
        raise ConfigError(
            f"{args.against} was trained on text and {args.folder} on images", remedy="give one on images"
        )
    shown = examples(open_run(args.folder))
    page = write_image_report(Run.open(args.folder).report_file, data, other, shown)
    against = other.name if other else None
    show(args.json, {"run": str(args.folder), "report": str(page), "against": against}, _page)
    return 0


def _page(answer: dict[str, Any]) -> str:
    return str(answer["report"])


def _read(folder: Path) -> tuple[int, RunData]:
    """How many stages a run has, and what a report reads of it."""
    from topograd.cli.results import plan_of, predicts_by, results_of
    from topograd.report.data import RunData

    config, results = results_of(folder)
    opened, plan = Run.open(folder), plan_of(config)
    results = results | {"predicts_by": predicts_by(plan), "core": _left(opened, "core", "weights")}
    results["precision"] = {name: _left(opened, f"weights-{name}", "of") for name in ("int8", "int4")}
    return len(plan.stages), RunData(str(folder), opened.read_config(), opened.metrics(), results)


def _left(opened: Run, name: str, key: str) -> object:
    """What an evaluation left of the newest weights, whose hash is at `key`, if anything."""
    file, names = opened.folder / "evaluation" / f"{name}.json", opened.store.names()
    if not file.is_file() or not names:
        return None
    found = read_json(file)
    fits = isinstance(found, dict) and found.get(key) == opened.store.weights(names[-1])
    return found if fits else None
