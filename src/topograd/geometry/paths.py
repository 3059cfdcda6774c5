"""Paths in a network's parameters, and the KL order that is read along one.

Statement. On w(t) = w₀ + t v with |v| = 1, for a network f whose outputs are the mean of a Gaussian (squared
error, unit noise) or the logits of a categorical distribution p (cross entropy),

    vᵀF v = E_x[(J v)ᵀ Σ (J v)],     Σ = I  or  diag(p) - p pᵀ, so that (J v)ᵀ Σ (J v) = Var_p(J v)
    K(t)  = E_x KL(p_{w₀} ‖ p_{w(t)}) = ½ E_x |f_t - f_0|²  or  E_x Σ_c p_c (e^{d_c} - 1 - d_c),

with J = ∂f/∂w at w(t) and d the change of the log-probabilities. If K = c t^{2k} + … with k > 1, v is a dead
direction of order k, and vᵀF v ~ t^{2k-2}, F t² / K → 2k².

Symbols and shapes. v: a tensor for some of the parameters, by name, zero elsewhere. J v: (samples, outputs),
by forward-mode differentiation. Every term is a square of one sample: nothing cancels, and vᵀF v keeps its
relative precision down to about 1e-30. Cost: five forward passes or so for each t.
Source: "Dead Directions: Geometric Singular Learning", Definition 1 and Theorem 2; §12.1 for reading the
order outward from one checkpoint, with no descent captured.
Limits. Runs in float64, on copies. K is a difference of outputs: it is rounding below 1e-30 of their square.
Attention runs with torch's plain kernel, the only one with a forward-mode derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from topograd.errors import GeometryError
from topograd.geometry.families.quadrature import excess_exp
from topograd.geometry.rates import Rate, fit_rate, log_grid

Likelihood = Literal["squared-error", "cross-entropy"]
VANISHES = 0.5
"""A directional Fisher with a smaller slope does not vanish."""
WINDOW = (1e-3, 3e-2)


@dataclass(frozen=True)
class Path:
    """w(t) = w₀ + t v, in float64."""

    start: Mapping[str, Tensor]
    direction: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, direction: Mapping[str, Tensor]) -> Path:
        """The line from the model's own weights along `direction`, which is scaled to length 1."""
        weights = dict(model.named_parameters())
        for name, part in direction.items():
            if name not in weights:
                raise GeometryError(f"the direction names {name!r}; the model has {', '.join(weights)}")
            if part.shape != weights[name].shape:
                given, wanted = tuple(part.shape), tuple(weights[name].shape)
                raise GeometryError(
                    f"the direction of {name!r} has shape {given}; the parameter has {wanted}"
                )
        for name, weight in weights.items():
            if not torch.isfinite(weight).all():
                raise GeometryError(f"{name!r} holds a number that is not finite; nothing can be read of it")
        v = {name: part.detach().to(weights[name].device, torch.float64) for name, part in direction.items()}
        length = sum(part.square().sum().item() for part in v.values()) ** 0.5
        if length == 0:
            raise GeometryError("the direction is zero; give a tensor for at least one parameter")
        state = {**weights, **dict(model.named_buffers())}
        start = {name: _double(value.detach()) for name, value in state.items()}
        return cls(start, {name: part / length for name, part in v.items()})

    def at(self, t: float) -> dict[str, Tensor]:
        """Parameters and buffers at t."""
        return {**self.start, **{name: self.start[name] + t * v for name, v in self.direction.items()}}


@dataclass(frozen=True)
class OrderReading:
    """The order of a dead direction, with what it was read from."""

    order: int
    fisher: Rate
    divergence: Rate
    leading_ratio: float
    """F t² / K at the smallest t: 2 k² in the limit."""


def read_order(
    model: nn.Module,
    path: Path,
    inputs: Tensor,
    likelihood: Likelihood = "squared-error",
    grid: Tensor | None = None,
) -> OrderReading:
    """The KL order k of a path out of the model's weights; refused where Fisher and KL disagree about it."""
    grid = log_grid(*WINDOW) if grid is None else grid
    fisher = [directional_fisher(model, path, t, inputs, likelihood) for t in grid.tolist()]
    divergence = [divergence_from_start(model, path, t, inputs, likelihood) for t in grid.tolist()]
    if max(divergence) == 0:
        raise GeometryError(
            "the function does not change along this path: it follows a symmetry, not a singularity"
        )
    f = fit_rate(grid, fisher, estimator="directional Fisher")
    k = fit_rate(grid, divergence, estimator="KL divergence")
    if f.slope is not None and f.slope < VANISHES:
        raise GeometryError(
            f"the Fisher along this path does not vanish (slope {f.slope:.2f}): it does not approach a "
            "singularity; choose a direction that is dead at its start"
        )
    if f.slope is None or k.slope is None or round(f.order) != round(k.slope / 2):
        raise GeometryError(f"no order can be read along this path: Fisher {f}; KL {k}")
    smallest = int(grid.argmin())
    ratio = fisher[smallest] * float(grid[smallest]) ** 2 / divergence[smallest]
    return OrderReading(round(f.order), f, k, ratio)


def directional_fisher(
    model: nn.Module, path: Path, t: float, inputs: Tensor, likelihood: Likelihood = "squared-error"
) -> float:
    """vᵀF(w(t)) v, averaged over the inputs (and over positions, if the outputs have them)."""
    weights = path.at(t)
    moving = {name: weights[name] for name in path.direction}
    fixed = {name: value for name, value in weights.items() if name not in moving}

    def outputs(moved: dict[str, Tensor]) -> Tensor:
        return _outputs(model, {**fixed, **moved}, inputs)

    with sdpa_kernel(SDPBackend.MATH):
        values, change = jvp(outputs, (moving,), (dict(path.direction),))[:2]
    change = change.flatten(0, -2)
    if likelihood == "squared-error":
        return change.square().sum(-1).mean().item()
    p = values.flatten(0, -2).softmax(-1)
    centred = change - (p * change).sum(-1, keepdim=True)
    return (p * centred.square()).sum(-1).mean().item()


@torch.no_grad()
def divergence_from_start(
    model: nn.Module, path: Path, t: float, inputs: Tensor, likelihood: Likelihood = "squared-error"
) -> float:
    """K(t), averaged like `directional_fisher`."""
    with sdpa_kernel(SDPBackend.MATH):
        before, after = (_outputs(model, path.at(s), inputs).flatten(0, -2) for s in (0.0, t))
    if likelihood == "squared-error":
        return (after - before).square().sum(-1).mean().item() / 2
    before = before.log_softmax(-1)
    d = after.log_softmax(-1) - before
    return (before.exp() * excess_exp(d)).sum(-1).mean().item()


def _outputs(model: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    if len(inputs) == 0:
        raise GeometryError("there are no samples; a reading needs at least one input")
    found = functional_call(model, dict(weights), (_double(inputs),))
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise GeometryError(
            f"the model gave {type(found).__name__}; a path needs outputs (samples, ..., outputs)"
        )
    return found


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
