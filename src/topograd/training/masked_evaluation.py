"""Evaluation of a masked encoder: the cross-entropy of hidden tokens, calibration, rank and usefulness.

    masked CE     mean nats of the hidden tokens: of the model (`Plan.prediction`), of each exit, of each
                  stage alone, and of three ways of pooling
    accuracy, ECE, r_eff, U_k      as `training/image_evaluation.py` has them, a hidden token for an image

The hidden places of a text are always the same (`data/masked.py`). Bits per byte are not read: a text is not
coded by predicting some of its tokens from all others. Cost: one forward, K readouts at hidden places.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from topograd.data.loader import IGNORED
from topograd.data.masked import hide
from topograd.data.windows import Text
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan
from topograd.training.evaluation import ByPrediction, ExitReadings
from topograd.training.image_evaluation import exit_logits, readings

BATCH = 16


@dataclass(frozen=True)
class MaskedEvaluation(ExitReadings):
    """What `evaluate_masked` reads."""

    masked_ce: ByPrediction
    """Nats of a hidden token."""
    accuracy: ByPrediction
    hidden: int
    """Hidden tokens that were predicted."""

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


def evaluate_masked(
    stack: Stack, plan: Plan, text: Text, on_batch: Callable[[int, int], None] | None = None
) -> MaskedEvaluation:
    """Every reading of this module. `on_batch` is called with the rows that are done, and of how many."""
    inputs, targets = hidden_sample(stack, text)
    hidden = targets != IGNORED
    found = readings(exit_logits(stack, plan, inputs, BATCH, hidden, on_batch), targets[hidden])
    return MaskedEvaluation(masked_ce=found.pop("loss"), hidden=int(hidden.sum()), **found)
