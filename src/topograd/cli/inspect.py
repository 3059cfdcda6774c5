"""`topograd inspect`: the geometry of a run of ours, or of a Hugging Face checkpoint in a local folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

from topograd.cli.console import Folder, Json, note, out, parse, print_json
from topograd.cli.progress import OnMore, work_progress
from topograd.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.geometry.inspection import Inspection

T = TypeVar("T")

TEXT_BYTES = 20_000
"""Held-out text that a run is read on: some thousands of tokens."""
BATCH_TOKENS = 512
"""Of a checkpoint's batches: logits over a large vocabulary are wide."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Read a model: its residual stream by depth, LayerNorm kernels, and the spectra of its K-FAC factors."""

    folder: Folder
    """A run's folder, or a Hugging Face checkpoint: config.json and .safetensors."""
    out: Path | None = None
    """Where the page goes: by default geometry.html in a run, NAME-geometry.html here for a checkpoint."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Inspect, write the page, print, return the exit code."""
    asked = parse(Inspect, argv, "inspect")
    began = time.perf_counter()
    ours = (asked.folder / "config.toml").is_file()
    if not ours and not (asked.folder / "config.json").is_file():
        raise RunError(
            f"{asked.folder} is neither a run (config.toml) nor a Hugging Face checkpoint (config.json); "
            "give the folder of one"
        )
    with work_progress(f"reading {asked.folder}: batches") as on_more:
        from topograd.report.geometry import write_geometry  # matplotlib

        page, about, found = (_run_of_ours if ours else _checkpoint)(asked.folder, on_more)
    results = {"model": str(asked.folder), **about, **found.as_dict()}
    results["seconds"] = time.perf_counter() - began
    results["page"] = str(write_geometry(asked.out or page, results))
    if asked.json:
        print_json(results)
    else:
        _show(results)
    return 0


def _run_of_ours(folder: Path, on_more: OnMore) -> tuple[Path, dict[str, Any], Inspection]:
    import torch

    from topograd.geometry.inspection import inspect
    from topograd.runs.session import heldout_text, open_session
    from topograd.training.forward import stage_logits

    session = open_session(folder)
    text = heldout_text(session, limit_bytes=TEXT_BYTES)
    stack = session.stack.double()
    device = next(stack.parameters()).device
    batches = list(zip(text.inputs.to(device).split(16), text.targets.to(device).split(16), strict=True))
    generator = torch.Generator(device).manual_seed(0)
    last = session.plan.predicting()[-1]

    def outputs(model: Any, inputs: Tensor) -> Tensor:
        return stage_logits(model, session.plan, last, inputs)

    found = inspect(stack, _counted(batches, on_more), outputs=outputs, generator=generator)
    about = {"kind": "run", "step": session.step, "text": "the run's held-out text"}
    return folder / "geometry.html", about, found


def _checkpoint(folder: Path, on_more: OnMore) -> tuple[Path, dict[str, Any], Inspection]:
    import torch

    from topograd.geometry.inspection import inspect
    from topograd.pretrained import huggingface

    loaded = huggingface.load(folder)
    for name in loaded.fresh:
        note(f"{name} is not in the checkpoint and was made at random")
    ids, source = huggingface.token_rows(folder, loaded.config, loaded.config.hidden_size)
    found = inspect(
        loaded.model,
        _counted([(rows, None) for rows in ids.split(BATCH_TOKENS // ids.shape[1])], on_more),
        "cross-entropy" if loaded.causal else None,
        outputs=loaded.hidden,
        generator=torch.Generator().manual_seed(0),
    )
    about = {"kind": loaded.config.model_type, "step": None, "text": source, "fresh": list(loaded.fresh)}
    return Path(f"{folder.resolve().name}-geometry.html"), about, found


def _counted(batches: Sequence[T], on_more: OnMore) -> Iterator[T]:
    """The batches, with a word for each that has been read."""
    for done, batch in enumerate(batches):
        on_more(done, len(batches))
        yield batch
    on_more(len(batches), len(batches))


def _show(results: Mapping[str, Any]) -> None:
    """Tables for a person."""
    console = out()
    for table in (_stream_table(results), _norm_table(results), _spectra_table(results)):
        if table is not None:
            console.print(table)
    for words in results["notes"]:
        note(words)
    if results["uncovered"]:
        reasons = "; ".join(f"{name} ({why})" for name, why in results["uncovered"].items())
        note(f"{len(results['uncovered'])} parameters have no factors: {reasons}")
    console.print(results["page"], soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


def _stream_table(results: Mapping[str, Any]) -> Table | None:
    stream = results["stream"]
    if stream is None:
        return None
    title = f"{Path(results['model']).name}, σ_{stream['rank']} of the stream: {stream['verdict']}"
    table = _table(title, "after", "σ_r(H)/σ_r(H₀)", "effective rank")
    ratios = (1.0, *stream["ratios"])
    for name, ratio, rank in zip(("input", *stream["names"]), ratios, stream["effective_ranks"], strict=True):
        table.add_row(name, f"{ratio:.3g}", f"{rank:.1f}")
    return table


def _norm_table(results: Mapping[str, Any]) -> Table | None:
    if not results["norms"]:
        return None
    table = _table("γ's direction against the outputs", "norm", "kernel", "|cos|", "share of variance")
    for name, norm in results["norms"].items():
        size = str(norm["dimensions"]) if norm["exact"] else "none"
        table.add_row(name, size, f"{norm['cosine']:.6f}", f"{norm['share']:.1e}")
    return table


def _spectra_table(results: Mapping[str, Any]) -> Table:
    sides = ("A", "G") if results["fisher"] else ("A",)
    fisher = f"{results['fisher']} Fisher" if results["fisher"] else "no loss, so no G"
    columns = [f"{side} {word}" for side in sides for word in ("rank", "eff.")]
    table = _table(f"Factors ({fisher})", "layer", *columns)
    for name, layer in results["layers"].items():
        cells: list[str] = []
        for side in sides:
            found = layer[side]
            cells += [f"{found['rank']}/{found['size']}", f"{found['effective_rank']:.1f}"]
        table.add_row(name, *cells)
    return table
