"""Three optimizers with one knob each, from SGD towards Adam, sign descent, and the sign of an average.

Statement. With g the gradient of a coordinate and η the learning rate,

    ParametricEpsFloor   v ← β v + (1 - β) g²,  Δ = -η g / (√v + ε)     ε: Adam-like at 0, SGD of η / ε at ∞
    HomogeneityDial      Δ = -η sign(g) |g|^h                           h: SGD at 1, sign descent at 0
    MomentumSign         m ← β m + (1 - β) g,   Δ = -η sign(m)          β: sign descent at 0

v and m start at zero, and are not corrected for that. Each isolates one thing in which Adam differs from SGD:
the floor under its denominator, the degree of its step in the gradient, its average of signs.

Consequence. v has (1 - β) g² after one step, so that ParametricEpsFloor's first step is η / √(1 - β), 31.6 η
for the default β, wherever √(1 - β) |g| is well above ε. `cells.py` shows what that does.

Symbols. η lr, ε eps, β beta, h. sign(0) = 0, so that a coordinate without gradient rests.

Cost: a few passes over the tensors, batched; one number of state for each parameter, none for the dial.

Source: "Dead Directions: Geometric Singular Learning" appendix B.3. That β is 0.999 in ParametricEpsFloor,
and that v is not corrected, is inferred here from what the paper says of the first steps.

Limits. Made to take training apart, not to train: no weight decay, no schedule. No closures or sparse
gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from topograd.errors import OptimError

_TINY = 1e-38


class _Driver(Optimizer, ABC):
    """What the three share: a step for a list of gradients, and at most one tensor of state."""

    def __init__(self, params: ParamsT, lr: float, **knobs: float) -> None:
        if not lr >= 0:
            raise OptimError(setting="lr", given=lr, remedy="give a number that is at least 0")
        super().__init__(params, {"lr": lr, **knobs})

    @abstractmethod
    def _direction(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Any:
        """-Δ / η of each parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        if closure is not None:
            raise OptimError(
                f"{type(self).__name__} takes no closure",
                setting="closure",
                remedy="call backward before step()",
            )
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            if any(gradient.is_sparse for gradient in gradients):
                raise OptimError(
                    f"{type(self).__name__} takes no sparse gradients",
                    setting="params",
                    remedy="use dense ones",
                )
            if parameters:
                moves = self._direction(parameters, gradients, group)
                torch._foreach_add_(parameters, moves, alpha=-group["lr"])

    def _buffers(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """The state called `name` of each parameter, zero at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]


class ParametricEpsFloor(_Driver):
    """-η g / (√v + ε): what is left of Adam without its average of gradients.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> weight.grad = torch.tensor([2.0])
    >>> ParametricEpsFloor([weight], lr=0.1, eps=0.0, beta=0.75).step()  # v = 0.25 · 4 = 1
    >>> round(weight.item(), 6)
    0.8
    """

    def __init__(self, params: ParamsT, lr: float, eps: float = 1e-8, beta: float = 0.999) -> None:
        if not eps >= 0:
            raise OptimError(setting="eps", given=eps, allowed="at least 0")
        if not 0 <= beta < 1:
            raise OptimError(setting="beta", given=beta, allowed="in [0, 1)")
        super().__init__(params, lr, eps=eps, beta=beta)

    def _direction(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Any:
        squares = self._buffers(parameters, "square")
        torch._foreach_mul_(squares, group["beta"])
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["beta"])
        floors = torch._foreach_sqrt(squares)
        torch._foreach_add_(floors, group["eps"])
        torch._foreach_clamp_min_(floors, _TINY)  # 0 / 0 where ε is 0 and no gradient was ever seen
        return torch._foreach_div(gradients, floors)


class HomogeneityDial(_Driver):
    """-η sign(g) |g|^h: a step of degree h in the gradient."""

    def __init__(self, params: ParamsT, lr: float, h: float = 1.0) -> None:
        if not 0 <= h <= 1:
            raise OptimError(setting="h", given=h, allowed="between 0 (sign descent) and 1 (SGD)")
        super().__init__(params, lr, h=h)

    def _direction(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Any:
        sizes = torch._foreach_abs(gradients)
        torch._foreach_pow_(sizes, group["h"])
        torch._foreach_mul_(sizes, torch._foreach_sign(gradients))
        return sizes


class MomentumSign(_Driver):
    """-η sign(m), m an average of gradients."""

    def __init__(self, params: ParamsT, lr: float, beta: float = 0.9) -> None:
        if not 0 <= beta < 1:
            raise OptimError(setting="beta", given=beta, allowed="in [0, 1)")
        super().__init__(params, lr, beta=beta)

    def _direction(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Any:
        averages = self._buffers(parameters, "average")
        torch._foreach_mul_(averages, group["beta"])
        torch._foreach_add_(averages, gradients, alpha=1 - group["beta"])
        return torch._foreach_sign(averages)
