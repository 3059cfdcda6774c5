"""`topograd eval`: measure a run on its held-out text, or on any other; `eval core` is in eval_core.py."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from topograd.cli.console import Folder, Json, WeightsFlag, note, out, parse, print_json
from topograd.errors import ConfigError
from topograd.files import write_json
from topograd.runs.config import TrainConfig

if TYPE_CHECKING:
    from topograd.data.windows import Text
    from topograd.runs.session import LoadedTextRun

_KIND = {True: "images", False: "text"}


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure a run: bits per byte or accuracy, calibration, effective rank and usefulness of each stage.

    `topograd eval core DIR --tasks DIR` scores it on the tasks of CORE instead."""

    folder: Folder
    """The run's folder."""
    data: Path | None = None
    """Other text to read: a file, a JSONL file or a folder of them, all of it. Of a run on images: other
    pictures."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """The checkpoint to measure, instead of the newest."""
    bytes: int | None = None
    """Read at most this much of the text, spaced evenly over it."""
    images: int | None = None
    """Of a run on images: read at most so many pictures, spaced evenly."""
    weights: WeightsFlag = "float32"
    keep_weights: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep the int8 or int4 weights beside the run: they need not be made at every start then."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    if argv[:1] == ["core"]:  # a run in a folder of that name is ./core
        from topograd.cli.eval_core import run as run_core

        return run_core(argv[1:])
    asked = parse(Eval, argv, "eval")
    for flag, given in (("--bytes", asked.bytes), ("--images", asked.images)):
        if given is not None and given < 1:
            raise ConfigError(f"{flag} is {given}", remedy="it must be at least 1")
    if asked.keep_weights and asked.weights == "float32":
        raise ConfigError("--keep-weights is for --weights int8 or int4", remedy="a run keeps its own anyway")
    config, results = _measured(asked)
    if asked.json:
        print_json(results)
    else:
        from topograd.cli.results import readings_table

        out().print(readings_table(config, results))
        if "precision" in results:
            cost = results["precision"]
            each = zip(cost["bpb"], cost["float32_bpb"], cost["agreement"], strict=True)
            for k, (bpb, own, agreement) in enumerate(each, 1):
                out().print(
                    f"{asked.weights}, first {k} stages: BPB {bpb:.4f} for {own:.4f}, "
                    f"likeliest token float32's {agreement:.4f}"
                )
    return 0


def _measured(asked: Eval) -> tuple[TrainConfig, dict[str, Any]]:
    from topograd.cli.progress import counted
    from topograd.cli.results import measured, measured_images
    from topograd.runs.folder import Run
    from topograd.runs.session import heldout_text, open_run, open_session, read_settings

    images = read_settings(Run.open(asked.folder)).model.task == "images"
    for flag, given, fits in (("--images", asked.images, images), ("--bytes", asked.bytes, not images)):
        if given is not None and not fits:
            raise ConfigError(
                f"{flag} is {given}, and {asked.folder} was trained on {_KIND[images]}", remedy="leave it out"
            )
    if images:
        if asked.weights != "float32":
            raise ConfigError(
                f"--weights is {asked.weights}, and {asked.folder} was trained on images",
                remedy="leave it out",
            )
        opened = open_run(asked.folder, asked.from_)
        return opened.config, measured_images(opened, asked.data, asked.images, counted("images read"))
    session = open_session(asked.folder, asked.from_)
    text = heldout_text(session, asked.data, asked.bytes)
    results = measured(session, text, counted("windows read"))
    if asked.data is None and asked.from_ is None and asked.bytes is None:  # what `compare` would measure
        _keep(session, results)
    return session.config, results | _quantised(asked, session, text)


def _keep(session: LoadedTextRun, results: dict[str, Any]) -> None:
    """What is measured of a run that was never trained here, as an imported one, goes into its card."""
    from topograd.convert.card import write_card

    with contextlib.suppress(OSError):  # a folder that cannot be written
        if session.run.read_results() is None:
            session.run.write_results({**results, "weights": session.weights})
            write_card(session.run)


def _quantised(asked: Eval, session: LoadedTextRun, text: Text) -> dict[str, Any]:
    """What the weights that are asked for cost, and whether they are kept."""
    if asked.weights == "float32":
        return {}
    from topograd.cli.eval_core import evaluations_folder
    from topograd.cli.progress import counted
    from topograd.decode.calibration.measure import precision_cost
    from topograd.decode.depths import engine_of
    from topograd.runtime.onnx_runtime import OnnxRuntime
    from topograd.runtime.quantize import save_weights, weights_file

    engine = engine_of(session, "onnx", asked.weights)
    cost = precision_cost(session, engine, text, counted(f"windows read in {asked.weights}"))
    if asked.keep_weights:
        assert isinstance(engine.runtime, OnnxRuntime)
        file = weights_file(session.run.folder, asked.weights)
        save_weights(file, engine.runtime.made, asked.weights, session.weights)
        note(f"kept in {file}")
    whole = asked.data is None and asked.from_ is None
    if whole and (folder := evaluations_folder(session.run.folder)) is not None:  # for the report
        write_json(folder / f"weights-{asked.weights}.json", {"of": session.weights, **cost})
    return {"precision": cost}
