"""A model of any kind with text to read it on: what commands on the loss of a model begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.cli.console import note
from topograd.cli.inspect import BATCH_TOKENS, moved, probe_batches, wanted_type
from topograd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


@dataclass(frozen=True)
class ProbeModel:
    """A model, batches (inputs, targets) of text, and how its logits are had."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    outputs: Callable[[Any, Any], Tensor]
    text: str
    """Where it comes from."""


def open_probe(model: Path, text: Path | None, device: str | None, dtype: str | None) -> ProbeModel:
    """A run, or whatever else MODEL may be; a Hugging Face folder needs no conversion."""
    from topograd.convert.huggingface import local_model
    from topograd.convert.model_argument import resolve_model

    folder = local_model(model)
    if is_hugging_face(folder):
        return hugging_face_probe(folder, text, device, dtype)
    return _run_probe(resolve_model(folder), text, device, dtype)


def is_hugging_face(folder: Path) -> bool:
    """Whether transformers reads it."""
    return (folder / "config.json").is_file() and not (folder / "config.toml").is_file()


def _run_probe(folder: Path, text: Path | None, device: str | None, dtype: str | None) -> ProbeModel:
    from topograd.exec.forward import stage_logits
    from topograd.runs.session import open_session

    session = open_session(folder)
    stack = moved(session.stack, device, dtype)
    plan, last = session.plan, session.plan.predicting()[-1]

    def outputs(model: Any, inputs: Tensor) -> Tensor:
        return stage_logits(model, plan, last, inputs)

    source = "the run's held-out text" if text is None else str(text)
    return ProbeModel(stack, probe_batches(session, text), outputs, source)


def hugging_face_probe(folder: Path, text: Path | None, device: str | None, dtype: str | None) -> ProbeModel:
    """A causal language model; every token is predicted from those before it."""
    from topograd.convert import huggingface

    loaded = huggingface.load(folder, wanted_type(dtype, huggingface.stored_parameters(folder)))
    if not loaded.causal:
        kind = loaded.config.model_type
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
    ids = ids.to(next(model.parameters()).device)
    rows = max(1, BATCH_TOKENS // ids.shape[1])
    batches = [(part[:, :-1], part[:, 1:]) for part in ids.split(rows)]
    return ProbeModel(model, batches, loaded.hidden, source)
