"""Which optimizer takes which parameter: Muon the layers' matrices, AdamW everything else.

| group      | parameters                                     | optimizer |
|------------|------------------------------------------------|-----------|
| matrices   | 2-D weights inside the layers                  | Muon      |
| embeddings | weights of nn.Embedding, wherever they are     | AdamW     |
| head       | 2-D weights outside the layers                 | AdamW     |
| scalars    | everything else: gains, gates, biases          | AdamW     |
| relays     | what a stack's own relays have, of any shape   | AdamW     |

Steps of fixed size, as Muon's, drive an interface's message to a constant (LOG.md): relays go slowly. A head
that is tied to the embedding counts as a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from topograd.errors import ConfigError
from topograd.nn.stack import Stack
from topograd.training.muon import Muon
from topograd.training.schedule import warmup_stable_warmdown


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning rates by group, and their schedule."""

    matrices: float = 0.02
    """Learning rate of Muon."""
    embeddings: float = 0.3
    head: float = 0.02
    scalars: float = 0.004
    relays: float = 0.001
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 0.0
    """Decoupled decay of the layers' matrices."""
    warmup: float = 0.01
    """Share of the steps in which the learning rate rises."""
    warmdown: float = 0.5
    """Share of the steps, at the end, in which it falls."""
    floor: float = 0.01
    """What it falls to, as a share of the peak."""
    clip: float | None = None
    """Largest norm of all gradients together."""

    def __post_init__(self) -> None:
        for name in ("matrices", "embeddings", "head", "scalars", "relays"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"learning rate {name} is {getattr(self, name)}; it must be at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}; give two numbers from 0 to below 1")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is {self.clip}; it must be positive, or be left out")
        self.multiplier(0, 1)

    def multiplier(self, step: int, steps: int) -> float:
        """What the learning rates are multiplied by at `step` of `steps`."""
        return warmup_stable_warmdown(step, steps, self.warmup, self.warmdown, self.floor)


def parameter_groups(stack: Stack) -> dict[str, list[nn.Parameter]]:
    """Every parameter that learns, in exactly one group."""
    layered = {id(p) for p in stack.layers.parameters()}
    relays = {id(p) for relay in stack.own_relays().values() for p in relay.parameters()}
    tables = {id(m.weight) for m in stack.modules() if isinstance(m, nn.Embedding)}
    heads = {id(p) for name, p in stack.named_parameters(remove_duplicate=False) if name.startswith("head.")}
    names = ("matrices", "embeddings", "head", "scalars", "relays")
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    for parameter in stack.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in relays:
            groups["relays"].append(parameter)
        elif id(parameter) in tables and id(parameter) not in heads:
            groups["embeddings"].append(parameter)
        elif parameter.dim() == 2:
            groups["matrices" if id(parameter) in layered else "head"].append(parameter)
        else:
            groups["scalars"].append(parameter)
    return groups


def make_optimizers(stack: Stack, config: OptimizerConfig) -> dict[str, torch.optim.Optimizer]:
    """Optimizers for every parameter that learns; a group's peak rate is kept as `peak`."""
    groups = parameter_groups(stack)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if groups["matrices"]:
        optimizers["muon"] = Muon(
            [{"params": groups["matrices"], "peak": config.matrices}],
            lr=config.matrices,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            ns_steps=config.newton_schulz_steps,
        )
    rest = [
        {"params": groups[name], "lr": getattr(config, name), "peak": getattr(config, name)}
        for name in ("embeddings", "head", "scalars", "relays")
        if groups[name]
    ]
    if rest:
        optimizers["adamw"] = torch.optim.AdamW(
            rest, betas=config.betas, eps=1e-10, weight_decay=0.0, fused=True
        )
    return optimizers


def set_learning_rates(optimizers: Mapping[str, torch.optim.Optimizer], multiplier: float) -> None:
    """Every group's rate becomes its peak times `multiplier`."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * multiplier
