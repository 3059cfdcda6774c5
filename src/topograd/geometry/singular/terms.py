"""Loss terms and sampled weights of Langevin chains."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topograd.errors import GeometryError
from topograd.geometry.host_copy import check_finite
from topograd.geometry.losses import IGNORED, OwnLoss

Weights = dict[str, Tensor]


def per_term(loss: str | OwnLoss) -> OwnLoss:
    """The function from outputs and targets to the loss of each term."""
    if loss == "cross-entropy":
        return _CrossEntropy()
    if loss == "squared-error":
        return lambda f, y: (f - y).square().flatten(1).sum(-1) / 2
    if isinstance(loss, str):
        raise GeometryError(setting="loss", given=loss, allowed="cross-entropy, squared-error, or a function")
    if not callable(loss):
        raise GeometryError(setting="loss", given=loss, allowed="a name or a function")
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


def sampled_weights(model: nn.Module, names: str | Sequence[str] | None) -> Weights:
    """Copies of the weights of these names, or below these modules; of all that learn where there is None."""
    names = (names,) if isinstance(names, str) else names
    weights = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if (p.requires_grad if names is None else any(name == a or name.startswith(f"{a}.") for a in names))
    }
    if not weights:
        known = ", ".join(list(dict(model.named_parameters()))[:4])
        what = "requires a gradient" if names is None else f"is named {', '.join(names)}"
        raise GeometryError(
            f"no parameter {what}", setting="weights", given=names, remedy=f"the model has {known}, ..."
        )
    for name, weight in weights.items():
        if weight.dtype in (torch.bfloat16, torch.float16):
            kind = str(weight.dtype).removeprefix("torch.")
            raise GeometryError(
                f"parameter {name} is {kind}, which rounds a step of a chain away",
                setting="model",
                given=kind,
                remedy="call model.float() first",
            )
    check_finite(weights)
    return weights
