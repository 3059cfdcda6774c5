"""A model of any kind with text to read it on: what commands on the loss of a model begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.cli.console import note
from topograd.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from topograd.data.windows import Text
    from topograd.runs.session import LoadedRun, LoadedTextRun

MIN_TOKENS = 4096
"""That a run is read on, if its text has them; and `ROWS_PER_CHANNEL` for each channel of its stream."""
TOKEN_BYTES = 10
"""Of text for a token: more than it has, as short documents are left out."""
LENGTH = 128
"""Tokens of a row: with thousands, attention and logits cost more than they say."""
LARGE = 50_000_000
"""Parameters from which on a model runs in float32, unless it was asked for otherwise."""
BATCH_TOKENS = 256
"""Of the batches: what a backward pass holds of SmolLM2 is 2 MB a token."""


@dataclass(frozen=True)
class ProbeModel:
    """A model, batches (inputs, targets) of text, and how its logits are had."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor | None]]
    outputs: Callable[[Any, Any], Tensor]
    text: str
    """Where it comes from."""
    kind: str
    loss: str | None = "cross-entropy"
    """None where there are no labels."""
    fresh: tuple[str, ...] = ()
    """Parameters that a checkpoint does not hold."""
    session: LoadedRun | None = None
    """Of a run."""

    @property
    def step(self) -> int | None:
        """Of a run's checkpoint."""
        return None if self.session is None else self.session.step


def open_probe(model: Path, text: Path | None, device: str | None, dtype: str | None) -> ProbeModel:
    """A run, or whatever else MODEL may be; a Hugging Face folder needs no conversion."""
    from topograd.convert.huggingface import local_model
    from topograd.convert.model_argument import resolve_model

    folder = local_model(model)
    if is_hugging_face(folder):
        return hugging_face_probe(folder, text, device, dtype)
    return run_probe(resolve_model(folder), text, device, dtype)


def is_hugging_face(folder: Path) -> bool:
    """Whether transformers reads it."""
    return (folder / "config.json").is_file() and not (folder / "config.toml").is_file()


def run_probe(
    folder: Path, text: Path | None, device: str | None, dtype: str | None, name: str | None = None
) -> ProbeModel:
    """A run at its last checkpoint, or at that of this name."""
    from topograd.exec.forward import stage_logits
    from topograd.runs.folder import Run
    from topograd.runs.session import LoadedTextRun, open_run, open_session, read_settings, read_tokenizer

    task = read_settings(Run.open(folder)).model.task
    opened: LoadedRun = open_session(folder, name) if task == "text" else open_run(folder, name)
    if task == "masked":
        opened = LoadedTextRun(**vars(opened), tokenizer=read_tokenizer(opened.run))
    stack = moved(opened.stack, device, dtype).eval()
    plan, last = opened.plan, opened.plan.predicting()[-1]
    if isinstance(opened, LoadedTextRun):
        batches = probe_batches(opened, text)
    else:
        batches = image_batches(opened, text, next(stack.parameters()).device)

    def outputs(model: Any, inputs: Tensor) -> Tensor:
        return stage_logits(model, plan, last, inputs)

    what = "images" if task == "images" else "text"
    source = f"the run's held-out {what}" if text is None else str(text)
    return ProbeModel(stack, [*batches], outputs, source, "run", session=opened)


def hugging_face_probe(
    folder: Path, text: Path | None, device: str | None, dtype: str | None, *, labelled: bool = True
) -> ProbeModel:
    """A causal language model, every token predicted from those before it; without labels also any other."""
    from topograd.convert import huggingface

    loaded = huggingface.load(folder, wanted_type(dtype, huggingface.stored_parameters(folder)))
    kind = loaded.config.model_type
    if labelled and not loaded.causal:
        raise CheckpointError(
            f"{folder} ({kind}) does not predict the next token, so that it has no loss here",
            setting="model",
            given=kind,
            allowed="a causal language model",
        )
    for name in loaded.fresh:
        note(f"{name} is not in the checkpoint and was made at random")
    ids, source = huggingface.token_rows(folder, loaded.config, loaded.config.hidden_size, text)
    model = moved(loaded.model, device, dtype)
    rows = ids.to(next(model.parameters()).device).split(max(1, BATCH_TOKENS // ids.shape[1]))
    batches = [(part[:, :-1], part[:, 1:]) if labelled else (part, None) for part in rows]
    loss = "cross-entropy" if loaded.causal else None
    return ProbeModel(model, batches, loaded.hidden, source, kind, loss, loaded.fresh)


def probe_batches(session: LoadedTextRun, own: Path | None) -> list[tuple[Tensor, Tensor]]:
    """The text that a run is read on: ten tokens for each channel, so that the bottom is not the sample's."""
    import torch

    from topograd.data.loader import IGNORED
    from topograd.data.masked import hide
    from topograd.geometry.inspection import ROWS_PER_CHANNEL
    from topograd.runs.session import heldout_text

    tokens = max(MIN_TOKENS, ROWS_PER_CHANNEL * session.config.model.width)
    text = heldout_text(session, own, limit_bytes=TOKEN_BYTES * max(tokens, session.config.model.context))
    batches = batches_of(text, next(session.stack.parameters()).device, tokens)
    if session.config.model.task != "masked":
        return batches
    draw = torch.Generator().manual_seed(0)
    return [hide(inputs, session.stack.vocab - 1, draw, targets != IGNORED) for inputs, targets in batches]


def image_batches(opened: LoadedRun, own: Path | None, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Held-out images of a run, or those of another folder."""
    from topograd.runs.session import heldout_images

    found = heldout_images(opened, own, MIN_TOKENS)
    return [
        (images.to(device), labels.to(device))
        for images, labels in zip(
            found.images.split(BATCH_TOKENS), found.labels.split(BATCH_TOKENS), strict=True
        )
    ]


def batches_of(text: Text, device: torch.device, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of LENGTH tokens at most, evenly spaced over a text, `tokens` in all and no padding."""
    import torch

    from topograd.data.loader import IGNORED

    sizes = (text.targets != IGNORED).sum(1).tolist()
    length = min(LENGTH, max(sizes))
    inputs, targets = (
        torch.cat([row[: n // length * length].view(-1, length) for row, n in zip(part, sizes, strict=True)])
        for part in (text.inputs, text.targets)
    )
    count = min(len(inputs), -(-tokens // length))
    chosen = torch.arange(count) * len(inputs) // count
    rows = max(1, BATCH_TOKENS // length)
    inputs, targets = inputs[chosen].to(device), targets[chosen].to(device)
    return list(zip(inputs.split(rows), targets.split(rows), strict=True))


def wanted_type(asked: str | None, parameters: int) -> torch.dtype:
    """The type that was asked for, or the default for a model of so many parameters."""
    import torch

    kind: torch.dtype = getattr(torch, asked or ("float32" if parameters > LARGE else "float64"))
    return kind


def moved(model: Any, device: str | None, dtype: str | None) -> Any:
    """The model in the type and on the device that were asked for, or one line that says why not."""
    from topograd.runs.device import usable_device

    where = None if device is None else usable_device(device)
    kind = wanted_type(dtype, sum(parameter.numel() for parameter in model.parameters()))
    try:
        found = model.to(device=where, dtype=kind)
        next(found.parameters()).double()  # directions are followed in float64
    except (RuntimeError, AssertionError, TypeError) as problem:
        reason = " ".join(str(problem).split())[:120]
        raise ConfigError(
            f"--device {device} cannot be used ({reason})", remedy="choose cpu or cuda"
        ) from None
    return found
