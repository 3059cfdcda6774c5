"""Trained models that studies change and read again: the reference model, and SmolLM2-135M where it is there.

A `Base` is a model as one module, inputs to logits, with text that it is read on in windows of equal length
without padding: some of the corpus's own training text to calibrate on, some of the held-out text to judge
by. Windows are spaced evenly over the text and depend on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.outcome import Asked
from papers.product_of_experts.specialist_facts import smollm2
from topograd.data import windows
from topograd.exec.forward import Predictor
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, load_data, open_session

Documents = Iterable[Sequence[int] | np.ndarray]
BYTES_PER_TOKEN = 16
"""More than a text has, so that enough windows are left once those with padding are dropped."""


@dataclass(frozen=True)
class Windows:
    """Rows of text: what goes in, what comes next, and the bytes of each row's targets."""

    inputs: Tensor
    targets: Tensor
    nbytes: Tensor

    def batches(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Some rows at a time."""
        return list(zip(self.inputs.split(rows), self.targets.split(rows), strict=True))


@dataclass(frozen=True)
class Base:
    """A model and its text."""

    name: str
    session: LoadedTextRun
    model: Predictor
    train: Windows
    heldout: Windows


def folders(args: Asked) -> dict[str, Path]:
    """The models that a study takes: at the preset small SmolLM2 too, where its wheel or its run is."""
    result = {"reference": REFERENCE}
    if args.preset != "tiny" and args.kept.file is not None:
        place = args.kept.file.parent / "specialists-work"
        place.mkdir(parents=True, exist_ok=True)
        if (folder := smollm2(place)) is not None:
            result["smollm2"] = folder
    return result


def open_base(name: str, folder: Path, length: int, train: int, heldout: int) -> Base:
    """A run with `train` and `heldout` windows of `length` tokens."""
    session = open_session(folder)
    _, prepared = load_data(session.config, session.tokenizer)
    model = Predictor(session.stack, session.plan).eval().requires_grad_(False)
    parts = (prepared.train, train), (prepared.heldout, heldout)
    return Base(name, session, model, *(cut(session, documents, length, rows) for documents, rows in parts))


def cut(session: LoadedTextRun, documents: Documents, length: int, rows: int) -> Windows:
    """So many full windows of documents in tokens, evenly spaced."""
    most = BYTES_PER_TOKEN * rows * length
    inputs, targets, _ = windows(documents, session.tokenizer, length, most)
    full = (targets != -100).all(1).nonzero()[:, 0]
    chosen = full[torch.linspace(0, len(full) - 1, min(rows, len(full))).long()]
    device = next(session.stack.parameters()).device
    lengths = torch.as_tensor(session.tokenizer.byte_lengths)
    nbytes = lengths[targets[chosen]].sum(1)
    return Windows(inputs[chosen].to(device), targets[chosen].to(device), nbytes)


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Windows, rows: int = 4) -> list[float]:
    """Of each window."""
    nats = []
    for inputs, targets in text.batches(rows):
        logits = model(inputs).float()
        nats.append(F.cross_entropy(logits.mT, targets, reduction="none").sum(1).double().cpu())
    result: list[float] = (torch.cat(nats) / (math.log(2) * text.nbytes)).tolist()
    return result
