"""Does an optimizer commute with a symmetry? Two runs from one orbit, and how far they part.

Statement. For a network with parameters P and a group element g that leaves its function alone, train from P
and from g·P, each on the gradients of its own loss, for T steps. An equivariant optimizer ends on one orbit:

    residual = ‖P'_T - g·P_T‖ / ‖g·P_T‖        over all parameters, P'_0 = g·P_0
    drift    = how far P_T is from P_0 along the orbit (`Gauge.drift`)

The readings of each gauge: DDCAdam frozen in float64 and float32, DDCAdam with vertical sgd,
torch.optim.AdamW without weight decay, and as peers Shampoo, SOAP and K-FAC (float64, preconditioners made
every step). For an equivariant optimizer the residual is rounding. AdamW is equivariant under translations,
where what it breaks is the drift, and not under rescalings; what to expect of the peers is in their modules.

Shapes: networks of less than a hundred parameters, 64 samples with random labels; cross-entropy for the
translations, which only it has, squared error for the rescalings.

Cost: T steps of fourteen runs for each gauge, half a minute in all.

Source: "Dead Directions: Geometric Singular Learning" remark 84. There the two runs get synchronised
gradients; here each has its own, which also tests that the network is invariant. Goals: 1e-13 in float64 and
1e-5 in float32 over 200 steps.

Limits. Where training is unstable it magnifies rounding, and two runs part whatever the optimizer. Under
cross-entropy at this learning rate our rescaling networks do that: two float64 runs of DDCAdam from starting
points 1e-7 apart, on one network and with no gauge between them, end 1e-3 to 1e-1 apart after 200 steps.
Under squared error they stay within 1e-6, so the rescalings are read there, on networks small enough for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from papers.dead_directions.kfac import KFAC
from papers.dead_directions.shampoo import SOAP, Shampoo
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import (
    CEShiftBias,
    CEShiftRowShift,
    ChainedReLURescale,
    Gauge,
    HeadShift,
    LNScale,
    ReLURescale,
)
from topograd.optim.gauges.translation import Translation

SAMPLES, WIDTH, HIDDEN, CLASSES = 64, 4, 4, 3
GOAL64, GOAL32, BROKEN = 1e-13, 1e-5, 1e-2
"""Largest residual of DDCAdam in each precision, and smallest of AdamW on rescalings."""

MakeOptimizer = Callable[[nn.Module, Gauge], Optimizer]


class SquaredReLU(nn.Module):
    """max(x, 0)²: homogeneous of degree 2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class StageHeads(nn.Module):
    """Two stages with a shared head and a head of their own: z_k = (W + W_k) h_k."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.shared = nn.Linear(HIDDEN, CLASSES, bias=False)
        self.stages = nn.ModuleList(nn.Linear(HIDDEN, CLASSES, bias=False) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of all stages: (samples · stages, classes)."""
        sentences = []
        for layer, stage in zip(self.layers, self.stages, strict=True):
            x = torch.tanh(layer(x))
            sentences.append(F.linear(x, self.shared.weight + stage.get_parameter("weight")))
        return torch.cat(sentences)


@dataclass(frozen=True)
class Case:
    """A gauge, a network that has it, and the name in the table."""

    name: str
    gauge: Gauge
    build: Callable[[], nn.Module]


def _mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])


def _normed() -> nn.Sequential:
    last = nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Tanh(), last)


def cases() -> list[Case]:
    """Every gauge of the package once, ReLURescale also for ReLU², HeadShift also with its rows."""
    weights, biases = [f"{2 * i}.weight" for i in range(4)], [f"{2 * i}.bias" for i in range(3)]
    pair, heads = (
        ("0.weight", "2.weight", "0.bias"),
        ("shared.weight", ["stages.0.weight", "stages.1.weight"]),
    )
    linear, hidden = partial(_mlp, WIDTH, CLASSES), partial(_mlp, WIDTH, HIDDEN, CLASSES)
    squared = partial(hidden, activation=SquaredReLU)
    chain = partial(_mlp, WIDTH, HIDDEN, HIDDEN, HIDDEN, CLASSES)
    return [
        Case("CEShiftBias", CEShiftBias("0.bias"), linear),
        Case("CEShiftRowShift", CEShiftRowShift("0.weight"), linear),
        Case("HeadShift", HeadShift(*heads), StageHeads),
        Case("HeadShift with rows", HeadShift(*heads, rows=True), StageHeads),
        Case("ReLURescale", ReLURescale(*pair), hidden),
        Case("ReLURescale, ReLU²", ReLURescale(*pair, degree=2), squared),
        Case("LNScale", LNScale("0.weight", "1.weight", bias="0.bias"), _normed),
        Case("ChainedReLURescale", ChainedReLURescale(weights, biases), chain),
    ]


def equivariance(steps: int = 200, lr: float = 0.01, seed: int = 0) -> dict[str, Any]:
    """The readings of every gauge, as plain numbers."""
    rows = []
    for case in cases():
        row: dict[str, Any] = {"name": case.name, "multiplicative": not isinstance(case.gauge, Translation)}
        frozen = residual_and_drift(case, ddc(lr), torch.float64, steps, seed)
        adamw = residual_and_drift(case, adam_w(lr), torch.float64, steps, seed)
        row["frozen64"], row["drift"] = frozen
        row["frozen32"] = residual_and_drift(case, ddc(lr), torch.float32, steps, seed)[0]
        row["sgd64"] = residual_and_drift(case, ddc(lr, vertical="sgd"), torch.float64, steps, seed)[0]
        row["adamw64"], row["adamw_drift"] = adamw
        row["peers"] = {
            name: dict(
                zip(
                    ("residual", "drift"),
                    residual_and_drift(case, make(lr), torch.float64, steps, seed),
                    strict=True,
                )
            )
            for name, make in PEERS.items()
        }
        rows.append(row)
    return {"steps": steps, "lr": lr, "seed": seed, "gauges": rows}


def ddc(lr: float, **settings: Any) -> MakeOptimizer:
    """DDCAdam with the case's gauge."""
    return lambda model, gauge: DDCAdam(model.named_parameters(), [gauge], lr=lr, **settings)


def adam_w(lr: float) -> MakeOptimizer:
    """AdamW without weight decay, which knows no gauge."""
    return lambda model, gauge: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


PEERS: dict[str, Callable[[float], MakeOptimizer]] = {
    "Shampoo": lambda lr: lambda model, gauge: Shampoo(model.parameters(), lr=lr, every=1),
    "SOAP": lambda lr: lambda model, gauge: SOAP(model.parameters(), lr=lr, every=1),
    "K-FAC": lambda lr: lambda model, gauge: KFAC(model, lr=lr, every=1),
}
"""Optimizers that know no gauge, by name: from a learning rate."""


def residual_and_drift(
    case: Case, make: MakeOptimizer, dtype: torch.dtype, steps: int, seed: int
) -> tuple[float, float]:
    """Train from P and from g·P with independent gradients; how far they part, and how far P drifts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = case.build().to(dtype)
        data = torch.randn(SAMPLES, WIDTH, dtype=torch.float64).to(dtype), torch.randint(CLASSES, (SAMPLES,))
        element = case.gauge.element(tensors(model))
    start = {name: tensor.clone() for name, tensor in tensors(model).items()}
    twin = copy.deepcopy(model)
    move(case.gauge, twin, element)
    squared = not isinstance(case.gauge, Translation)
    for network in (model, twin):
        train(network, make(network, case.gauge), data, steps, squared)
    drift = case.gauge.drift(start, tensors(model))
    move(case.gauge, model, element)
    return distance(tensors(twin), tensors(model)), drift


def train(
    model: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor], steps: int, squared: bool
) -> None:
    """Full batch, cross-entropy or squared error; targets repeat for models with several rows a sample."""
    inputs, targets = data
    wanted = F.one_hot(targets, CLASSES).to(inputs)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(inputs)
        rows = targets.repeat(len(logits) // len(targets))
        loss = F.mse_loss(logits, wanted) if squared else F.cross_entropy(logits, rows)
        loss.backward()
        optimizer.step()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, without their graph."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def move(gauge: Gauge, model: nn.Module, element: Tensor) -> None:
    """Put a model at g·P."""
    named = tensors(model)
    for name, tensor in gauge.act(named, element).items():
        named[name].copy_(tensor)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """‖one - other‖ / ‖other‖ over all tensors."""
    away = torch.cat([(one[name] - other[name]).flatten() for name in other])
    return (away.norm() / torch.cat([tensor.flatten() for tensor in other.values()]).norm()).item()
