"""Stages that come and go: one added during training, one left out at inference, some lost at random.

    grow     two stages of a vit are trained for half the steps, then a third is put behind them, the identity
             at first, and all three are trained; beside three stages from the start, and two
    drop     the trained chain predicts by a path that leaves a stage out (`prediction = path:1,3`)
    lost     each stage's device fails with probability p. A chain answers by the deepest exit before the
             first loss, and by chance if the first stage is lost; a forest by the mean of the branches that
             are left; backprop on as many devices only if none fails. Expected accuracy over all 2^K
             failures, exactly

What the paper says ("Product of Experts" §8.5) is that a failed device affects only the stages that it hosts,
and leaves the measurement to future work. Layers of a vit keep their shape, so any stage can be left out.
Cost: six trainings a seed. Limits: failures are independent and are known when they happen.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from papers.fit import fit
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.image_arms import Arm, Group, build, fewer, optimizer, shown, train, values
from papers.verdicts import Claim, above, every
from topograd.data.images import DIGITS, ImageData, ImageLoader, read_images
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import make_image_stack
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.image_evaluation import accuracy, evaluate_images, image_logits

RATE = 0.002
FAILURES = (0.05, 0.1, 0.3)
CHAIN = Arm("chain", {"partition": "2,2,2"})
ARMS = (
    Arm("backprop", {"partition": "6"}),
    CHAIN,
    Arm("forest", {"graph": "forest", "branches": ("2", "2", "2")}),
)
PATHS = ("1", "1,2", "1,3", "1,2,3")


def group_of(args: Asked) -> Group:
    """The vit that is asked for."""
    small = args.preset == "small"
    network = ImageConfig(network="vit", widths=(args.width,), heads=4 if small else 2, depth=6)
    return Group(
        name="vit",
        network=network,
        steps=args.steps,
        batch=64 if small else 16,
        rates=(RATE,),
        arms=ARMS,
    )


def run(args: Asked) -> Result:
    """All three questions for every seed."""
    seeds = args.seeds
    check_seeds(seeds)
    pictures = fewer(read_images(args.data or DIGITS), args.preset)
    group = group_of(args)
    rows: list[Row] = []
    for seed in range(seeds):
        rows += args.kept.rows({"part": "grown", "seed": seed}, partial(grown, group, pictures, seed))
        for arm in ARMS:
            key = {"part": arm.name, "seed": seed}
            rows += args.kept.rows(key, partial(_lost_and_dropped, group, arm, pictures, seed))
        args.on_more(seed + 1, seeds)
    claims = _claims(rows)
    return Result(
        setting=_setting(group),
        rows=rows,
        tables=(_grow_table(rows), _drop_table(rows), _lost_table(rows)),
        claims=claims,
        seeds=seeds,
    )


def _setting(group: Group) -> str:
    width = group.network.own_widths[0]
    return f"A vit of six layers of width {width}, {group.steps} steps of {group.batch} at a rate of {RATE}."


def grown(group: Group, data: ImageData, seed: int) -> list[Row]:
    """Two stages, a third behind them half-way; beside three from the start and two to the end."""
    half = group.steps // 2
    loader = ImageLoader(data.train, group.batch, seed)
    two = replace(group, network=replace(group.network, depth=4))
    before, plan = build(two, Arm("two", {"partition": "2,2"}), data, seed)
    fit(before, plan, loader, half, optimizer(RATE))
    topology = Topology.chain("2,2,2")
    stack = make_image_stack(before.config, topology)
    stack.load_state_dict(before.state_dict(), strict=False)
    longer = prepare(stack, topology)
    images, labels = data.test.images, data.test.labels
    was = image_logits(before, plan, images).full
    now = image_logits(stack, longer, images)
    unchanged = torch.equal(was, now.full) and torch.equal(was, now.exits[1])
    fit(stack, longer, loader, group.steps - half, optimizer(RATE))
    result = evaluate_images(stack, longer, data.test).accuracy
    _, _, fixed = train(group, CHAIN, data, seed, RATE)
    _, _, short = train(two, Arm("two", {"partition": "2,2"}), data, seed, RATE)
    shared = {"network": "vit", "question": "grow", "seed": seed}
    return [
        shared | {"arm": "two stages", "accuracy": short.accuracy.prediction},
        shared
        | {
            "arm": "third stage added half-way",
            "accuracy": result.prediction,
            "unchanged_at_insertion": unchanged,
            "at_insertion": accuracy(was, labels),
        },
        shared | {"arm": "three stages from the start", "accuracy": fixed.accuracy.prediction},
    ]


def _lost_and_dropped(group: Group, arm: Arm, data: ImageData, seed: int) -> list[Row]:
    stack, plan, _ = train(group, arm, data, seed, RATE)
    labels = data.test.labels
    alone = image_logits(stack, plan, data.test.images).alone
    shared = {"network": "vit", "seed": seed, "arm": arm.name}
    rows = [
        shared
        | {
            "question": "lost",
            "failure": p,
            "accuracy": expected_accuracy(arm.name, alone, labels, p, data.classes),
        }
        for p in (0.0, *FAILURES)
    ]
    if arm.name != "chain":
        return rows
    for path in PATHS:
        cut = Plan.of(replace(plan.topology, prediction=f"path:{path}"), plan.topology.layers)
        hits = accuracy(image_logits(stack, cut, data.test.images).full, labels)
        rows.append(shared | {"question": "drop", "path": path, "accuracy": hits})
    return rows


def expected_accuracy(
    kind: str, alone: Sequence[Tensor], labels: Tensor, failure: float, classes: int
) -> float:
    """Accuracy over all failures of three devices, each with probability `failure`."""
    total = 0.0
    for up in itertools.product((True, False), repeat=3):
        chance = 1.0
        for each in up:
            chance *= (1 - failure) if each else failure
        total += chance * _surviving(kind, alone, labels, up, classes)
    return total


def _surviving(kind: str, alone: Sequence[Tensor], labels: Tensor, up: Sequence[bool], classes: int) -> float:
    guess = 1 / classes
    if kind == "backprop":
        return accuracy(alone[-1], labels) if all(up) else guess
    if kind == "forest":
        left = [z for z, works in zip(alone, up, strict=True) if works]
        return accuracy(torch.stack(left).mean(0), labels) if left else guess
    depth = next((k for k, works in enumerate(up) if not works), len(up))
    return accuracy(alone[depth - 1], labels) if depth else guess


def _asked(rows: Sequence[Row], question: str) -> list[Row]:
    return [row for row in rows if row["question"] == question]


def _claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    lost = [row for row in _asked(rows, "lost") if row["failure"] == 0.1]

    def difference(a: str, b: str) -> list[float]:
        pairs = zip(values(lost, "vit", a), values(lost, "vit", b), strict=True)
        return [x - y for x, y in pairs]

    hits = [row["unchanged_at_insertion"] for row in rows if "unchanged_at_insertion" in row]
    return (
        every("identity at insertion", "a stage that is added changes no logit", "no logit changes", hits),
        above(
            "chain survives",
            "a failed device affects only its stages (§8.5)",
            "expected accuracy of the chain minus backprop's at a failure rate of 0.1",
            difference("chain", "backprop"),
        ),
        above(
            "forest survives better",
            "a forest loses only the branch that fails",
            "expected accuracy of the forest minus the chain's at a failure rate of 0.1",
            difference("forest", "chain"),
        ),
    )


def _grow_table(rows: Sequence[Row]) -> ResultTable:
    result = _asked(rows, "grow")
    names = dict.fromkeys(row["arm"] for row in result)
    cells = []
    for name in names:
        start = [row["at_insertion"] for row in result if row["arm"] == name and "at_insertion" in row]
        cells.append((name, shown(start) if start else "–", shown(values(result, "vit", name))))
    header = ("arm", "when added, %", "at the end, %")
    return ResultTable("A stage added during training", header, tuple(cells))


def _drop_table(rows: Sequence[Row]) -> ResultTable:
    result = _asked(rows, "drop")
    cells = tuple((path, shown([r["accuracy"] for r in result if r["path"] == path])) for path in PATHS)
    return ResultTable("Stages left out of the chain", ("stages that run", "accuracy, %"), cells)


def _lost_table(rows: Sequence[Row]) -> ResultTable:
    result = _asked(rows, "lost")
    rates = (0.0, *FAILURES)
    cells = []
    for arm in ARMS:
        mine = [row for row in result if row["arm"] == arm.name]
        means = [statistics.fmean(r["accuracy"] for r in mine if r["failure"] == p) for p in rates]
        cells.append((arm.name, *(f"{100 * mean:.1f}" for mean in means)))
    header = ("arm", *(f"{p:g} of devices fail" for p in rates))
    return ResultTable("Accuracy when stages are lost at random, %", header, tuple(cells))
