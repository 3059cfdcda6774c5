"""Can a rate be read along a trajectory? The bottom of a hidden layer, moment by moment.

Statement. Between two linear maps with an activation between them, let h be the activations that enter the
second, and δ the gradients that reach the outputs of the first, for labels drawn from the model itself:

    u          the right singular vector of H of the least singular value;  t = σ_min(H) / σ_max(H)
    v          the same of the gradients' matrix
    G          mean (δ · u)² over that of all directions: projected sample by sample
    alignment  |⟨u, v⟩|: 1 where activations and gradients vanish in one direction

A rate is the slope of log G on log t over the trajectory (`geometry/rates.py`). The least alignment of all
moments goes with it, and below 0.99 there is none: G along a direction in which only H vanishes mixes
powers.

Shapes: H (n, h), δ (n, h). Cost: a forward and a backward pass, two SVDs.
Source: "Dead Directions: Geometric Singular Learning" §12 (the conditions); u, v and this t are our choice
for networks whose dead direction nobody has set by hand.
Limits. A unit that never fires makes t zero; moments at t = 0 are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from topograd.geometry.rates import Rate, fit_rate

FLOOR = 1e-12
"""Smaller t are rounding."""


@dataclass(frozen=True)
class Moment:
    """t, G along the activations' bottom, and the alignment of the two bottoms."""

    t: float
    G: float
    alignment: float


def read_moment(model: nn.Module, pair: tuple[str, str], inputs: Tensor) -> Moment:
    """What the layer between two maps says now, on some inputs, with the model's own labels."""
    first, second = (model.get_submodule(name) for name in pair)
    seen: dict[str, Tensor] = {}
    hooks = [
        first.register_forward_hook(lambda module, given, out: seen.__setitem__("z", out)),
        second.register_forward_hook(lambda module, given, out: seen.__setitem__("h", given[0])),
    ]
    try:
        with torch.enable_grad():
            logits = model(inputs).flatten(0, -2)
            generator = torch.Generator(logits.device).manual_seed(0)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
            (delta,) = torch.autograd.grad(
                nn.functional.cross_entropy(logits, drawn, reduction="sum"), seen["z"]
            )
    finally:
        for hook in hooks:
            hook.remove()
    return _moment(seen["h"].detach().flatten(0, -2), delta.flatten(0, -2))


def _moment(H: Tensor, delta: Tensor) -> Moment:
    H, delta = H.double(), delta.double()
    _, activations, right = torch.linalg.svd(H, full_matrices=False)
    u, v = right[-1], torch.linalg.svd(delta, full_matrices=False).Vh[-1]
    G = (delta @ u).square().mean() / delta.square().sum(1).mean()
    return Moment((activations[-1] / activations[0]).item(), G.item(), (u @ v).abs().clamp(max=1).item())


def readable(moments: Sequence[Moment]) -> Rate:
    """The rate over a trajectory, or why there is none."""
    held = {moment.t: moment for moment in moments if moment.t > FLOOR}
    alignment = min(moment.alignment for moment in moments)
    t, values = (list(held), [moment.G for moment in held.values()]) if held else ([1.0], [0.0])
    return fit_rate(t, values, estimator="Fisher, one draw of the labels", noise="noisy", alignment=alignment)
