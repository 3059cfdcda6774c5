"""Jets: Taylor coefficients of a network's outputs along a direction, and the order that they show.

Statement. Along w* + t v the outputs are f(t) = c_0 + c_1 t + c_2 t² + ..., and the divergence begins as

    K(t) = ½ ‖c_k‖² t^{2k} + ...,      k the first j ≥ 1 with c_j ≠ 0,

in the norm of the Fisher at w*. So k is read at the checkpoint itself: no window, no fit. The next
coefficient says how far this holds: at the crossover t* = ‖c_k‖ / ‖c_{k+1}‖ the next power is as large.

Method. c_j = f⁽ʲ⁾(0) / j! by j nested forward-mode derivatives. A coefficient is zero if its K at t = 1 is
below the resolution of the outputs.

Symbols and shapes. c_j in the shape of the outputs. Cost: j nested derivatives cost 2ʲ forward passes where
maps do not move (`FixedMaps`; torch alone takes 3ʲ, and writes a matrix of zeros for each of their tangents).
A live direction takes two, in one pass.
Source: "Dead Directions: Geometric Singular Learning", Definition 1; torch.func.jvp.
Limits. At most `MOST` derivatives. A model whose functions have no forward-mode derivative, or none of the
second order, has no jets, and the reason is given. Piecewise linear activations have the jets of their piece.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp
from torch.overrides import TorchFunctionMode

Along = Callable[[Tensor], Tensor]
"""From t, a number, to the outputs."""
MOST = 4


@dataclass(frozen=True)
class Jet:
    """The order of a direction at the checkpoint."""

    order: int | None
    """k; None where the first `MOST` coefficients are zero."""
    crossover: float | None
    """t at which the next coefficient is as large as the first; None where it is zero or was not read."""


def read_jet(along: Along, size: Callable[[Tensor], float], floor: float) -> Jet:
    """The order and the crossover; `size` is ½‖c‖² of a coefficient in the Fisher's norm.

    >>> read_jet(lambda t: t**2 + 3 * t**3 * torch.ones(1), lambda c: float(c.square().sum()) / 2, 1e-20)
    Jet(order=2, crossover=0.3333333333333333)
    """
    zero, one = (torch.tensor(float(i), dtype=torch.float64) for i in (0, 1))
    below = along
    for order in range(1, MOST + 1):
        function = _derivative(below)
        # one pass gives this coefficient and the next
        value, change = jvp(function, (zero,), (one,))[:2] if order < MOST else (function(zero), None)
        leading = size(value) / math.factorial(order) ** 2
        if leading > floor:
            following = 0.0 if change is None else size(change) / math.factorial(order + 1) ** 2
            return Jet(order, math.sqrt(leading / following) if following > floor else None)
        below = function
    return Jet(None, None)


def _derivative(function: Along) -> Along:
    def derivative(t: Tensor) -> Tensor:
        change: Tensor = jvp(function, (t,), (torch.ones_like(t),))[1]
        return change

    return derivative


class FixedMaps(TorchFunctionMode):
    """While it is open, these weights of linear maps count as numbers without a derivative."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in weights}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or len(args) < 2 or id(args[1]) not in self._weights:
            return func(*args, **kwargs)
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        z = _Fixed.apply(args[0], _Held(args[1]))
        return z if bias is None else z + bias


@dataclass(frozen=True)
class _Held:
    """A tensor that autograd does not look into."""

    weight: Tensor


class _Fixed(torch.autograd.Function):
    """x Wᵀ as a function of x alone."""

    @staticmethod
    def forward(x: Tensor, held: _Held) -> Tensor:
        return F.linear(x, held.weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Held], output: Tensor) -> None:
        ctx.held = inputs[1]

    @staticmethod
    def jvp(ctx: Any, x: Tensor, held: None) -> Any:
        return _Fixed.apply(x, ctx.held)
