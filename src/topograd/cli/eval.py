"""`topograd eval`: measure a run on its held-out text, or on any other; `eval core` is in eval_core.py."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from topograd.cli.console import Json, ModelArgument, ReadPath, WeightsFlag, note, out, parse, print_json
from topograd.errors import ConfigError
from topograd.files import write_json
from topograd.limits import BYTES, REPEATS, check_numbers
from topograd.runs.config import TrainConfig

if TYPE_CHECKING:
    from topograd.data.windows import Text
    from topograd.runs.session import LoadedTextRun


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure a run: bits per byte or accuracy, calibration, effective rank and usefulness of each stage.

    `topograd eval core DIR --tasks DIR` scores it on the tasks of CORE instead."""

    model: ModelArgument
    data: ReadPath = None
    """Other text to read: a file, a JSONL file or a folder of them, all of it. Of a run on images: other
    images."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """The checkpoint to measure, instead of the newest."""
    bytes: int | None = None
    """Read at most this much of the text, spaced evenly over it."""
    images: int | None = None
    """Of a run on images: read at most so many images, spaced evenly."""
    weights: WeightsFlag = "float32"
    keep_weights: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep the int8 or int4 weights beside the run: they need not be made at every start then."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, bytes=BYTES, images=REPEATS)
        if self.keep_weights and self.weights not in ("int8", "int4"):
            remedy = "a run keeps its own anyway"
            raise ConfigError("--keep-weights is for --weights int8 or int4", remedy=remedy)


def run(argv: list[str]) -> int:
    if argv[:1] == ["core"]:  # a run in a folder of that name is ./core
        from topograd.cli.eval_core import run as run_core

        return run_core(argv[1:])
    args = parse(Eval, argv, "eval")
    config, results = _measured(args)
    if args.json:
        print_json(results)
    else:
        from topograd.cli.results import readings_table

        out().print(readings_table(config, results))
        if "precision" in results:
            cost = results["precision"]
            each = zip(cost["bpb"], cost["float32_bpb"], cost["agreement"], strict=True)
            for k, (bpb, own, agreement) in enumerate(each, 1):
                out().print(
                    f"{args.weights}, first {k} stages: BPB {bpb:.4f} for {own:.4f}, "
                    f"likeliest token float32's {agreement:.4f}"
                )
    return 0


def _measured(args: Eval) -> tuple[TrainConfig, dict[str, Any]]:
    from topograd.cli.results import heldout, measured, open_any
    from topograd.convert.model_argument import resolve_model
    from topograd.data.windows import Text
    from topograd.runs.folder import Run
    from topograd.runs.session import LoadedTextRun, read_settings

    folder = resolve_model(args.model)
    task = read_settings(Run.open(folder)).model.task
    images = task == "images"
    for flag, given, fits in (("--images", args.images, images), ("--bytes", args.bytes, not images)):
        if given is not None and not fits:
            raise ConfigError(f"{flag} is {given}, and {folder} was trained on {task}", remedy="leave it out")
    if task != "text" and args.weights != "float32":
        problem = f"--weights is {args.weights}, and {folder} predicts no next token"
        raise ConfigError(problem, remedy="leave it out")
    session = open_any(folder, args.from_)
    text = heldout(session, args.data, args.images if images else args.bytes)
    results = measured(session, text)
    if task != "text":
        return session.config, results
    assert isinstance(session, LoadedTextRun)
    assert isinstance(text, Text)
    if args.data is None and args.from_ is None and args.bytes is None:  # what `compare` would measure
        _keep(session, results)
    return session.config, results | _quantised(args, session, text)


def _keep(session: LoadedTextRun, results: dict[str, Any]) -> None:
    """What is measured of a run that was never trained here, as an imported one, goes into its card."""
    from topograd.convert.card import write_card

    with contextlib.suppress(OSError):  # a folder that cannot be written
        if session.run.read_results() is None:
            session.run.write_results({**results, "weights": session.weights})
            write_card(session.run)


def _quantised(args: Eval, session: LoadedTextRun, text: Text) -> dict[str, Any]:
    """What the weights that are asked for cost, and whether they are kept."""
    if args.weights == "float32":
        return {}
    from topograd.cli.eval_core import evaluations_folder
    from topograd.cli.progress import counted
    from topograd.decode.calibration.measure import precision_cost
    from topograd.decode.depths import engine_of
    from topograd.runtime.operators import OperatorRuntime
    from topograd.runtime.quantize import save_weights, weights_file

    engine = engine_of(session, weights=args.weights)
    cost = precision_cost(session, engine, text, counted(f"windows read in {args.weights}"))
    if args.keep_weights:
        assert isinstance(engine.runtime, OperatorRuntime)
        file = weights_file(session.run.folder, args.weights)
        save_weights(file, engine.runtime.made, args.weights, session.weights)
        note(f"kept in {file}")
    whole = args.data is None and args.from_ is None
    if whole and (folder := evaluations_folder(session.run.folder)) is not None:  # for the report
        write_json(folder / f"weights-{args.weights}.json", {"of": session.weights, **cost})
    return {"precision": cost}
