"""Settings of the searches that change a run's topology while its weights learn. Nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from topograd.errors import ConfigError


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
        if not 0 < self.cold <= self.hot < math.inf:
            raise ConfigError(
                f"hot is {self.hot} and cold is {self.cold}",
                setting="cold",
                given=self.cold,
                allowed="above 0 and at most hot",
            )
        if self.capability and self.min_depth < 2:
            raise ConfigError(
                f"capability is {self.capability} and min_depth is {self.min_depth}, which "
                "rewards every boundary",
                setting="min_depth",
                given=self.min_depth,
                remedy="set min_depth to 2 or more",
            )
        for name in ("travel", "multiplier_travel", "damping", "coupling", "length", "capability"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(setting=name, given=getattr(self, name), allowed="finite and at least 0")

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
        if self.every < 1 or self.min_depth < 1:
            raise ConfigError(
                f"every is {self.every}, min_depth {self.min_depth}",
                setting="every",
                given=self.every,
                remedy="both must be at least 1",
            )
        if not 0 < self.temperature < math.inf:
            raise ConfigError(setting="temperature", given=self.temperature, allowed="positive")
        if self.acceptance not in ("greedy", "stochastic"):
            raise ConfigError(setting="acceptance", given=self.acceptance, allowed="'greedy' or 'stochastic'")
        known = ("datacenter", "on-device", "serving", "modular")
        if self.deployment not in known:
            raise ConfigError(
                setting="deployment", given=self.deployment, allowed=f"one of {', '.join(known)}"
            )
