"""Loss terms, batches and weights of a sampler: what is asked of a model before chains run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch
from topograd.geometry.losses import IGNORED, OwnLoss
from topograd.geometry.reads import first_not_finite

Weights = dict[str, Tensor]


def per_term(loss: str | OwnLoss) -> OwnLoss:
    if loss == "cross-entropy":
        return _CrossEntropy()
    if loss == "squared-error":
        return lambda f, y: (f - y).square().flatten(1).sum(-1) / 2
    if isinstance(loss, str):
        raise GeometryError(setting="loss", given=loss, allowed="cross-entropy, squared-error, or a function")
    if not callable(loss):
        raise GeometryError(f"a loss of type {type(loss).__name__}: give a name or a function")
    return loss


class _CrossEntropy:
    """Of each term, classes last; targets of -100 are none. Which are terms is asked once for each batch."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if id(targets) not in self._counted:  # the targets are kept, so that the id stays theirs
            self._counted[id(targets)] = targets, (targets.flatten() != IGNORED).nonzero()[:, 0]
        _, counted = self._counted[id(targets)]
        flat = outputs.flatten(0, -2)[counted]
        labels = targets.flatten()[counted]
        flat = flat.float() if flat.dtype == torch.bfloat16 else flat
        return F.cross_entropy(flat, labels, reduction="none")


def each_batch(batches: Any) -> Iterable[Batch]:
    pair = (
        isinstance(batches, tuple | list) and len(batches) == 2 and not isinstance(batches[0], tuple | list)
    )
    for batch in [batches] if pair else batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise GeometryError(f"a batch of type {type(batch).__name__}: give pairs (inputs, targets)")
        yield batch[0], batch[1]


def rows_of(batch: Batch) -> int:
    return len(batch[1]) if batch[1] is not None else 0


def sampled_weights(model: nn.Module, chosen: str | Sequence[str] | None) -> Weights:
    """The weights to sample, or why there are none."""
    asked = (chosen,) if isinstance(chosen, str) else chosen
    found = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if (p.requires_grad if asked is None else any(name == a or name.startswith(f"{a}.") for a in asked))
    }
    if not found:
        known = ", ".join(list(dict(model.named_parameters()))[:4])
        what = "requires a gradient" if asked is None else f"is named {', '.join(asked or ())}"
        raise GeometryError(f"no parameter {what}: there is nothing to sample (there are {known}, ...)")
    for name, weight in found.items():
        if weight.dtype in (torch.bfloat16, torch.float16):
            raise GeometryError(
                f"parameter {name} is {str(weight.dtype).removeprefix('torch.')}, which rounds a "
                "step of a chain away",
                remedy="call model.float() first",
            )
    bad = first_not_finite(found)
    if bad is not None:
        raise GeometryError(f"parameter {bad} has values that are not finite: give a trained model")
    return found


def refuse_random(model: nn.Module) -> None:
    for name, module in model.named_modules():
        random = (isinstance(module, nn.Dropout) and module.p > 0) or isinstance(
            module, nn.modules.batchnorm._BatchNorm
        )
        if random and module.training:
            raise GeometryError(
                f"{name} is a {type(module).__name__} in training mode", remedy="call model.eval() first"
            )
