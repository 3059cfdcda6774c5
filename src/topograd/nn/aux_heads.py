"""What a stage's objective or relay needs beside the stage's own layers, and who makes it.

    autoencoder, inverse   an `Inverse`: from the stage's output back to its input
    byol                   a predictor, and a slow copy of the stage that comes next
    ridge                  second moments of what the head reads, and the head that follows from them
    relay target           the relay of difference target propagation (`nn/inverse.py`)

`prepare` adds them before an optimizer is built. They are modules of the stack under the name of objective
and stage (`auxiliary_name`), learn at the rate of relays, and are saved with the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.inverse import Inverse, TargetRelay
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.plan import Plan, PlannedStage

MOMENTUM = 0.99
"""How much of a slow copy stays in a step (BYOL)."""
FORGET = 0.99
"""How much of the second moments stays in a step (ridge)."""
ALPHA = 1e-2
"""The ridge, for each row that the second moments hold."""


class EMACopy(nn.Module):
    """BYOL's two parts: q predicts, from a stage's features, those that a slow copy of the next stage gives.

        loss = 2 - 2 cos(q(u_k), ū_{k+1}),   ū the features of the copy's output, without gradient

    The copy's weights follow the next stage's by an average: θ̄ ← m θ̄ + (1 - m) θ after each step. Nothing
    crosses the boundary backwards; what the stage hears of the next one is how it looked on average.
    Source: Grill et al. 2020; the pairing of stages is ours, the paper names the method only.
    """

    def __init__(self, width: int, later: int, layers: list[nn.Module], indices: range) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, later))
        self.target = nn.ModuleList(copy.deepcopy(layer) for layer in layers)
        self.target.requires_grad_(False)
        self.indices = indices

    def loss(self, stack: Stack, h: Tensor, ctx: LayerContext) -> Tensor:
        """The mean over rows."""
        with torch.no_grad():
            ahead = h.detach()
            for layer in self.target:
                ahead = layer(ahead, ctx)
            wanted = stack.features(ahead)
        said = self.predictor(stack.features(h))
        return (2 - 2 * F.cosine_similarity(said, wanted, dim=-1)).mean()

    @torch.no_grad()
    def after_step(self, stack: Stack) -> None:
        """Move the copy towards the stage that it is of."""
        for index, slow in zip(self.indices, self.target, strict=True):
            for mine, theirs in zip(slow.parameters(), stack.layers[index].parameters(), strict=True):
                mine.lerp_(theirs.to(mine.dtype), 1 - MOMENTUM)


class RidgeHead(nn.Module):
    """The head in closed form: W = argmin Σ_i ρ^{age_i} ‖W x_i - y_i‖² + α n ‖W‖², x with a 1 appended.

    With G = Σ ρ^age x xᵀ and C = Σ ρ^age x yᵀ, W = ((G + α n I)⁻¹ C)ᵀ, n = Σ ρ^age; y is one-hot. Both sums
    are kept, so that with ρ = 1 the head is the ridge regression on everything that was seen.
    """

    gram: Tensor
    cross: Tensor
    count: Tensor
    weight: Tensor

    def __init__(self, width: int, classes: int, forget: float = FORGET, alpha: float = ALPHA) -> None:
        super().__init__()
        self.forget, self.alpha = forget, alpha
        self.register_buffer("gram", torch.zeros(width + 1, width + 1))
        self.register_buffer("cross", torch.zeros(width + 1, classes))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("weight", torch.zeros(width + 1, classes))

    @torch.no_grad()
    def add(self, features: Tensor, targets: Tensor) -> None:
        """See some more rows, and solve again."""
        x = F.pad(features.detach().to(self.gram.dtype), (0, 1), value=1.0)
        y = F.one_hot(targets, self.cross.shape[1]).to(x.dtype)
        self.gram.mul_(self.forget).add_(x.T @ x)
        self.cross.mul_(self.forget).add_(x.T @ y)
        self.count.mul_(self.forget).add_(len(x))
        ridge = self.alpha * self.count * torch.eye(len(self.gram), device=x.device, dtype=x.dtype)
        # _ex: what cannot be solved shows in the loss; to ask here would wait for the device
        self.weight.copy_(torch.linalg.solve_ex(self.gram + ridge, self.cross).result)

    def forward(self, features: Tensor) -> Tensor:
        """W x: how near each class is to 1; the largest is the prediction."""
        return F.pad(features, (0, 1), value=1.0) @ self.weight.to(features.dtype)


Make = Callable[[Stack, Plan, PlannedStage], nn.Module | None]


def auxiliary_name(planned: PlannedStage) -> str:
    """What the stack calls the module that a stage's objective has."""
    return f"{planned.stage.objective}-{planned.index}"


def auxiliary(stack: Stack, planned: PlannedStage) -> nn.Module | None:
    """The module that a stage's objective has, if any."""
    return stack.learned_relays().get(auxiliary_name(planned))


def _inverse(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module:
    return Inverse(stack.output_shape(planned.stage.stop - 1), stack.input_shape(planned.stage.start))


def _no_more(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module | None:
    return None


def _slow_copy(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module | None:
    """None for a stage whose end nobody hears."""
    later = next((p for p in plan.stages if any(port.source == planned.index for port, _ in p.inputs)), None)
    if later is None:
        return None
    width, ahead = (stack.feature_width(stack.output_shape(p.stage.stop - 1)) for p in (planned, later))
    return EMACopy(width, ahead, [stack.layers[i] for i in later.layers], later.layers)


def _ridge(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module:
    classes = getattr(getattr(stack, "config", None), "classes", None)
    if classes is None:
        raise StackError("the objective ridge solves for classes", remedy="it needs a network on pictures")
    return RidgeHead(stack.feature_width(stack.output_shape(planned.stage.stop - 1)), classes)


MAKERS: Mapping[str, Make] = {
    "autoencoder": _inverse,
    "byol": _slow_copy,
    "ridge": _ridge,
    "inverse": _no_more,
}


def add_auxiliaries(stack: Stack, plan: Plan) -> None:
    """Give `stack` what the plan's objectives and target relays need and it lacks."""
    like = next(stack.parameters())
    for planned in plan.stages:
        names = {port.relay: port for port, _ in planned.inputs if port.relay.startswith("target-")}
        for name in names:
            if name not in stack.learned_relays():
                shapes = stack.output_shape(planned.stage.stop - 1), stack.input_shape(planned.stage.start)
                stack.add_relay(name, TargetRelay(*shapes).to(like.device, like.dtype))
        make = MAKERS.get(planned.stage.objective)
        if make is None or planned.scale == 0 or auxiliary(stack, planned) is not None:
            continue
        made = make(stack, plan, planned)
        if made is not None:
            stack.add_relay(auxiliary_name(planned), made.to(like.device, like.dtype))
