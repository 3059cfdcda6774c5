"""A model under training whose topology may change from step to step.

`training.Trainer` keeps one topology in a folder that can be resumed. A search that moves boundaries while
the weights learn needs less and more: no folder, any topology at any step, the same data, rates and executor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from topograd.data import Loader, windows
from topograd.errors import DivergenceError
from topograd.nn.gpt import GPT
from topograd.runs.config import TrainConfig
from topograd.runs.session import device_of, load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import Text, evaluate
from topograd.training.executor import prepare, train_step
from topograd.training.optimizer import make_optimizers, set_learning_rates


class Learner:
    """Weights, optimizers and data; `topology` says which heads there are at first."""

    def __init__(self, config: TrainConfig, topology: Topology) -> None:
        self.config, data = load_data(config)
        config = self.config
        self.loader = Loader(data.train, config.model.context, config.batch, config.seed)
        self.text = Text(*windows(data.heldout, data.tokenizer, config.model.context, config.eval_bytes))
        torch.manual_seed(config.seed)
        self.stack = GPT(config.model).to(device_of(config))
        prepare(self.stack, topology)
        self.optimizers = make_optimizers(self.stack, config.optimizer)
        self.step = 0

    def advance(self, topology: Topology) -> Tensor:
        """One step of the schedule under `topology`; the stages' losses, nan for a stage without one."""
        config, device = self.config, next(self.stack.parameters()).device
        set_learning_rates(self.optimizers, config.optimizer.multiplier(self.step, config.steps))
        losses = torch.zeros(len(topology.stages), device=device)
        for _ in range(config.accumulate):
            inputs, targets = (tensor.to(device) for tensor in next(self.loader))
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                part = train_step(self.stack, topology, inputs, targets, scale=1 / config.accumulate)
            losses = losses + part / config.accumulate
        learning = [p for p in self.stack.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
        if not math.isfinite(norm.item()):
            raise DivergenceError(
                f"the gradient is not finite at step {self.step + 1} of the search; lower the learning rates"
            )
        if config.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(learning, config.optimizer.clip, norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return losses

    def read(self, topology: Topology) -> dict[str, Any]:
        """The readings of `evaluate` on the held-out text."""
        return evaluate(self.stack, Plan.of(topology, len(self.stack.layers)), self.text)
