"""Settings of topology searches that run during training. Needs no torch."""

import math
from dataclasses import dataclass
from typing import Literal

from topograd.limits import check_rules


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    """How boundaries are learned."""

    stages: int = 2
    """K: there shall be K - 1 boundaries."""
    min_depth: int = 1
    """d_min: the least number of layers in a stage."""
    hot: float = 2.0
    """T_0, the temperature at first."""
    cold: float = 0.1
    """T_∞, the temperature in the end."""
    travel: float = 15.0
    """How far a logit may go in all: Adam's learning rate is this over the number of steps."""
    multiplier_travel: float = 5.0
    """How far ν goes in all when the count is wrong by one throughout."""
    damping: float = 1.0
    """c, the weight of half the squared error of the count."""
    coupling: float = 0.0
    """β: the cost of gradient that crosses."""
    length: float = 1.0
    """γ: the cost of stages that are too short."""
    capability: float = 0.0
    """η: the worth of stages of at least `min_depth` layers; 0 looks at the losses alone."""

    def __post_init__(self) -> None:
        rewards_all = self.capability and self.min_depth < 2
        check_rules(
            self,
            cold=(0 < self.cold <= self.hot < math.inf, "above 0 and at most hot, which is finite"),
            min_depth=(not rewards_all, "at least 2 with capability: else every boundary is rewarded"),
        )
        for name in ("travel", "multiplier_travel", "damping", "coupling", "length", "capability"):
            check_rules(self, **{name: (0 <= getattr(self, name) < math.inf, "finite and at least 0")})

    def temperature(self, progress: float) -> float:
        """T at `progress` from 0 to 1."""
        return self.hot * (self.cold / self.hot) ** progress


@dataclass(frozen=True, kw_only=True)
class SurgeryConfig:
    """When boundaries change, and by which rule."""

    every: int = 20
    """N: steps between operations."""
    acceptance: Literal["greedy", "stochastic"] = "greedy"
    """Take the best neighbour if it is better, or draw one and accept it by chance."""
    temperature: float = 0.01
    """T of the stochastic rule, in bits per byte."""
    deployment: Literal["datacenter", "on-device", "serving", "modular"] = "on-device"
    """The weights of J (`search/utility.py`)."""
    min_depth: int = 2
    """d_min: no stage becomes shorter, and stages of this depth count as capable."""
    stages: int | None = None
    """K: boundaries are moved and their number stays; None lets it change."""
    floor: float = 0.25
    """r_min: a boundary where the effective rank is a smaller share of the width costs."""

    def __post_init__(self) -> None:
        deployments = ("datacenter", "on-device", "serving", "modular")
        check_rules(
            self,
            every=(self.every >= 1, "at least 1"),
            min_depth=(self.min_depth >= 1, "at least 1"),
            temperature=(0 < self.temperature < math.inf, "positive"),
            acceptance=(self.acceptance in ("greedy", "stochastic"), "'greedy' or 'stochastic'"),
            deployment=(self.deployment in deployments, f"one of {', '.join(deployments)}"),
        )
