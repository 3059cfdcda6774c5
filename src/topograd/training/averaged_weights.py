"""Exponential moving average of weights, as a teacher or as the final weights of a specialist.

    a ← d a + (1 - d) w      after every step

It is an optimizer whose state is the average: so checkpoints keep it, and a resumed run continues it bit
for bit. Cost: a second copy of the parameters. Parameters that do not learn, and buffers, are the module's
own. Source: "Mean teachers are better role models" (Tarvainen and Valpola 2017).
"""

import copy
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

M = TypeVar("M", bound=nn.Module)


class AveragedWeights(Optimizer, Generic[M]):
    """The average of what learns in a module; `averaged` is the module that has it."""

    def __init__(self, module: M, decay: float) -> None:
        super().__init__([p for p in module.parameters() if p.requires_grad], {"decay": decay})
        self.module, self.decay = module, decay
        self.averaged = copy.deepcopy(module).requires_grad_(False).eval()

    def connect(self) -> None:
        """Give it the averages: those that a checkpoint had, or the weights as they are now."""
        for now, past in zip(self.module.parameters(), self.averaged.parameters(), strict=True):
            past.data = now.data
            if now.requires_grad:
                past.data = self.state[now].setdefault("average", now.detach().clone())
        self._copy_buffers()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The average moves towards the weights."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"].lerp_(parameter, 1 - self.decay)
        self._copy_buffers()

    def _copy_buffers(self) -> None:
        for now, past in zip(self.module.buffers(), self.averaged.buffers(), strict=True):
            past.copy_(now)
