"""DDCAdam: an Adam whose step commutes with a network's symmetries.

Statement. With components y of the gradient that the gauges leave alone (`split.py`), Adam runs on these:

    m ← β₁ m + (1 - β₁) y,   v ← β₂ v + (1 - β₂) y²
    Δy = -η m̂ / (√v̂ + ε),   m̂ = m / (1 - β₁ᵗ),  v̂ = v / (1 - β₂ᵗ)

for each coordinate of g_h or τ_b, and for the number r of each gauge (each channel); the split carries Δy
back to the parameters. The vertical part stays (frozen, the default), follows its gradient (sgd: Δu = -η u)
or has moments of its own (adam). Parameters outside all gauges get AdamW, by torch's own code: bit-equal.

What the default does, and why (our measurements):
- Translations are re-projected. Without it the step is exactly Adam's, since the vertical gradient is zero,
  and drifts along the orbit as Adam's does.
- vertical="adam" divides rounding by rounding, because u = 0 for an exact symmetry: it is there to show that.
- Frozen still lets differences of log-norms move, at second order in η; `retract` removes it.
- A tangential step is n_b η for each coordinate: ‖W_b‖_F times Adam's. `rms` makes it n_b / √numel.

Symbols: η lr, (β₁, β₂) betas, λ weight_decay (decoupled, before the step; refused on translations).

Cost. State: Adam's, and 2 numbers for each gauge and channel. Time: see `split.py`; Adam itself is torch's
fused kernel on the components.

Source: "Dead Directions: Geometric Singular Learning" algorithm 2, proposition 83; Adam as in "Adam: A Method
for Stochastic Optimization". The slow, obvious version is `tests.oracles.ddc_adam`.

Limits: those of `lifted.py`; orthogonal gauges are not covered. If the loss does not see the product of the
norms either, as for weights in front of a norm, r is rounding too, and ε decides how far the norms walk.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge
from topograd.optim.lifted import Group, LiftedOptimizer
from topograd.optim.split import Slot

_FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices for which torch has a fused Adam."""


class DDCAdam(LiftedOptimizer):
    """Adam on invariant components for the parameters of `gauges`, AdamW for all others.

    `foreach` and `fused` are torch's, for the parameters outside all gauges. Inside, Adam is fused where
    torch has it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> from topograd.optim.gauges import CEShiftBias, ReLURescale
    >>> gauges = [ReLURescale("0.weight", "2.weight", bias="0.bias"), CEShiftBias("2.bias")]
    >>> optimizer = DDCAdam(model.named_parameters(), gauges, lr=1e-2)
    >>> torch.nn.functional.cross_entropy(model(torch.eye(3)), torch.tensor([0, 1, 0])).backward()
    >>> optimizer.step()
    """

    base = "adam"

    def __init__(
        self,
        params: ParamsT,
        gauges: Iterable[Gauge] = (),
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        vertical: Literal["frozen", "sgd", "adam"] = "frozen",
        reproject: bool = True,
        retract: bool = False,
        rms: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if foreach and fused:
            raise OptimError("foreach and fused are both set", setting="fused", remedy="choose one of them")
        if not all(0 <= beta < 1 for beta in betas):
            raise OptimError(setting="betas", given=betas, allowed="in [0, 1)")
        if not eps >= 0:
            raise OptimError(setting="eps", given=eps, allowed="at least 0")
        ways = {"vertical": vertical, "reproject": reproject, "retract": retract, "rms": rms}
        moments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        kernels = {"foreach": foreach, "fused": fused}
        super().__init__(params, gauges, {**moments, **ways, **kernels})

    def _advance(self, slots: Sequence[Slot], components: list[Tensor], group: Group) -> list[Tensor]:
        fused = components[0].device.type in _FUSED
        averages, squares, steps = [], [], []
        for (parameter, prefix), component in zip(slots, components, strict=True):
            state = self._moments(parameter, prefix, component, parameter.device)
            averages.append(state[f"{prefix}exp_avg"])
            squares.append(state[f"{prefix}exp_avg_sq"])
            steps.append(state["step"].clone() if prefix else state["step"])
        moves = [torch.zeros_like(component) for component in components]
        _adam(moves, components, averages, squares, steps, group, fused=fused, foreach=not fused)
        return moves

    def _moments(
        self, parameter: Tensor, prefix: str, like: Tensor, counted_on: torch.device | str
    ) -> dict[str, Any]:
        """The state of a parameter, with a count of steps and two moments of this prefix."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=counted_on)
        for name in ("exp_avg", "exp_avg_sq"):
            if prefix + name not in state:
                state[prefix + name] = torch.zeros_like(like)
        return state

    def _plain(self, parameters: list[Tensor], group: Group) -> None:
        averages, squares, steps = [], [], []
        for parameter in parameters:
            fused = group.get("fused")  # states of before have no fused
            state = self._moments(parameter, "", parameter, parameter.device if fused else "cpu")
            averages.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        ways = {name: group.get(name) for name in ("foreach", "fused")}  # states of before have no fused
        _adam(parameters, gradients, averages, squares, steps, group, group["weight_decay"], **ways)


def _adam(
    moved: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    group: Group,
    weight_decay: float = 0.0,
    *,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> None:
    """torch's Adam, with decoupled weight decay."""
    beta1, beta2 = group["betas"]
    adam(
        moved,
        gradients,
        averages,
        squares,
        [],
        steps,
        foreach=foreach,
        fused=fused,
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
    )
