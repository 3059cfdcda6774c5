"""`topograd inspect`: the geometry of a run of ours, or of a Hugging Face checkpoint in a local folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from topograd.cli.console import Json, ReadPath, check_new_file, note, out, parse, printed, show
from topograd.cli.progress import OnMore, work_progress
from topograd.errors import ConfigError
from topograd.limits import REPEATS, check_numbers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Read a model: its flat directions and why they are flat, its stream by depth, kernels, factors."""

    model: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """A run's folder, a Hugging Face folder (also of models that do not write text), a GGUF file, or
    hf:ORG/NAME, which is downloaded."""
    series: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Instead of MODEL: a run whose checkpoints are read one after the other, on one axis of steps."""
    text: ReadPath = None
    """Text of your own to read it on, a file or a folder, or images for a run on images; by default what the
    run held out."""
    device: str | None = None
    """Where it runs: cpu, cuda, cuda:1; by default where the run's model is, else cpu."""
    dtype: Literal["float64", "float32"] | None = None
    """Of stream and factors: by default float64, and float32 for models of more than 50 million parameters;
    sums, and directions that are followed, are always in float64."""
    scans: int | None = None
    """How many directions are followed outward; by default as many as the model's size allows."""
    out: Path | None = None
    """Where the page goes: by default geometry.html in a run, NAME-geometry.html here for other models."""
    json: Json = False

    def __post_init__(self) -> None:
        if (self.model is None) == (self.series is None):
            raise ConfigError("give either MODEL or --series with the folder of a run", setting="series")
        check_numbers(self, scans=REPEATS)


def run(argv: list[str]) -> int:
    args = parse(Inspect, argv, "inspect")
    check_new_file("out", args.out)
    began = time.perf_counter()
    if args.series is not None:
        from topograd.cli.inspect_series import read_series, show_series
        from topograd.report.geometry_series import write_series as write  # matplotlib

        results, page = read_series(args, args.series), args.series / "geometry-series.html"
        table: Callable[[Any], None] = show_series
    else:
        from topograd.report.geometry import write_geometry as write

        (results, page), table = _inspected(args), _show
    results["seconds"] = time.perf_counter() - began
    results["page"] = str(write(args.out or page, results))
    show(args.json, results, table)
    return 0


def _inspected(args: Inspect) -> tuple[dict[str, Any], Path]:
    """All that is read of one model, as JSON holds it, and where its page goes by default."""
    assert args.model is not None, "the settings were checked"
    import torch

    from topograd.cli.probe_model import hugging_face_probe, is_hugging_face, run_probe
    from topograd.convert.card import source_name
    from topograd.convert.huggingface import local_model
    from topograd.convert.model_argument import resolve_model
    from topograd.geometry.checkpoint import read_checkpoint
    from topograd.runs.device import usable_device

    if args.device is not None:
        usable_device(args.device)
    folder = local_model(args.model)
    theirs = is_hugging_face(folder)
    if not theirs:  # transformers opens more models than can be converted
        folder = resolve_model(folder)
    with work_progress(f"reading {args.model}: batches, then directions") as on_more:
        if theirs:
            probe = hugging_face_probe(folder, args.text, args.device, args.dtype, labelled=False)
            page = Path(f"{source_name(folder.resolve())}-geometry.html")
        else:
            probe = run_probe(folder, args.text, args.device, args.dtype)
            page = folder / "geometry.html" if folder == args.model else Path(f"{folder.name}-geometry.html")
        found = read_checkpoint(
            probe.model,
            _counted(probe.batches, on_more),
            probe.loss,
            outputs=probe.outputs,
            generator=torch.Generator(probe.batches[0][0].device).manual_seed(0),
            scans=args.scans,
            on_scan=on_more,
        )
    about: dict[str, Any] = {"kind": probe.kind, "step": probe.step, "text": probe.text}
    about |= {"fresh": list(probe.fresh)} if theirs else {}
    return {"model": str(args.model), **about, **found.as_dict()}, page


def _counted(batches: Sequence[T], on_more: OnMore) -> Iterator[T]:
    """The batches, with a word for each that has been read."""
    for done, batch in enumerate(batches):
        on_more(done, len(batches))
        yield batch
    on_more(len(batches), len(batches))


def _show(results: Mapping[str, Any]) -> None:
    """Tables for a person."""
    from topograd.report import geometry

    tables = {"stream": geometry.stream_table, "norms": geometry.kernel_table}
    tables |= {"layers": geometry.spectra_table, "directions": geometry.direction_table}
    for name, table in tables.items():
        if results[name]:
            out().print(printed(table(results)))
    for words in results["refused"]:
        note(words)
    if results["uncovered"]:
        reasons = "; ".join(f"{name} ({why})" for name, why in results["uncovered"].items())
        note(f"{len(results['uncovered'])} parameters have no factors: {reasons}")
    for words in results["sentences"]:
        out().print(f"- {words}")
    out().print(results["page"], soft_wrap=True)
