"""One way to train the arms of a study: the same weights at first, the same data in the same order, as long.

An arm is a topology over six layers, which also says how it predicts (`topology/prediction.py`). For a seed,
every arm starts from the same embedding and layers (heads' deltas are zero, relays are drawn after the
layers) and sees the same list of batches. So the difference of two arms of one seed is the topology's, and
seeds give its spread.

Models are plain GPTs on the bytes of the embedded corpus: no embedding of the previous token, no value
embeddings and no x0 in the layers. The paper's principle is about chains in which a stage hears nothing but
the one before (Assumption 8.4), and each of the three would be a way around. Stages have a head each, unless
an arm says otherwise.

Six layers, because K = 3 then has a first stage of 1, 2, 3 or 4 layers, which are the shares 2, 4, 6 and 8 of
12 that the paper's table has; and 3,2,1 beside 3,1,2 is its pair of tails.

Cost: 8 to 12 s of one core for an arm and a seed with the preset `small`. Source: "Stage-Partitioned
Learning: A Configuration Space Between Backpropagation and Local Learning" §8.2, §10.7. The paper has 286M
parameters, 2365 steps and one seed; `small` has 0.2M, 300 steps of 256 bytes and three, `long` 1200 steps.
Limits. The models are far from trained. What is early in training need not be so at the end. A head of a
stage's own is the shared matrix plus a delta, and both learn: readouts of such heads move about twice as
fast as one shared head does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from papers.fit import Watch, fit, trajectory
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.presets import SIZES, Preset
from papers.verdicts import Found, settled
from topograd.data import Loader, Prepared, Text, windows
from topograd.errors import DivergenceError
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import Evaluation, evaluate

LAYERS = 6
SWEEP = ("1,3,2", "2,2,2", "3,2,1", "3,1,2", "4,1,1")
"""Partitions with three stages, by the depth of the first; two of them differ in their tails alone."""
TAILS = ("3,2,1", "3,1,2")
SHALLOW = "2,2,2"
"""The partition of equal stages, as 4,4,4 in the paper."""
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


def _preset(name: Preset, context: int, batch: int, soft_steps: int, eval_bytes: int) -> Sizes:
    numbers = SIZES["stage0-depth"][name].as_dict()
    return Sizes(
        width=numbers["width"],
        context=context,
        batch=batch,
        steps=numbers["steps"],
        soft_steps=soft_steps,
        eval_bytes=eval_bytes,
        seeds=numbers["seeds"],
    )


PRESETS: Mapping[str, Sizes] = {
    "tiny": _preset("tiny", context=16, batch=2, soft_steps=8, eval_bytes=600),
    "small": _preset("small", context=64, batch=4, soft_steps=300, eval_bytes=20_000),
    "long": _preset("long", context=64, batch=4, soft_steps=1200, eval_bytes=20_000),
}


def bytes_config(
    args: Asked, seed: int, *, batch: int, tiny_batch: int, eval_bytes: int, steps: int | None = None
) -> TrainConfig:
    """A study's settings of a plain GPT on bytes but for its topology; with the preset tiny, much less."""
    tiny = args.preset == "tiny"
    return Sizes(
        width=args.width,
        context=16 if tiny else 64,
        batch=tiny_batch if tiny else batch,
        steps=args.steps if steps is None else steps,
        soft_steps=0,
        eval_bytes=600 if tiny else eval_bytes,
        seeds=1,
    ).config(seed)


@dataclass(frozen=True)
class Arm:
    """One configuration of a study."""

    name: str
    partition: str
    """Layers of each stage, or of each branch."""
    topology: Topology
    relays: float | None = None
    """Learning rate of its relays, where it is not that of the settings."""
    start: Callable[[GPT], None] | None = None
    """What sets the first weights of its relays, where they do not start as they usually do."""

    @property
    def depth(self) -> int:
        """d_0, the layers of the first stage."""
        return Composition.parse(self.partition).parts[0]


def chain(
    partition: str,
    name: str | None = None,
    objective: str = "cross-entropy",
    heads: Literal["shared", "per-stage"] = "per-stage",
) -> Arm:
    """Detached stages in a row."""
    configuration = Configuration.parse(partition, heads=heads)
    return Arm(name or partition, partition, Topology.chain(configuration, objective=objective))


def sizes_of(args: Asked) -> Sizes:
    """The preset's sizes, with those that were asked for instead; soft boundaries learn as long."""
    sizes, usual = PRESETS[args.preset], SIZES[args.study][args.preset]
    if args.size.steps != usual.steps:
        sizes = replace(sizes, steps=args.steps, soft_steps=args.steps)
    if args.size.width != usual.width:
        sizes = replace(sizes, width=args.width)
    return sizes if args.size.seeds == usual.seeds else replace(sizes, seeds=args.seeds)


def judged(experiment: Callable[[Sizes, Asked], Found], args: Asked) -> Result:
    """Run an experiment in staged learning, and its claims with their verdicts."""
    sizes = sizes_of(args)
    check_seeds(sizes.seeds)
    result = experiment(sizes, args)
    claims = tuple(settled(result.claims, result.rows))
    return Result(
        setting=(
            f"GPTs of six layers of width {sizes.width} on bytes, {sizes.steps} steps of "
            f"{sizes.batch} × {sizes.context} tokens ({sizes.soft_steps} where boundaries are learned). "
            "All arms of a seed start from the same weights and see the same data in the same order."
        ),
        rows=result.rows,
        tables=(ResultTable(result.caption, result.header, result.cells),),
        drawing=result.drawing,
        claims=claims,
        seeds=sizes.seeds,
        record={"sizes": asdict(sizes)},
    )


def train_arms(
    arms: Sequence[Arm],
    sizes: Sizes,
    args: Asked,
    probe: Probe | None = None,
    seeds: Sequence[int] | None = None,
    shares: Sequence[float] = (),
) -> list[Row]:
    """Every arm with every seed, by default from 0 on: its bits per byte, its stages' readings, its way.

    `shares` are those of the training at which bits per byte are read too, as `bpb_at(share)`.
    """
    check_seeds(sizes.seeds)
    seeds = range(sizes.seeds) if seeds is None else seeds
    rows: list[Row] = []
    for seed in seeds:
        given = _Given(sizes, seed)
        for arm in arms:
            key = {"arm": arm.name, "seed": seed}
            rows.append(args.kept.row(key, partial(_measured, arm, given, probe, shares)))
            args.on_more(len(rows), len(seeds) * len(arms))
    return rows


class _Given:
    """What the arms of a seed have in common, read when the first of them is trained."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes, self.seed = sizes, seed

    @cached_property
    def loaded(self) -> tuple[TrainConfig, Text, list[tuple[Tensor, Tensor]]]:
        config, data = load_data(self.sizes.config(self.seed))
        return config, held_out(config, data), same_batches(config, data)


def bpb_at(share: float) -> str:
    """The key of the bits per byte when this share of a training is done."""
    return f"bpb_at_{share:g}"


def _measured(arm: Arm, given: _Given, probe: Probe | None, shares: Sequence[float]) -> Row:
    config, text, batches = given.loaded
    further: dict[str, Any] = {}

    def watch(step: int, stack: Stack, plan: Plan, *batch: Tensor) -> None:
        due = [bpb_at(share) for share in shares if step == int(share * config.steps)]
        if due:
            further.update(dict.fromkeys(due, evaluate(stack, plan, text).bpb.prediction))

    stack, plan, losses = train_arm(arm, config, batches, watch)
    further |= probe(stack, plan, text) if probe else {}
    row = _row(arm, given.seed, plan, evaluate(stack, plan, text))
    return {**row, "trajectory": trajectory(losses), "order0": order0(text), **further}


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


def train_arm(
    arm: Arm, config: TrainConfig, batches: Sequence[tuple[Tensor, Tensor]], watch: Watch | None = None
) -> tuple[GPT, Plan, Tensor]:
    """The arm's model after its training, and the losses of its stages at every step."""
    torch.manual_seed(config.seed)
    stack = GPT(config.gpt)
    plan = prepare(stack, arm.topology)
    if arm.start is not None:
        arm.start(stack)
    settings = config.optimizer if arm.relays is None else replace(config.optimizer, lr_relay=arm.relays)
    try:
        losses = fit(stack, plan, batches, config.steps, settings, watch)
    except DivergenceError as problem:
        raise DivergenceError(
            f"arm {arm.name} with seed {config.seed}: {problem}", setting="arm", given=arm.name
        ) from None
    return stack, plan, losses


def _row(arm: Arm, seed: int, plan: Plan, result: Evaluation) -> Row:
    return {
        "arm": arm.name,
        "partition": list(Composition.parse(arm.partition).parts),
        "seed": seed,
        "bpb": result.bpb.prediction,
        "prediction": plan.prediction.kind,
        "bpb_stages": result.bpb.stages,
        "bpb_prefix": result.bpb.prefix,
        "bpb_last": result.bpb.last,
        "bpb_sum": result.bpb.sum,
        "bpb_mean": result.bpb.mean,
        "usefulness": result.usefulness,
        "effective_rank": result.effective_rank,
        "ece": result.ece,
    }


def values(rows: Sequence[Row], arm: str, key: str = "bpb") -> list[Any]:
    """A reading of an arm, seed by seed."""
    return [row[key] for row in rows if row["arm"] == arm]


def differences(rows: Sequence[Row], arm: str, base: str, key: str = "bpb") -> list[float]:
    """The reading of `arm` minus that of `base`, seed by seed."""
    return minus(values(rows, arm, key), values(rows, base, key))


def minus(one: Sequence[float], other: Sequence[float], share: float = 1.0) -> list[float]:
    """One reading minus a share of another, seed by seed."""
    return [a - share * b for a, b in zip(one, other, strict=True)]


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
    result = values(rows, arm, key)
    return f"{statistics.stdev(result):.4f}" if len(result) > 1 else "–"
