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
Attention runs with torch's plain kernel, the only one with a forward-mode derivative, and what a
model casts to float32 (norms of transformers do) stays in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from topograd.errors import GeometryError
from topograd.geometry.factors import Outputs, mapped, outputs_of, plain_kernels
from topograd.geometry.host_copy import check_finite, squared_norm
from topograd.geometry.rates import Rate, fit_rate, log_grid

Likelihood = Literal["squared-error", "cross-entropy"]
SERIES = 1e-18
"""Of a²/2, where the series of e^a - 1 - a ends."""
CHUNK = 1 << 16
"""Outputs whose divergence is computed at once: they stay in the processor's cache."""
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
                raise GeometryError(
                    f"the direction names {name!r}",
                    setting="direction",
                    given=name,
                    allowed=f"among the parameters {', '.join(weights)}",
                )
            if part.shape != weights[name].shape:
                given, wanted = tuple(part.shape), tuple(weights[name].shape)
                raise GeometryError(
                    f"the direction of {name!r} has shape {given}",
                    setting="direction",
                    given=given,
                    allowed=f"{wanted}, as the parameter",
                )
        check_finite(weights)
        v = {name: part.detach().to(weights[name].device, torch.float64) for name, part in direction.items()}
        length = squared_norm(v.values()) ** 0.5
        if length == 0:
            raise GeometryError(
                "the direction is zero", setting="direction", allowed="different from 0 for some parameter"
            )
        state = {**weights, **dict(model.named_buffers())}
        start: dict[str, Tensor] = {name: as_double(value.detach()) for name, value in state.items()}
        return cls(start, {name: part / length for name, part in v.items()})

    def at(self, t: float) -> dict[str, Tensor]:
        """Parameters and buffers at t."""
        return {**self.start, **{name: self.start[name] + t * v for name, v in self.direction.items()}}


@dataclass(frozen=True)
class OrderReading:
    """The order of a dead direction, with the rates that it was read from."""

    order: int
    fisher: Rate
    divergence: Rate
    leading_ratio: float
    """F t² / K at the smallest t: 2 k² in the limit."""


def read_order(
    model: nn.Module,
    path: Path,
    inputs: Any,
    likelihood: Likelihood = "squared-error",
    grid: Tensor | None = None,
    *,
    outputs: Outputs | None = None,
) -> OrderReading:
    """The KL order k of a path out of the model's weights; GeometryError where Fisher and KL disagree.

    `outputs` is a function of model and inputs; by default the model is called, and `logits` taken if it has
    them.
    """
    grid = log_grid(*WINDOW) if grid is None else grid
    fisher = [directional_fisher(model, path, t, inputs, likelihood, outputs=outputs) for t in grid.tolist()]
    divergence = divergences(model, path, grid, inputs, likelihood, outputs=outputs)
    if max(divergence) == 0:
        raise GeometryError(
            "the function does not change along this path: it follows a symmetry, not a singularity",
            setting="path",
        )
    f = fit_rate(grid, fisher, estimator="directional Fisher")
    k = fit_rate(grid, divergence, estimator="KL divergence")
    if f.slope is not None and f.slope < VANISHES:
        raise GeometryError(
            f"the Fisher along this path does not vanish (slope {f.slope:.2f}): it does not "
            "approach a singularity",
            setting="path",
            given=f.slope,
            remedy="choose a direction that is dead at its start",
        )
    if f.slope is None or k.slope is None or round(f.order) != round(k.slope / 2):
        raise GeometryError(
            f"no order can be read along this path: Fisher {f}, KL {k}", setting="grid", given=f.refused
        )
    smallest = int(grid.argmin())
    ratio = fisher[smallest] * float(grid[smallest]) ** 2 / divergence[smallest]
    return OrderReading(round(f.order), f, k, ratio)


def directional_fisher(
    model: nn.Module,
    path: Path,
    t: float,
    inputs: Any,
    likelihood: Likelihood = "squared-error",
    *,
    outputs: Outputs | None = None,
) -> float:
    """vᵀF(w(t)) v, averaged over the inputs (and over positions, if the outputs have them)."""
    weights = path.at(t)
    moving = {name: weights[name] for name in path.direction}
    fixed = {name: value for name, value in weights.items() if name not in moving}
    network = Replaced(model, outputs)

    def along(moved: dict[str, Tensor]) -> Tensor:
        return network({**fixed, **moved}, as_double(inputs))

    with in_double():
        values, change = jvp(along, (moving,), (dict(path.direction),))[:2]
    change = change.flatten(0, -2)
    if likelihood == "squared-error":
        return change.square().sum(-1).mean().item()
    p = values.flatten(0, -2).softmax(-1)
    centred = change - (p * change).sum(-1, keepdim=True)
    return (p * centred.square()).sum(-1).mean().item()


@torch.no_grad()
def divergences(
    model: nn.Module,
    path: Path,
    grid: Tensor,
    inputs: Any,
    likelihood: Likelihood = "squared-error",
    *,
    outputs: Outputs | None = None,
) -> list[float]:
    """K(t) at every t of the grid, averaged like `directional_fisher`."""
    network = Replaced(model, outputs)
    with in_double():
        before = network(path.at(0.0), as_double(inputs))
        return [divergence(before, network(path.at(t), as_double(inputs)), likelihood) for t in grid.tolist()]


def divergence(before: Tensor, after: Tensor, likelihood: Likelihood) -> float:
    """KL(before ‖ after) of outputs (samples, ..., outputs), a mean over all but the last dimension."""
    return each_divergence(before, after, likelihood).mean().item()


def each_divergence(before: Tensor, after: Tensor, likelihood: Likelihood) -> Tensor:
    """The same of every sample by itself, all dimensions but the last in one."""
    before, after = before.flatten(0, -2), after.flatten(0, -2)
    if likelihood == "squared-error":
        return (after - before).square().sum(-1) / 2
    rows = max(1, CHUNK // before.shape[-1])
    parts = zip(before.split(rows), after.split(rows), strict=True)
    return torch.cat([_divergence_of_logits(one, other) for one, other in parts])


def _divergence_of_logits(before: Tensor, after: Tensor) -> Tensor:
    before = before.log_softmax(-1)
    d = after.log_softmax(-1) - before
    return (before.exp() * excess_exp(d)).sum(-1)


def excess_exp(a: Tensor) -> Tensor:
    """e^a - 1 - a, to relative rounding: a²/2 where a is small."""
    largest = float(a.abs().max()) if a.numel() else 0.0
    near = a.clamp(-1, 1)
    series = torch.zeros_like(a)
    for j in range(_terms(min(largest, 1.0)), 1, -1):
        series = series.add_(1).mul_(near).div_(j)
    series.mul_(near)
    return series if largest < 1 else torch.where(a.abs() < 1, series, torch.expm1(a) - a)


def _terms(largest: float) -> int:
    """The terms from a²/2 on of which those that are left out are below its rounding, up to the largest |a|.

    >>> _terms(1.0), _terms(1e-3), _terms(0.0)
    (19, 6, 2)
    """
    enough = (n for n in range(2, 20) if 2 * largest ** (n - 1) / math.factorial(n + 1) < SERIES)
    return next(enough, 19)


class Replaced:
    """A network called with other values in the place of some of its parameters; nothing is written.

    >>> network = Replaced(nn.Linear(2, 1, bias=False))
    >>> network({"weight": torch.ones(1, 2)}, torch.ones(1, 2)).item()
    2.0
    """

    def __init__(self, model: nn.Module, outputs: Outputs | None = None) -> None:
        self._called = _Called(model, outputs or outputs_of)
        at = _places(model)
        self._places = {name: at[id(x)] for name, x in (*model.named_parameters(), *model.named_buffers())}

    def answer(self, weights: Mapping[str, Tensor], inputs: Any) -> Any:
        """The network's own output, of any type."""
        replaced = {
            f"model.{place}": value
            for name, value in weights.items()
            for place in self._places.get(name, (name,))
        }
        with plain_kernels(self._called.model):
            return functional_call(self._called, replaced, (inputs,), tie_weights=False)

    def __call__(self, weights: Mapping[str, Tensor], inputs: Any) -> Tensor:
        if isinstance(inputs, Tensor) and len(inputs) == 0:
            raise GeometryError("there are no samples", setting="inputs", allowed="at least one")
        answer = self.answer(weights, inputs)
        if not isinstance(answer, Tensor) or answer.dim() < 2:
            kind = type(answer).__name__
            raise GeometryError(
                f"the model gave a {kind}",
                setting="outputs",
                given=kind,
                allowed="a tensor (samples, ..., outputs)",
                remedy="give outputs=, which makes one of it",
            )
        return answer


def _places(model: nn.Module) -> dict[int, list[str]]:
    """Where every tensor is: a module with several names counts once.

    torch's `functional_call` replaces at every name, and a module that has two it does not put back.
    """
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            found.setdefault(id(x), []).append(prefix + name)
    return found


class _Called(nn.Module):
    """The model and its output function as one module."""

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model, self._outputs = model, outputs
        self.training = model.training  # the parts keep their own modes

    def forward(self, inputs: Any) -> Tensor:
        return self._outputs(self.model, inputs)


@contextmanager
def in_double() -> Iterator[None]:
    """Attention by torch's plain kernel, and casts to a shorter type by the model are casts to float64."""
    with sdpa_kernel(SDPBackend.MATH), _StaysDouble():
        yield


class _StaysDouble(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        return func(*map(_longest, args), **{name: _longest(value) for name, value in (kwargs or {}).items()})


def _longest(value: Any) -> Any:
    """float64 in the place of a shorter floating type."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def as_double(value: Any) -> Any:
    """Floating tensors in float64, also inside of tuples and mappings."""
    return mapped(value, lambda x: x.double() if x.is_floating_point() else x)
