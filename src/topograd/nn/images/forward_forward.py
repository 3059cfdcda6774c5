"""Forward-Forward (Hinton 2022) as a product of experts: a layer's logits are its goodness for each label.

    x0_c = the image with label c laid into its first pixels       (batch, classes, pixels)
    h    = relu(W (h / rms(h)) + b)                                   each copy by itself
    z_c  = mean(h_c²)                                                 the goodness of label c

An image is run once for each label. The copy with its true label is positive data, the others are
negative, so the objective `forward-forward` (`exec/local_objectives.py`) is a loss of the logits z, and
with λ = 0 between layers nothing but a layer's own goodness trains it. A layer's input is divided by its
length, so that goodness itself is not passed on. A prediction is the sum of goodness over the layers: the
topology's prediction is `sum`.

Cost: a forward for each label; Hinton's trains on one negative and reads all labels only to predict, which is
classes / 2 times cheaper. There is no head, so there are none per stage.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.images.stack import ImageStack, Shape
from topograd.nn.stack import LayerContext
from topograd.topology.plan import Plan


class NormalisedReLU(nn.Module):
    """relu(W (h / rms(h)) + b)."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.linear = nn.Linear(taken, given)

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return torch.relu(self.linear(F.rms_norm(h, h.shape[-1:], eps=1e-6)))


class ForwardForward(ImageStack):
    """Layers that each judge whether image and label go together."""

    @property
    def start(self) -> Shape:
        return self.config.classes, math.prod(self.config.shape)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        flat = super().embed(inputs).flatten(1)
        classes = self.config.classes
        if flat.shape[1] < classes:
            problem = f"an image of {flat.shape[1]} pixels has no room for one of {classes} labels"
            raise StackError(problem, setting="classes", given=classes)
        copies = flat.unsqueeze(1).repeat(1, classes, 1)
        white = (1 - self.get_buffer("mean").flatten()[0]) / self.get_buffer("std").flatten()[0]
        copies[:, :, :classes] = white * torch.eye(classes, device=flat.device, dtype=flat.dtype)
        return copies

    def layer(self, depth: int, shape: Shape) -> tuple[nn.Module, Shape]:
        given = self.config.own_widths[depth]
        return NormalisedReLU(shape[1], given), (shape[0], given)

    def extra(self, shape: Shape) -> nn.Module:
        return NormalisedReLU(shape[1], shape[1])

    def features(self, h: Tensor) -> Tensor:
        return h.square().mean(-1)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        goodness = self.features(h)
        return goodness if rows is None else goodness[..., rows]

    def validate_plan(self, plan: Plan) -> None:
        if plan.topology.heads == "per-stage":
            self.add_heads(range(len(plan.stages)))
        super().validate_plan(plan)

    def new_head(self, width: int) -> None:
        """Goodness needs no head."""

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        allowed = "'shared' for Forward-Forward, which has no head"
        raise StackError(setting="heads", given="per-stage", allowed=allowed)

    def has_head(self, stage: int) -> bool:
        return False

    @property
    def last_stage(self) -> int:
        return 0
