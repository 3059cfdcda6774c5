"""One update of an optimizer: its size in every tensor, and how far along it the loss falls.

Statement. With weights w before a step and w + Δ after it, and the loss L of that step's batch,

    sizes       ‖Δ_l‖ / ‖w_l‖ of every tensor l
    sharpness   2 / s,  s the multiple of the update at which L(w + sΔ) = L(w) again: on a parabola along Δ
                this is the critical sharpness in units of the rate, and steps with 2 / s > 2 raise the loss

Method. s is doubled from 1 while the loss is below L(w), or halved while it is above, then interpolated
linearly: `PASSES` forward passes at most, and one for L(w). Without a crossing the last s is taken.

Cost: a copy of the weights for one step, and two more while the sharpness is read. Weights are put back bit
for bit. Source: critical sharpness after Kalra et al., "A Scalable Measure of Loss Landscape Curvature for
Analyzing the Training Dynamics of LLMs"; sizes by layer after Wortsman et al., "Stable and low-precision
training for large-scale vision-language models".
Limits. A model with dropout, or whose passes change its buffers, reads the loss with that noise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Again = Callable[[], Tensor]
"""The loss of the batch of this step, at the weights that are there now."""
PASSES = 6


class UpdateReader:
    """Reads the step that follows `follow`."""

    def __init__(self, optimizer: Optimizer, again: Again | None) -> None:
        self._again, self._before = again, list[tuple[Tensor, Tensor]]()
        self._wanted = False
        self.passing = False
        """Whether forward passes are those of the reader."""
        self.sizes: Tensor | None = None
        """‖Δ_l‖ / ‖w_l‖ of the last step that was followed; its taker sets it to None."""
        self.sharpness: float | None = None
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._read),
        ]

    def follow(self) -> None:
        """Read the next step."""
        self._wanted = True

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._wanted:
            weights = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            self._before = [(p, p.detach().clone()) for p in weights]

    @torch.no_grad()
    def _read(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._wanted or not self._before:
            return
        weights, before = map(list, zip(*self._before, strict=True))
        changes = torch._foreach_sub(weights, before)
        moved, lengths = (torch.stack([n.float() for n in torch._foreach_norm(x)]) for x in (changes, before))
        self.sizes = moved / lengths.clamp_min(1e-30)
        if self._again is not None:
            after = [weight.detach().clone() for weight in weights]

            def loss_at(s: float) -> float:
                for weight, start, change in zip(weights, before, changes, strict=True):
                    weight.copy_(start + s * change)
                assert self._again is not None
                return float(self._again())

            self.passing = True
            try:
                self.sharpness = 2 / critical_multiple(loss_at)
            finally:
                self.passing = False
                torch._foreach_copy_(weights, after)
        self._before, self._wanted = [], False


def critical_multiple(loss_at: Callable[[float], float]) -> float:
    """s > 0 where the loss along an update is that of s = 0 again.

    >>> critical_multiple(lambda s: (s - 2.0) ** 2)
    4.0
    """
    start = loss_at(0.0)
    low, high, s = (0.0, 0.0), (0.0, 0.0), 1.0
    for _ in range(PASSES):
        value = loss_at(s) - start
        if value <= 0:
            low, s = (s, value), s * 2
        else:
            high, s = (s, value), s / 2
        if low[0] and high[0]:
            share = low[1] / (low[1] - high[1]) if high[1] < float("inf") else 0.5
            return low[0] + (high[0] - low[0]) * share
    return low[0] or high[0] or s
