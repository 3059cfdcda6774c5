"""Inverse maps of stages, and the relay of difference target propagation.

An `Inverse` g takes a stage's output to the shape of its input: a matrix where both are vectors (places of a
sequence one by one), a 3 × 3 convolution behind an enlargement where both are images. Local autoencoders
decode with it, and difference target propagation inverts with it.

Difference target propagation (Lee et al. 2015). Stage k maps h_{k-1} to h_k = f_k(h_{k-1}) and should have
given ĥ_k. It learns by ½‖f_k(h_{k-1}) - ĥ_k‖², and the target of the stage before is:

    ĥ_{k-1} = h_{k-1} + g_k(ĥ_k) - g_k(h_k)

Write δ_k = (h_k - ĥ_k) / s, the error in steps of s. Then stage k's own gradient is ∂f_kᵀ δ_k, which is what
a backward from δ_k gives, and the error that it passes on is

    δ_{k-1} = (g_k(h_k) - g_k(h_k - s δ_k)) / s                 instead of ∂f_kᵀ δ_k

So target propagation is a relay: what goes forward is h, what comes back is that difference, and the executor
changes nothing else. The last stage's δ is the gradient of its loss. For f linear and g its inverse, δ_{k-1}
= W⁻¹ δ_k, and with W orthogonal that is backprop. s = `step` times the batch, because the gradient of a mean
loss falls with the batch. Cost: two maps g a step. Source: "Product of Experts" A.1, A.2.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.stack import LayerContext

Shape = tuple[int, ...]
STEP = 0.1
"""The distance of a target from the output, in gradients of one example's loss."""


class Inverse(nn.Module):
    """g: from a hidden state of shape `given` to one of shape `taken`, behind the batch."""

    def __init__(self, given: Shape, taken: Shape) -> None:
        super().__init__()
        self.taken = taken
        self.spatial = len(given) == 3 and len(taken) == 3
        self.by_place = len(given) == len(taken) == 2
        if self.spatial:
            self.map: nn.Module = nn.Conv2d(given[0], taken[0], 3, padding=1)
        elif self.by_place:
            self.map = nn.Linear(given[1], taken[1])
        else:
            self.map = nn.Linear(math.prod(given), math.prod(taken))

    def forward(self, h: Tensor) -> Tensor:
        if self.spatial:
            h = F.interpolate(h, size=self.taken[1:], mode="nearest")
            return self.map(h)
        features = self.map.in_features
        if self.by_place or (len(self.taken) == 1 and h.shape[-1] == features):
            return self.map(h)
        flat: Tensor = self.map(h.flatten(1))
        return flat.reshape(len(h), *self.taken)


class TargetRelay(nn.Module):
    """Sends h and receives it; what comes back is the difference of g, not a gradient."""

    def __init__(self, given: Shape, taken: Shape, step: float = STEP) -> None:
        """`given` and `taken` are the shapes of the receiving stage's output and input."""
        super().__init__()
        self.inverse = Inverse(given, taken)
        self.step = step

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message.detach()

    def close(self, h: Tensor, message: Tensor) -> Tensor:
        """The receiving stage's output, through which errors go back to `message` by g."""
        return _Difference.apply(h, message, self.inverse, self.step * len(h))


class _Difference(torch.autograd.Function):
    """h forward; backward the error to h as it comes, and to the message the difference of g."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, message: Tensor, inverse: Inverse, step: float) -> Tensor:
        ctx.save_for_backward(h)
        ctx.inverse, ctx.step = inverse, step
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (h,) = ctx.saved_tensors
        with torch.no_grad():
            back = (ctx.inverse(h) - ctx.inverse(h - ctx.step * error)) / ctx.step
        return error, back, None, None
