"""Evaluation of a masked encoder: the cross-entropy of hidden tokens, calibration, rank and usefulness.

    masked CE     mean nats of the hidden tokens: of the model (`Plan.prediction`), of each exit, of each
                  stage alone, and of three ways of pooling
    accuracy, ECE, r_eff, U_k      as `training/image_evaluation.py` has them, a hidden token for an image

The hidden places of a text are always the same (`data/masked.py`). Bits per byte are not read: a text is not
coded by predicting some of its tokens from all others. Cost: one forward, K readouts at hidden places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from topograd.data.loader import IGNORED
from topograd.data.masked import hide
from topograd.data.windows import Text
from topograd.exec.forward import stage_outputs
from topograd.nn.host_numbers import to_device
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan
from topograd.training.evaluation import pooled_logits
from topograd.training.image_evaluation import ByPrediction, ImageLogits, readings

BATCH = 16


@dataclass(frozen=True)
class MaskedEvaluation:
    """What `evaluate_masked` reads. Lists have an entry for each exit."""

    masked_ce: ByPrediction
    """Nats of a hidden token."""
    accuracy: ByPrediction
    ece: list[float]
    reliability: list[dict[str, list[float | None]]]
    effective_rank: list[float]
    usefulness: list[float | None]
    hidden: int
    """Hidden tokens that were predicted."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, as `--json` prints them and a run keeps them."""
        return asdict(self)

    @property
    def logged(self) -> dict[str, Any]:
        """What the run's log keeps."""
        return {"masked_ce": asdict(self.masked_ce), "accuracy": asdict(self.accuracy)}

    @property
    def words(self) -> str:
        return f"masked CE {self.masked_ce.prediction:.3f}"


def hidden_sample(stack: Stack, text: Text) -> tuple[Tensor, Tensor]:
    """Inputs of a text with hidden tokens, the same at every call, and these as targets."""
    draw = torch.Generator().manual_seed(0)
    return hide(text.inputs, stack.vocab - 1, draw, text.targets != IGNORED)


@torch.no_grad()
def evaluate_masked(
    stack: Stack, plan: Plan, text: Text, on_batch: Callable[[int, int], None] | None = None
) -> MaskedEvaluation:
    """Every reading of this module. `on_batch` is called with the rows that are done, and of how many."""
    inputs, targets = hidden_sample(stack, text)
    stages, device = plan.predicting(), next(stack.parameters()).device
    alone: dict[int, list[Tensor]] = {k: [] for k in stages}
    states: dict[int, list[Tensor]] = {k: [] for k in stages}
    was_training = stack.training
    stack.eval()
    for start in range(0, len(inputs), BATCH):
        rows = slice(start, start + BATCH)
        counted = to_device((targets[rows].flatten() != IGNORED).nonzero()[:, 0], device)
        outputs = stage_outputs(stack, plan, to_device(inputs[rows], device), stages)
        for k in stages:
            states[k].append(h := outputs[k].flatten(0, 1)[counted])
            alone[k].append(stack.readout(h, plan.stages[k].head).float().cpu())
        if on_batch is not None:
            on_batch(min(start + BATCH, len(inputs)), len(inputs))
    stack.train(was_training)
    z = {k: torch.cat(parts) for k, parts in alone.items()}
    exits = [pooled_logits(z, plan.prediction.after(k)) for k in stages]
    features = [torch.cat(parts).cpu() for parts in states.values()]
    logits = ImageLogits(list(z.values()), exits, pooled_logits(z, plan.prediction.full), features)
    labels = targets[targets != IGNORED]
    found = readings(logits, labels)
    return MaskedEvaluation(masked_ce=found.pop("loss"), hidden=len(labels), **found)
