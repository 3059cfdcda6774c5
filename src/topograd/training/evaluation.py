"""Reading a trained model on text: how well each stage predicts, and how.

    BPB       total nats of the targets / (ln 2 · bytes that they decode to), for each stage and pooling
    ECE       Σ_b (n_b / N) |accuracy_b - confidence_b| over 15 equal bins of the largest probability
    r_eff     exp(-Σ σ̂ log σ̂), σ̂ the normalised singular values of a stage's last hidden states
              (tokens × width)                            "Stage-Partitioned Learning" eq. 23
    U_k       CE(A_{k-1}, y) - CE(A_{k-1} + z_k, y), A the running sum of logits         eq. 35

One pass; logits are made by the chunk, for all stages side by side. Cost: one forward, K readouts.
Limits: the effective rank comes from the first `RANK_TOKENS` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.effective_rank import effective_rank
from topograd.nn.pooling import pool
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan
from topograd.training.forward import stage_outputs
from topograd.training.linear_cross_entropy import chunk_tokens

BINS = 15
RANK_TOKENS = 2048


@dataclass(frozen=True)
class Text:
    """Held-out text as rows: targets of -100 do not count, the others decode to `nbytes` bytes."""

    inputs: Tensor
    targets: Tensor
    nbytes: int


class _Tally:
    """Sums over tokens, in float64."""

    def __init__(self, stages: int) -> None:
        self.nats = torch.zeros(stages, dtype=torch.float64)
        self.running = torch.zeros(stages, dtype=torch.float64)
        self.pooled = dict.fromkeys(("mean", "shrinkage"), 0.0)
        self.bins = torch.zeros(stages, BINS, 3, dtype=torch.float64)  # count, confidence, accuracy
        self.tokens = 0

    def add(self, logits: list[Tensor], targets: Tensor) -> None:
        total = torch.zeros_like(logits[0])
        for k, z in enumerate(logits):
            total = total + z
            self.nats[k] += _nats(z, targets)
            self.running[k] += _nats(total, targets)
            self.bins[k] += _bins(z, targets)
        for how in self.pooled:
            self.pooled[how] += _nats(pool(logits, how), targets)
        self.tokens += len(targets)


@torch.no_grad()
def evaluate(stack: Stack, plan: Plan, text: Text, batch: int = 16) -> dict[str, Any]:
    """Every reading of this module, as plain numbers."""
    stages = plan.predicting()
    tally = _Tally(len(stages))
    hidden: list[list[Tensor]] = [[] for _ in stages]
    device = next(stack.parameters()).device
    was_training = stack.training
    stack.eval()
    for start in range(0, len(text.inputs), batch):
        inputs = text.inputs[start : start + batch].to(device)
        targets = text.targets[start : start + batch].to(device).flatten()
        counted = targets != -100
        outputs = stage_outputs(stack, plan, inputs, stages)
        flat = [outputs[k].flatten(0, 1)[counted] for k in stages]
        for kept, h in zip(hidden, flat, strict=True):
            if sum(map(len, kept)) < RANK_TOKENS:
                kept.append(h)
        _tally_chunks(stack, stages, flat, targets[counted], tally)
    stack.train(was_training)
    return _readings(tally, hidden, text.nbytes)


def _tally_chunks(
    stack: Stack, stages: list[int], hidden: list[Tensor], targets: Tensor, tally: _Tally
) -> None:
    if not len(targets):
        return
    vocab = stack.readout(hidden[0][:1], stages[0]).shape[-1]
    size = max(chunk_tokens(vocab) // len(stages), 1)
    for start in range(0, len(targets), size):
        rows = slice(start, start + size)
        logits = [stack.readout(h[rows], k).float() for h, k in zip(hidden, stages, strict=True)]
        tally.add(logits, targets[rows])


def _readings(tally: _Tally, hidden: list[list[Tensor]], nbytes: int) -> dict[str, Any]:
    to_bpb = 1 / (math.log(2) * max(nbytes, 1))
    tokens = max(tally.tokens, 1)
    useful = [None, *((tally.running[:-1] - tally.running[1:]) / tokens).tolist()]
    prefix = (tally.nats * to_bpb).tolist()
    return {
        "bpb": {
            "last": prefix[-1],
            "sum": tally.running[-1].item() * to_bpb,
            **{how: nats * to_bpb for how, nats in tally.pooled.items()},
            "prefix": prefix,
        },
        "ece": [calibration_error(bins) for bins in tally.bins],
        "reliability": [_reliability(bins) for bins in tally.bins],
        "effective_rank": [activation_rank(torch.cat(kept)[:RANK_TOKENS]) for kept in hidden],
        "usefulness": useful,
        "tokens": tally.tokens,
        "bytes": nbytes,
    }


def _nats(logits: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(logits, targets, reduction="sum").double().item()


def _bins(logits: Tensor, targets: Tensor) -> Tensor:
    """(BINS, 3): tokens, summed confidence and summed hits in each bin of the largest probability."""
    confidence, guess = logits.softmax(-1).max(-1)
    where = (confidence * BINS).long().clamp(max=BINS - 1)
    rows = torch.stack((torch.ones_like(confidence), confidence, (guess == targets).to(confidence)), dim=1)
    sums = torch.zeros(BINS, 3, dtype=torch.float64, device=logits.device)
    return sums.index_add_(0, where, rows.double()).cpu()


def calibration_error(bins: Tensor) -> float:
    """ECE of a (bins, 3) table of counts, summed confidences and summed hits."""
    return ((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum().clamp(min=1)).item()


def _reliability(bins: Tensor) -> dict[str, list[float | None]]:
    """Mean confidence and accuracy of each bin; None where a bin is empty."""
    table: dict[str, list[float | None]] = {"confidence": [], "accuracy": [], "count": []}
    for count, confidence, hits in bins.tolist():
        table["confidence"].append(confidence / count if count else None)
        table["accuracy"].append(hits / count if count else None)
        table["count"].append(int(count))
    return table


def activation_rank(activations: Tensor) -> float:
    """The effective rank of activations (tokens, width), from their singular values."""
    return effective_rank(torch.linalg.svdvals(activations.double())).item()
