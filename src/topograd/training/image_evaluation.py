"""Evaluation on images: accuracy, loss, calibration and early exits.

    accuracy   share of images whose largest logit is the label's: of the model (`Plan.prediction`), of
               each exit, of each stage alone, and of three ways of pooling
    loss       mean cross-entropy of the same, nats
    ECE, r_eff, U_k    as `training/evaluation.py` has them; r_eff of the features that a stage's head reads

`exit_curve` is early exit by confidence ("Product of Experts" §5.3): an image leaves at the first stage
whose largest probability reaches a threshold, else at the last; accuracy against the mean share of layers
that ran.

`examples` are images for reports: what a stage is surest of and wrong about, what it gets right and the stage
before it got wrong, and what leaves at an exit, the least sure first.

One pass in eval mode: BatchNorm uses its running means. Cost: one forward, K readouts.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.data.images import ImageSet
from topograd.exec.forward import Predictor, evaluating, stage_outputs
from topograd.nn.host_numbers import to_device
from topograd.nn.images.stack import ImageStack
from topograd.nn.pooling import pool
from topograd.nn.stack import Stack
from topograd.runs.session import LoadedRun, heldout_images
from topograd.topology.plan import Plan
from topograd.training.evaluation import (
    RANK_TOKENS,
    ByPrediction,
    ExitReadings,
    activation_rank,
    calibration_error,
    confidence_bins,
    pooled_logits,
    reliability,
)

BATCH = 500
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)
POOLINGS = ("sum", "mean", "shrinkage")
THRESHOLD = 0.9
"""The confidence at which an image leaves."""
MAX_IMAGES = 2000
"""Images that are looked through."""
SHOWN = 10
"""Images of each kind."""


@dataclass(frozen=True)
class Exits:
    """Accuracy and mean depth of leaving at a confidence; depth as a share of all layers."""

    threshold: float
    accuracy: float
    depth: float
    leaving: list[float]
    """The share of images that leaves at each exit."""


@dataclass(frozen=True)
class ImageEvaluation(ExitReadings):
    """What `evaluate_images` reads."""

    accuracy: ByPrediction
    loss: ByPrediction
    exits: list[Exits]
    images: int

    @property
    def logged(self) -> dict[str, Any]:
        """What the run's log keeps."""
        return {"accuracy": asdict(self.accuracy), "heldout_loss": asdict(self.loss)}

    @property
    def words(self) -> str:
        return f"accuracy {100 * self.accuracy.prediction:.2f} %"


@dataclass(frozen=True)
class ExitLogits:
    """Logits of every example: of each predicting stage alone, of each exit, and of the model."""

    alone: list[Tensor]
    exits: list[Tensor]
    full: Tensor
    features: list[Tensor]
    """Of the first examples, what each stage's head reads."""


@torch.no_grad()
def exit_logits(
    stack: Stack,
    plan: Plan,
    inputs: Tensor,
    batch: int,
    counted: Tensor | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> ExitLogits:
    """All logits of a plan in eval mode, for inputs (N, ...); with `counted` (N, time) of those positions."""
    stages, device = plan.predicting(), next(stack.parameters()).device
    leads = counted is None and plan.prediction.path is not None
    path = Predictor(stack, plan) if leads else None
    alone: dict[int, list[Tensor]] = {k: [] for k in stages}
    features: dict[int, list[Tensor]] = {k: [] for k in stages}
    full: list[Tensor] = []
    with evaluating(stack):
        for start in range(0, len(inputs), batch):
            some = to_device(inputs[start : start + batch], device)
            outputs = stage_outputs(stack, plan, some, stages)
            if counted is not None:
                places = to_device(counted[start : start + batch].flatten().nonzero()[:, 0], device)
                outputs = {k: h.flatten(0, 1)[places] for k, h in outputs.items()}
            for k in stages:
                alone[k].append(stack.readout(outputs[k], plan.stages[k].head).float().cpu())
                if start < RANK_TOKENS and isinstance(stack, ImageStack):
                    features[k].append(stack.features(outputs[k]).cpu())
                elif counted is not None and sum(map(len, features[k])) < RANK_TOKENS:
                    features[k].append(outputs[k].cpu())
            if path is not None:
                full.append(path(some).float().cpu())
            if on_batch is not None:
                on_batch(min(start + batch, len(inputs)), len(inputs))
    z = {k: torch.cat(parts) for k, parts in alone.items()}
    exits = [pooled_logits(z, plan.prediction.after(k)) for k in stages]
    whole = torch.cat(full) if path is not None else pooled_logits(z, plan.prediction.full)
    return ExitLogits(list(z.values()), exits, whole, [torch.cat(f) for f in features.values() if f])


def image_logits(
    stack: Stack, plan: Plan, images: Tensor, on_batch: Callable[[int, int], None] | None = None
) -> ExitLogits:
    """All logits of a plan for images (N, channels, height, width)."""
    return exit_logits(stack, plan, images, BATCH, on_batch=on_batch)


def evaluate_images(
    stack: Stack, plan: Plan, data: ImageSet, on_batch: Callable[[int, int], None] | None = None
) -> ImageEvaluation:
    """Every reading of this module. `on_batch` is called with the images that are done, and of how many."""
    logits, labels = image_logits(stack, plan, data.images, on_batch), data.labels
    curve = exit_curve(plan, logits.exits, labels)
    return ImageEvaluation(**readings(logits, labels), exits=curve, images=len(data))


def readings(logits: ExitLogits, labels: Tensor) -> dict[str, Any]:
    """What can be read of the logits of any classification, by the names of `ImageEvaluation`."""
    running = [_loss(pool(logits.alone[: k + 1], "sum"), labels) for k in range(len(logits.alone))]
    bins = [confidence_bins(z, labels) for z in logits.exits]
    return {
        "accuracy": _by_prediction(logits, labels, accuracy),
        "loss": _by_prediction(logits, labels, _loss),
        "ece": [calibration_error(table) for table in bins],
        "reliability": [reliability(table) for table in bins],
        "effective_rank": [activation_rank(f[:RANK_TOKENS]) for f in logits.features],
        "usefulness": [None, *(before - after for before, after in itertools.pairwise(running))],
    }


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of rows whose largest logit is the label's."""
    return (logits.argmax(-1) == labels).double().mean().item()


def exit_curve(
    plan: Plan, exits: Sequence[Tensor], labels: Tensor, thresholds: Sequence[float] = THRESHOLDS
) -> list[Exits]:
    """Early exit at each threshold of confidence; nothing for a single exit."""
    if len(exits) < 2:
        return []
    depths = _depths(plan)
    confidences = torch.stack([z.softmax(-1).amax(-1) for z in exits])
    right = torch.stack([z.argmax(-1) == labels for z in exits]).double()
    curve = []
    for threshold in thresholds:
        leaves = leaving_stage(confidences, threshold)
        share = torch.stack([(leaves == k).double().mean() for k in range(len(exits))])
        hits = right.gather(0, leaves.unsqueeze(0)).mean().item()
        curve.append(Exits(threshold, hits, (share * depths).sum().item(), share.tolist()))
    return curve


def leaving_stage(confidences: Tensor, threshold: float) -> Tensor:
    """The exit (N,) at which each image leaves, from the confidences (exits, N)."""
    sure = confidences >= threshold
    sure[-1] = True
    return sure.double().argmax(0)


def _depths(plan: Plan) -> Tensor:
    """The share of all layers that have run at each exit."""
    total = sum(len(p.layers) for p in plan.stages)
    shares = []
    for k in plan.predicting():
        run = {needed.index for stage, _ in plan.prediction.after(k) for needed in plan.needed(stage)}
        shares.append(sum(len(plan.stages[i].layers) for i in run) / total)
    return torch.tensor(shares, dtype=torch.float64)


def _by_prediction(
    logits: ExitLogits, labels: Tensor, measure: Callable[[Tensor, Tensor], float]
) -> ByPrediction:
    stages = [measure(z, labels) for z in logits.alone]
    pooled = {how: measure(pool(logits.alone, how), labels) for how in POOLINGS}
    return ByPrediction(
        prediction=measure(logits.full, labels),
        prefix=[measure(z, labels) for z in logits.exits],
        stages=stages,
        last=stages[-1],
        **pooled,
    )


def _loss(logits: Tensor, labels: Tensor) -> float:
    return F.cross_entropy(logits.double(), labels).item()


def examples(opened: LoadedRun, threshold: float = THRESHOLD, most: int = MAX_IMAGES) -> dict[str, Any]:
    """For each exit: images that it gets right, that it gets wrong, and that leave there at `threshold`."""
    data = heldout_images(opened, most=most)
    exits = image_logits(opened.stack, opened.plan, data.images).exits
    confidence = torch.stack([z.softmax(-1).amax(-1) for z in exits])
    guess = torch.stack([z.argmax(-1) for z in exits])
    right = guess == data.labels
    leaves = leaving_stage(confidence.clone(), threshold)
    stages = []
    for k in range(len(exits)):
        corrected = right[k] & ~right[k - 1] if k else right[k]
        kinds = {
            "right": _order(corrected if corrected.any() else right[k], confidence[k]),
            "wrong": _order(~right[k], -confidence[k]),
            "leaving": _order(leaves == k, confidence[k]),
        }
        shown = {name: _records(data, rows, guess[k], confidence[k]) for name, rows in kinds.items()}
        leaving = leaves == k
        stages.append(
            {
                **shown,
                "corrected": bool(k and corrected.any()),
                "accuracy": right[k].double().mean().item(),
                "share": leaving.double().mean().item(),
                "accuracy_of_leaving": right[k][leaving].double().mean().item() if leaving.any() else None,
            }
        )
    return {"threshold": threshold, "looked_through": len(data), "stages": stages}


def _order(chosen: Tensor, by: Tensor) -> Tensor:
    """The rows that are chosen, smallest first."""
    rows = chosen.nonzero().flatten()
    return rows[by[rows].argsort()][:SHOWN]


def _records(data: ImageSet, rows: Tensor, guess: Tensor, confidence: Tensor) -> list[dict[str, Any]]:
    return [
        {
            "pixels": data.images[i].tolist(),
            "label": int(data.labels[i]),
            "guess": int(guess[i]),
            "confidence": float(confidence[i]),
        }
        for i in rows.tolist()
    ]
