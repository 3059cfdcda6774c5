"""Auxiliary modules of objectives and relays: inverse maps, EMA copies, ridge heads.

    autoencoder, inverse   an `Inverse`: from the stage's output back to its input
    byol                   a predictor, and an EMA copy of the next stage
    ridge                  second moments of the features, and the head in closed form
    relay target           the relay of difference target propagation (`nn/inverse.py`)

`prepare` adds them before an optimizer is built. They are modules of the stack under the name of objective
and stage (`auxiliary_name`), learn at the rate of relays, and are saved with the model.
"""

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
"""Decay of the EMA copy per step (BYOL)."""
FORGET = 0.99
"""Decay of the second moments per step (ridge)."""
ALPHA = 1e-2
"""The ridge, for each example in the second moments."""


class EMACopy(nn.Module):
    """BYOL's two parts: q predicts, from a stage's features, those of an EMA copy of the next stage.

        loss = 2 - 2 cos(q(u_k), ū_{k+1}),   ū the features of the copy's output, without gradient

    The copy's weights follow the next stage's by an average: θ̄ ← m θ̄ + (1 - m) θ after each step. No gradient
    crosses the boundary.
    Source: Grill et al. 2020; the pairing of stages is ours, the paper names the method only.
    """

    def __init__(self, width: int, later: int, layers: list[nn.Module], indices: range) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, later))
        self.target = nn.ModuleList(copy.deepcopy(layer) for layer in layers)
        self.target.requires_grad_(False)
        self.indices = indices

    def loss(self, stack: Stack, h: Tensor, ctx: LayerContext) -> Tensor:
        """The mean over examples."""
        with torch.no_grad():
            ahead = h.detach()
            for layer in self.target:
                ahead = layer(ahead, ctx)
            target = stack.features(ahead)
        predicted = self.predictor(stack.features(h))
        return (2 - 2 * F.cosine_similarity(predicted, target, dim=-1)).mean()

    @torch.no_grad()
    def after_step(self, stack: Stack) -> None:
        """Move the copy towards the stage that it copies."""
        for index, slow in zip(self.indices, self.target, strict=True):
            for mine, theirs in zip(slow.parameters(), stack.layers[index].parameters(), strict=True):
                mine.lerp_(theirs.to(mine.dtype), 1 - MOMENTUM)


class RidgeHead(nn.Module):
    """The head in closed form: W = argmin Σ_i ρ^{age_i} ‖W x_i - y_i‖² + α n ‖W‖², x with a 1 appended.

    With G = Σ ρ^age x xᵀ and C = Σ ρ^age x yᵀ, W = ((G + α n I)⁻¹ C)ᵀ, n = Σ ρ^age; y is one-hot. Both sums
    are kept, so that with ρ = 1 the head is the ridge regression on all examples so far.
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
        """Add examples, and solve again."""
        x = F.pad(features.detach().to(self.gram.dtype), (0, 1), value=1.0)
        y = F.one_hot(targets, self.cross.shape[1]).to(x.dtype)
        self.gram.mul_(self.forget).add_(x.T @ x)
        self.cross.mul_(self.forget).add_(x.T @ y)
        self.count.mul_(self.forget).add_(len(x))
        ridge = self.alpha * self.count * torch.eye(len(self.gram), device=x.device, dtype=x.dtype)
        # _ex: a failure shows in the loss; a check here would synchronize with the GPU
        self.weight.copy_(torch.linalg.solve_ex(self.gram + ridge, self.cross).result)

    def forward(self, features: Tensor) -> Tensor:
        """W x, the estimate of the one-hot class; the largest entry is the prediction."""
        return F.pad(features, (0, 1), value=1.0) @ self.weight.to(features.dtype)


Make = Callable[[Stack, Plan, PlannedStage], nn.Module | None]


def auxiliary_name(planned: PlannedStage) -> str:
    """The name of the module of a stage's objective in the stack."""
    return f"{planned.stage.objective}-{planned.index}"


def auxiliary(stack: Stack, planned: PlannedStage) -> nn.Module | None:
    """The module of a stage's objective, if any."""
    return stack.learned_relays().get(auxiliary_name(planned))


def _inverse(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module:
    return Inverse(stack.output_shape(planned.stage.stop - 1), stack.input_shape(planned.stage.start))


def _ema_copy(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module | None:
    """None for a stage whose end no stage reads."""
    later = next(
        (p for p in plan.stages if any(output.source == planned.index for output, _ in p.inputs)), None
    )
    if later is None:
        return None
    width, ahead = (stack.feature_width(stack.output_shape(p.stage.stop - 1)) for p in (planned, later))
    return EMACopy(width, ahead, [stack.layers[i] for i in later.layers], later.layers)


def _ridge(stack: Stack, plan: Plan, planned: PlannedStage) -> nn.Module:
    classes = getattr(getattr(stack, "config", None), "classes", None)
    if classes is None:
        allowed = "another one; ridge needs a network on images"
        raise StackError(setting="objective", given="ridge", allowed=allowed)
    return RidgeHead(stack.feature_width(stack.output_shape(planned.stage.stop - 1)), classes)


MAKERS: Mapping[str, Make] = {"autoencoder": _inverse, "byol": _ema_copy, "ridge": _ridge}


def add_auxiliaries(stack: Stack, plan: Plan) -> None:
    """Add the modules of the plan's objectives and target relays that the stack lacks."""
    like = next(stack.parameters())
    for planned in plan.stages:
        for name in dict.fromkeys(output.relay for output, _ in planned.inputs):
            if name.startswith("target-") and name not in stack.learned_relays():
                shapes = stack.output_shape(planned.stage.stop - 1), stack.input_shape(planned.stage.start)
                stack.add_relay(name, TargetRelay(*shapes).to(like.device, like.dtype))
        make = MAKERS.get(planned.stage.objective)
        if make is None or planned.scale == 0 or auxiliary(stack, planned) is not None:
            continue
        made = make(stack, plan, planned)
        if made is not None:
            stack.add_relay(auxiliary_name(planned), made.to(like.device, like.dtype))
