"""Arms of the studies on pictures: a network, a topology and an objective, trained from a seed's weights.

For a seed every arm sees the same pictures in the same order, for as many steps, and networks of one shape
start from the same weights. An arm's learning rate is chosen among a few, on a seed that is not reported and
on pictures that judge nothing else: a part of those to learn from, which that training does not see.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from papers.fit import fit
from papers.outcome import Row
from papers.presets import Preset
from topograd.data.images import ImageData, ImageLoader
from topograd.exec.train_step import train_step
from topograd.memory import peak_step_bytes
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import ImageStack, make_image_stack
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.composition import Composition
from topograd.topology.plan import Plan
from topograd.training.image_evaluation import ImageEvaluation, evaluate_images

TUNING_SEED = 1000
HELD_OUT = 10
"""One in so many of the pictures to learn from judges the rates."""


@dataclass(frozen=True)
class Arm:
    """One way to train one network."""

    name: str
    topology: Mapping[str, Any]
    """Settings of `TopologyConfig`."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `ImageConfig` beside those of the group."""
    paper: str = "–"
    """What the paper has for it, in words."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A network, and how its arms are trained."""

    name: str
    network: ImageConfig
    steps: int
    batch: int
    rates: tuple[float, ...]
    arms: tuple[Arm, ...]


def fewer(data: ImageData, preset: Preset) -> ImageData:
    """All pictures to learn from and 2,000 to be judged by; with `tiny` 200 and 60."""
    if preset == "small":
        return replace(data, test=data.test.sample(2000))
    return replace(data, train=data.train.sample(200), test=data.test.sample(60))


def optimizer(rate: float) -> OptimizerConfig:
    """AdamW at one rate for everything."""
    return OptimizerConfig(
        name="adamw",
        betas=(0.9, 0.99),
        warmdown=0.5,
        lr_matrix=rate,
        lr_embedding=rate,
        lr_head=rate,
        lr_scalar=rate,
        lr_relay=rate,
    )


def build(group: Group, arm: Arm, data: ImageData, seed: int) -> tuple[ImageStack, Plan]:
    """The arm's network with the first weights of a seed."""
    torch.manual_seed(seed)
    mean, std = data.statistics()
    sized = replace(group.network, shape=data.shape, classes=data.classes, mean=mean, std=std)
    config = replace(sized, **arm.network)
    table = TopologyConfig(**arm.topology)
    layers = config.layers
    if table.graph == "forest":
        layers = sum(Composition.parse(branch).layers for branch in table.branches)
    topology = table.build(layers)
    stack = make_image_stack(config, topology)
    return stack, prepare(stack, topology)


def train(
    group: Group, arm: Arm, data: ImageData, seed: int, rate: float
) -> tuple[ImageStack, Plan, ImageEvaluation]:
    """The arm's network after its training, and its readings."""
    stack, plan = build(group, arm, data, seed)
    fit(stack, plan, ImageLoader(data.train, group.batch, seed), group.steps, optimizer(rate))
    return stack, plan, evaluate_images(stack, plan, data.test)


def best_rate(group: Group, arm: Arm, data: ImageData) -> float:
    """The rate with the best accuracy on pictures that are held out of the training; the only one where there
    is one."""
    if len(group.rates) < 2:
        return group.rates[0]
    rest, held = data.train.held_out(HELD_OUT)
    tuning = replace(data, train=rest, test=held.sample(len(data.test)))
    result = {
        rate: train(group, arm, tuning, TUNING_SEED, rate)[2].accuracy.prediction for rate in group.rates
    }
    return max(result, key=lambda rate: result[rate])


def step_memory(stack: ImageStack, plan: Plan, data: ImageData, batch: int) -> int:
    """Bytes at the peak of a training step, beside weights and gradients."""
    inputs, labels = next(ImageLoader(data.train, batch, 0))
    stack.train()
    result = peak_step_bytes(lambda: train_step(stack, plan, inputs, labels), list(stack.parameters()))
    stack.zero_grad(set_to_none=True)
    return result


def values(rows: Sequence[Row], group: str, arm: str, key: str = "accuracy") -> list[float]:
    """A reading of an arm, seed by seed."""
    return [row[key] for row in rows if (row["network"], row["arm"]) == (group, arm)]


def shown(result: Sequence[float]) -> str:
    """A mean of accuracies in percent, with its standard deviation."""
    spread = f" ± {100 * statistics.stdev(result):.2f}" if len(result) > 1 else ""
    return f"{100 * statistics.fmean(result):.2f}{spread}"
