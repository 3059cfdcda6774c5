"""One way to train the arms of a study: the same weights at first, the same data in the same order, as long.

An arm is a topology over six layers and the pooling by which it predicts. For a seed, every arm starts from
the same embedding and layers (heads' deltas are zero, relays are drawn after the layers) and sees the same
list of batches. So the difference of two arms of one seed is the topology's, and seeds give its spread.

Models are plain GPTs on the bytes of the embedded corpus, with a head for each stage: no embedding of the
previous token, no value embeddings and no x0 in the layers. The paper's principle is about chains in which a
stage hears nothing but the one before (Assumption 8.4), and each of the three would be a way around.

Six layers, because K = 3 then has a first stage of 1, 2, 3 or 4 layers, which are the shares 2, 4, 6 and 8 of
12 that the paper's table has; and 3,2,1 beside 3,1,2 is its pair of tails.

Cost: 8 to 12 s of one core for an arm and a seed with the preset `small`. Source: "Stage-Partitioned
Learning: A Configuration Space Between Backpropagation and Local Learning" §8.2, §10.7. The paper has 286M
parameters, 2365 steps and one seed; `small` has 0.2M, 300 steps of 256 bytes and three.
Limits. The models are far from trained. What is early in training need not be so at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from topograd.data import Loader, Prepared, windows
from topograd.errors import ConfigError, DivergenceError
from topograd.nn.gpt import GPT, GPTConfig
from topograd.nn.learned_relays import add_relays
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.studies.interfaces import fit
from topograd.studies.verdicts import Row
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import Text, evaluate
from topograd.training.executor import prepare

LAYERS = 6
SWEEP = ("1,3,2", "2,2,2", "3,2,1", "3,1,2", "4,1,1")
"""Partitions with three stages, by the depth of the first; two of them differ in their tails alone."""
TAILS = ("3,2,1", "3,1,2")
SHALLOW = "2,2,2"
"""The partition of equal stages, as 4,4,4 in the paper."""
Preset = Literal["tiny", "small"]
Pooling = Literal["last", "sum", "mean"]
OnMore = Callable[[int, int], None]
"""Called with how many trainings are done, and of how many."""
Probe = Callable[[GPT, Plan, Text], Mapping[str, Any]]
"""Further readings of a trained arm."""


@dataclass(frozen=True)
class Sizes:
    """How large models are and how long they train."""

    width: int
    context: int
    batch: int
    steps: int
    soft_steps: int
    """Steps where boundaries are learned too."""
    eval_bytes: int
    seeds: int
    data: str | None = None
    """A text file; nothing means the embedded corpus."""

    def config(self, seed: int, steps: int | None = None) -> TrainConfig:
        """The settings of a training but for its topology."""
        model = GPTConfig(
            layers=LAYERS,
            width=self.width,
            heads=2,
            vocab=257,
            context=self.context,
            head_std=0.0,
            smear=False,
            x0_blend=False,
            value_embeddings="none",
        )
        return TrainConfig(
            steps=steps or self.steps,
            batch=self.batch,
            seed=seed,
            data=self.data,
            tokenizer="bytes",
            eval_every=0,
            eval_bytes=self.eval_bytes,
            model=model,
        )


PRESETS: Mapping[str, Sizes] = {
    "tiny": Sizes(width=8, context=16, batch=2, steps=4, soft_steps=8, eval_bytes=600, seeds=2),
    "small": Sizes(width=48, context=64, batch=4, steps=300, soft_steps=300, eval_bytes=20_000, seeds=3),
}


@dataclass(frozen=True)
class Arm:
    """One configuration of a study."""

    name: str
    partition: str
    """Layers of each stage, or of each branch."""
    topology: Topology
    pooling: Pooling = "last"
    """How its stages predict together."""

    @property
    def depth(self) -> int:
        """d_0, the layers of the first stage."""
        return Composition.parse(self.partition).parts[0]


def chain(partition: str, name: str | None = None, objective: str = "cross-entropy") -> Arm:
    """Detached stages with a head each; where they correct the ones before, they predict by their sum."""
    configuration = Configuration.parse(partition, heads="per-stage")
    topology = Topology.chain(configuration, objective=objective)
    return Arm(name or partition, partition, topology, "sum" if objective == "residual" else "last")


def train_arms(
    arms: Sequence[Arm], sizes: Sizes, seeds: int, on_more: OnMore, probe: Probe | None = None
) -> list[Row]:
    """Every arm with seeds 0..seeds-1: its bits per byte and the readings of its stages."""
    check_seeds(seeds)
    rows: list[Row] = []
    for seed in range(seeds):
        config, data = load_data(sizes.config(seed))
        text = held_out(config, data)
        batches = same_batches(config, data)
        for arm in arms:
            stack, plan = train_arm(arm, config, batches)
            further = probe(stack, plan, text) if probe else {}
            found = _row(arm, seed, evaluate(stack, plan, text)) | {"order0": order0(text)}
            rows.append(found | dict(further))
            on_more(len(rows), seeds * len(arms))
    return rows


def check_seeds(seeds: int) -> None:
    """Refuse a number of seeds that is none."""
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; it must be at least 1, and at least 2 for a verdict")


def held_out(config: TrainConfig, data: Prepared) -> Text:
    """The text on which every arm is read."""
    return Text(*windows(data.heldout, data.tokenizer, config.model.context, config.eval_bytes))


def order0(text: Text) -> float:
    """The entropy of the targets' frequencies, in bits per byte: what knowing no context gives."""
    counts = text.targets[text.targets != -100].unique(return_counts=True)[1].double()
    nats = torch.special.entr(counts / counts.sum()).sum() * counts.sum()
    return float(nats) / (math.log(2) * text.nbytes)


def same_batches(config: TrainConfig, data: Prepared) -> list[tuple[Tensor, Tensor]]:
    """The batches of a seed, in the order in which every arm sees them."""
    loader = Loader(data.train, config.model.context, config.batch, config.seed)
    return [next(loader) for _ in range(config.steps)]


def train_arm(arm: Arm, config: TrainConfig, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[GPT, Plan]:
    """The arm's model after its training."""
    torch.manual_seed(config.seed)
    stack = GPT(config.model)
    add_relays(stack, arm.topology, config.model.width)
    plan = prepare(stack, arm.topology)
    fit(stack, plan, batches, config.steps, config.optimizer)
    if not all(parameter.isfinite().all() for parameter in stack.parameters()):
        raise DivergenceError(
            f"arm {arm.name} with seed {config.seed} has weights that are not finite; take other sizes"
        )
    return stack, plan


def _row(arm: Arm, seed: int, readings: Mapping[str, Any]) -> Row:
    bpb = readings["bpb"]
    return {
        "arm": arm.name,
        "partition": list(Composition.parse(arm.partition).parts),
        "seed": seed,
        "bpb": bpb[arm.pooling],
        "pooling": arm.pooling,
        "bpb_last": bpb["last"],
        "bpb_sum": bpb["sum"],
        "bpb_mean": bpb["mean"],
        "bpb_prefix": bpb["prefix"],
        "usefulness": readings["usefulness"],
        "effective_rank": readings["effective_rank"],
        "ece": readings["ece"],
    }


def values(rows: Sequence[Row], arm: str, key: str = "bpb") -> list[Any]:
    """A reading of an arm, seed by seed."""
    return [row[key] for row in rows if row["arm"] == arm]


def differences(rows: Sequence[Row], arm: str, base: str, key: str = "bpb") -> list[float]:
    """The reading of `arm` minus that of `base`, seed by seed."""
    return [a - b for a, b in zip(values(rows, arm, key), values(rows, base, key), strict=True)]


def slopes(rows: Sequence[Row], arms: Sequence[Arm], key: str = "bpb") -> list[float]:
    """By how much a reading changes for each layer of the first stage: least squares, seed by seed."""
    depths = [arm.depth for arm in arms]
    curves = zip(*(values(rows, arm.name, key) for arm in arms), strict=True)
    return [float(np.polyfit(depths, curve, 1)[0]) for curve in curves]


def tail_use(rows: Sequence[Row], arms: Sequence[Arm]) -> list[float]:
    """The mean usefulness U_k (eq. 35, nats) of the stages behind the first, over the arms, seed by seed."""
    return [
        statistics.fmean(statistics.fmean(used[1:]) for used in useds)
        for useds in zip(*(values(rows, arm.name, "usefulness") for arm in arms), strict=True)
    ]


def mean(rows: Sequence[Row], arm: str, key: str = "bpb") -> float:
    """The mean of a reading of an arm over its seeds."""
    return statistics.fmean(values(rows, arm, key))


def spread(rows: Sequence[Row], arm: str, key: str = "bpb") -> str:
    """The standard deviation over seeds as text; a dash for one seed."""
    found = values(rows, arm, key)
    return f"{statistics.stdev(found):.4f}" if len(found) > 1 else "–"
