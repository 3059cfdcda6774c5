"""Networks on pictures: a staged step over backprop's, its peak memory, and how long MNIST takes to 98 %.

    python benchmarks/images.py [--data DIR] [--batch 64] [--rounds 7] [--json]

The step is ResNet-20's at 3 × 32 × 32, forward and backward of one batch, in one process, taking turns.
Memory is the peak of what a step allocates beside weights and gradients, counted exactly. With --data, a
folder of IDX files such as MNIST's, the default MLP is trained until it reaches 98 % of the held-out
pictures; seconds are those of training alone.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
import tyro

import clone  # noqa: F401  (for what is not installed)
from papers.product_of_experts.image_arms import optimizer
from topograd.data.images import ImageLoader, read_images
from topograd.exec.train_step import train_step
from topograd.memory import peak_step_bytes
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import make_image_stack
from topograd.nn.preparation import prepare
from topograd.timing import ratio, take_turns
from topograd.training.image_evaluation import evaluate_images
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner

PARTITIONS = ("9", "3,3,3", "2,2,5", "1,2,6")


@dataclass(frozen=True)
class Settings:
    """What to measure, and how long."""

    data: str | None = None
    batch: int = 64
    rounds: int = 7
    steps: int = 3000
    """Of the MLP at most."""
    json: bool = False


def step(settings: Settings) -> dict[str, Any]:
    """Time and memory of a step of ResNet-20 by partition, over backprop's."""
    torch.manual_seed(0)
    config = ImageConfig(network="resnet20", shape=(3, 32, 32))
    stack = make_image_stack(config)
    plans = {partition: prepare(stack, partition) for partition in PARTITIONS}
    images = torch.randint(0, 256, (settings.batch, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (settings.batch,))
    parameters = list(stack.parameters())

    def run(partition: str) -> Any:
        return lambda: train_step(stack, plans[partition], images, labels)

    memory = {partition: peak_step_bytes(run(partition), parameters) for partition in PARTITIONS}
    seconds = take_turns({partition: run(partition) for partition in PARTITIONS}, settings.rounds, warmup=1)
    return {
        "time_over_backprop": {p: ratio(seconds, p, "9").as_dict() for p in PARTITIONS[1:]},
        "memory_over_backprop": {p: memory[p] / memory["9"] for p in PARTITIONS[1:]},
        "backprop_seconds": sorted(seconds["9"])[len(seconds["9"]) // 2],
        "backprop_bytes": memory["9"],
    }


def to_98(settings: Settings, partition: str) -> dict[str, Any]:
    """Seconds of training until 98 % of the held-out pictures are named right."""
    assert settings.data is not None
    torch.manual_seed(1)
    data = read_images(settings.data)
    mean, std = data.statistics()
    config = ImageConfig(shape=data.shape, classes=data.classes, mean=mean, std=std)
    stack = make_image_stack(config)
    plan = prepare(stack, partition)
    optimizers = make_optimizers(stack, optimizer(0.001), plan)
    loop = StepRunner(stack, optimizers)
    loader = ImageLoader(data.train, 128, 1)
    seconds, hits = 0.0, 0.0
    for number in range(settings.steps):
        began = time.perf_counter()
        optimizers.set_rates(number, settings.steps)
        loop.step(plan, [next(loader)], number + 1)
        seconds += time.perf_counter() - began
        if number % 100 == 99:
            hits = evaluate_images(stack, plan, data.test).accuracy.prediction
            if hits >= 0.98:
                break
    return {"steps": number + 1, "seconds": seconds, "accuracy": hits}


def main(settings: Settings) -> None:
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "resnet20": step(settings)}
    if settings.data is not None:
        found["mlp_to_98"] = {p: to_98(settings, p) for p in ("3", "1,1,1")}
    print(json.dumps(found) if settings.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Settings))
