"""Local objectives, which read more of a stage than its logits: "Product of Experts" appendix A's baselines.

    autoencoder      ‖g(h_k) - h_{k-1}‖² / d          reconstruct the input; no class is predicted
    inverse          ‖g(f_k(x)) - x‖² / d,  x = h_{k-1} + ε     trains the map of target propagation alone
    byol             CE(z_k, y) + c (2 - 2 cos(q(u_k), ū_{k+1}))   agree with an EMA copy of the next stage
    ridge            ½‖W u_k - y‖²,  W in closed form            the head is solved for, not learned
    forward-forward  softplus(θ - z_y) + mean_{c≠y} softplus(z_c - θ),  z the goodness of each label

u_k are the features that stage k's head reads, g the module in `nn/inverse.py`, q and ū those of
`nn/aux_heads.py`. All are local: with λ = 0 at the boundaries only the stage's own layers learn from them.

A `LocalObjective` is given a `StageView` instead of logits. `autoencoder` and `inverse` train no head, so
their stages have losses and do not predict (`Stage.head`). Limits: byol's EMA copies and ridge's moments
move in training, as BatchNorm's means do; ridge's outputs are regressions, so their probabilities say little.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import ConfigError, StackError
from topograd.exec.objectives import ClassObjective, CrossEntropy, select_counted, stage_loss
from topograd.nn.aux_heads import EMACopy, RidgeHead, auxiliary, auxiliary_name
from topograd.nn.inverse import Inverse, TargetRelay
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.plan import PlannedStage

NOISE = 0.1
"""Noise on the inputs of an inverse, as a share of their spread."""


@dataclass(frozen=True)
class StageView:
    """A stage in a training step, as its objective sees it."""

    stack: Stack
    planned: PlannedStage
    received: Tensor
    """Its first input, without gradient."""
    h: Tensor
    ctx: LayerContext
    targets: Tensor

    def cross_entropy(self) -> Tensor:
        """The usual loss of its logits."""
        return stage_loss(self.stack, self.h, self.planned.head, CrossEntropy(), self.targets)

    def module(self) -> nn.Module:
        """The module that `prepare` made for this stage and objective."""
        module = auxiliary(self.stack, self.planned)
        if module is None:
            problem = f"stage {self.planned.index + 1} lacks {auxiliary_name(self.planned)!r}"
            remedy = "call tg.prepare(stack, topology) before you build the optimizer"
            raise StackError(problem, setting="objective", given=self.planned.stage.objective, remedy=remedy)
        return module

    def run(self, h: Tensor) -> Tensor:
        """The stage's layers on another input."""
        for i in self.planned.layers:
            h = self.stack.layers[i](h, self.ctx)
        return h


class LocalObjective(ABC):
    """The mean loss of a stage, from more than its logits."""

    @abstractmethod
    def of_stage(self, view: StageView) -> Tensor:
        """The loss, with its graph."""

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        problem = f"{type(self).__name__} needs a whole stage, not logits alone"
        raise ConfigError(problem, setting="objective", given=type(self).__name__)


class Autoencoder(LocalObjective):
    """Reconstruct the stage's input."""

    def of_stage(self, view: StageView) -> Tensor:
        decoder = view.module()
        assert isinstance(decoder, Inverse)
        return F.mse_loss(decoder(view.h), view.received)


class InverseObjective(LocalObjective):
    """Train the map back of the stage's target relay; the stage's layers get nothing from it."""

    def of_stage(self, view: StageView) -> Tensor:
        relay = view.stack.learned_relays()[view.planned.inputs[0][0].relay]
        assert isinstance(relay, TargetRelay)
        with torch.no_grad():
            x = view.received
            x = x + NOISE * x.std() * torch.randn_like(x)
            output = view.run(x)
        return F.mse_loss(relay.inverse(output), x)


@dataclass(frozen=True)
class Byol(LocalObjective):
    """Predict the class, and the features that an EMA copy of the next stage computes."""

    weight: float = 0.5

    def of_stage(self, view: StageView) -> Tensor:
        loss = view.cross_entropy()
        if auxiliary(view.stack, view.planned) is None:  # the last stage has none after it
            return loss
        coordinator = view.module()
        assert isinstance(coordinator, EMACopy)
        return loss + self.weight * coordinator.loss(view.stack, view.h, view.ctx)


class Ridge(LocalObjective):
    """Squared error to the one-hot classes, under the ridge-regression head of the inputs so far."""

    def of_stage(self, view: StageView) -> Tensor:
        head = view.module()
        assert isinstance(head, RidgeHead)
        features = view.stack.features(view.h)
        head.add(features, view.targets)
        classes = F.one_hot(view.targets, head.cross.shape[1]).to(features.dtype)
        return 0.5 * (head(features) - classes).square().sum(-1).mean()


@dataclass(frozen=True)
class ForwardForward(ClassObjective):
    """Goodness above θ for the true label, below it for the others. A loss of the logits, which are
    goodness."""

    threshold: float = 2.0

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        above = F.softplus(self.threshold - logits.gather(-1, targets[:, None])[:, 0])
        below = F.softplus(_others(logits, targets) - self.threshold).mean(-1)
        return (above + below).sum()


@dataclass(frozen=True)
class Diversity(ClassObjective):
    """CE(z_k, y) + c cos(p_k, q) over the classes that are wrong, q the product of the stages before.

    A stage should make other mistakes than those before it: the penalty is the cosine of the two
    distributions without the true class (as adaptive diversity promoting has it, Pang et al. 2019). "Product
    of Experts" A.2 names "PoE + Diversity" without a formula; this one is ours. The model predicts by the
    product.
    """

    weight: float = 0.1
    uses_prior = True

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        loss = F.cross_entropy(logits, targets, reduction="sum")
        if prior is None:
            return loss
        mine, theirs = (_others(z.softmax(-1), targets.clamp(min=0)) for z in (logits, prior))
        similarity = F.cosine_similarity(mine, theirs, dim=-1)
        return loss + self.weight * select_counted(similarity, targets != -100).sum()


def _others(x: Tensor, targets: Tensor) -> Tensor:
    """x (C, V) without each token's target: (C, V - 1)."""
    classes = torch.arange(x.shape[-1] - 1, device=x.device)
    return x.gather(-1, classes + (classes >= targets[:, None]))
