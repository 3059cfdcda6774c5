"""Example images for reports: right and wrong at each stage, and leaving at each exit.

Plain records, for reports. Chosen so that they say something: what a stage is surest of and wrong about, what
it gets right and the stage before it got wrong, and what leaves at an exit, the least sure first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topograd.data.images import ImageSet
from topograd.runs.session import LoadedRun, heldout_images
from topograd.training.image_evaluation import image_logits, leaving_stage

THRESHOLD = 0.9
"""The confidence at which an image leaves."""
MAX_IMAGES = 2000
"""Images that are looked through."""
SHOWN = 10
"""Images of each kind."""


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
