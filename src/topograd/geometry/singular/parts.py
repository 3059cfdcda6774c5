"""Learning coefficients of a network's parts: layers, and heads by masks.

Statement. A part is some parameters, and of these the entries that it owns. A layer owns all parameters below
it. Head h of H, in an attention with projections q, k, v (rows by head) and o (columns by head), owns

    rows h of q, columns h of o, rows h of k and v; where heads share keys and values, the rows of its group.

`part_coefficients` samples them one after the other, with one localisation γ for all, so that they compare.
The flattest directions relax at the rate εγ, and ε is bounded by the sharpest: γ is the smallest with which
they arrive within the burn-in, εγ · burn-in = `ARRIVED`, at the sharpest part. A direction with a curvature
nβH below γ counts less than one half: ½ nβH / (nβH + γ). With more burn-in γ is smaller.

Symbols and shapes. A mask has the shape of its parameter, 1 where the part owns the entry.
Cost: that of `learning_coefficient` for each part; the step is searched once.
Source: Wang, Hoogland, van Wingerden, Furman and Murfet, "Differentiation and Specialization of Attention
Heads via the Refined Local Learning Coefficient".
Limits. Heads are those that `heads.py` finds. Keys and values that several heads share are counted in each of
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from topograd.errors import DivergenceError, GeometryError
from topograd.geometry.factors import Batch, Outputs
from topograd.geometry.heads import Head, find_heads, is_transposed
from topograd.geometry.losses import OwnLoss
from topograd.geometry.monitors.stream import find_layers
from topograd.geometry.singular.coefficient import LearningCoefficient, default_n_beta, sample
from topograd.geometry.singular.langevin import LARGEST_BIAS, Langevin, OnStep, Target, bearable_step
from topograd.geometry.singular.terms import sampled_weights

ARRIVED = 3.0
MOST_PULL = 0.9
"""Of the curvature with γ that is γ, at most."""


@dataclass(frozen=True)
class Part:
    """Some weights of a model."""

    name: str
    weights: tuple[str, ...]
    """Parameters, or modules whose parameters are meant."""
    masks: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PartCoefficient:
    """λ̂ of one part; without a value where its chains diverge."""

    name: str
    found: LearningCoefficient | None
    localization: float
    reason: str | None
    """Why it is not calibrated."""


def part_coefficients(
    model: nn.Module,
    loss: str | OwnLoss,
    batches: Sequence[Batch],
    parts: Sequence[Part],
    settings: Langevin,
    *,
    outputs: Outputs | None = None,
    on_step: OnStep | None = None,
) -> Iterator[PartCoefficient]:
    """λ̂ of every part, one after the other, with the same γ, which is at least that of the settings."""
    target = Target(model, loss, list(batches), outputs)
    n_beta = default_n_beta(target.terms)
    curvatures = []
    for part in parts:
        center = sampled_weights(model, part.weights)
        step = bearable_step(target.within(part.masks), center, n_beta, settings, 0)
        curvatures.append(4 * LARGEST_BIAS / step)
    pull = max(settings.localization, shared_localization(max(curvatures), settings.burn_in))
    for place, (part, curvature) in enumerate(zip(parts, curvatures, strict=True)):
        step = 4 * LARGEST_BIAS / (curvature - settings.localization + pull)
        chosen = replace(settings, step=step, localization=pull)
        center = sampled_weights(model, part.weights)

        def on_more(done: int, total: int, place: int = place) -> None:
            if on_step is not None:
                on_step(place * total + done, len(parts) * total)

        try:
            found = sample(target, center, chosen, masks=part.masks, on_step=on_more)
            yield PartCoefficient(part.name, found, pull, found.reason)
        except DivergenceError as problem:
            yield PartCoefficient(part.name, None, pull, str(problem))


def shared_localization(curvature: float, burn_in: int) -> float:
    """γ with which flat directions arrive within the burn-in beside one of this curvature, γ included.

    >>> shared_localization(100.0, 150), shared_localization(100.0, 15000) < 0.2
    (11.11111111111111, True)
    """
    share = min(ARRIVED / (4 * LARGEST_BIAS * max(burn_in, 1)), MOST_PULL)
    return curvature * share / (1 - share)


def layer_parts(model: nn.Module, count: int | None = None) -> list[Part]:
    """The layers of the main list; of more than `count` of them so many, evenly spaced, the ends included."""
    names = [name for name, layer in find_layers(model).items() if any(True for _ in layer.parameters())]
    if count is not None and count < 1:
        raise GeometryError(setting="layers", given=count, allowed="at least 1")
    if count is not None and count < len(names):
        last = len(names) - 1
        names = [names[round(i * last / max(count - 1, 1))] for i in range(count)]
    return [Part(name, (name,)) for name in names]


def head_parts(model: nn.Module, layer: str) -> list[Part]:
    """The heads below a layer, in order; GeometryError where none can be told apart."""
    found = [_head_part(model, head) for head in find_heads(model, layer)]
    if not found:
        raise GeometryError(
            f"{layer} has no heads that can be told apart",
            setting="heads",
            given=layer,
            allowed="an attention with maps of known names (geometry/heads.py) and a head's width",
            remedy="leave out --heads",
        )
    return found


def _head_part(model: nn.Module, head: Head) -> Part:
    masks = {}
    for side, places in ((0, head.rows), (1, head.columns)):
        for path, channels in places.items():
            module = model.get_submodule(path)
            for kind, parameter in module.named_parameters(recurse=False):
                if side and parameter.dim() == 1:
                    continue  # the bias of the outputs is no head's
                mask = torch.zeros_like(parameter.detach())
                axis = 0 if parameter.dim() == 1 else side ^ is_transposed(module)
                masks[f"{path}.{kind}"] = mask.index_fill_(axis, channels.to(mask.device), 1)
    return Part(head.name, tuple(masks), masks)
