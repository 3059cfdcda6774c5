"""Topologies and local learning rules across networks on pictures: the tables of "Product of Experts" A.1 and
A.2.

A.1 replaces backprop mechanically (log-odds backprop, local autoencoders, difference target propagation); A.2
compares flat, hierarchical and diverse products of experts across an MLP, a VGG and a ResNet. Here all of
them, with clustered stages, forests, private decoders, BYOL, ridge and Forward-Forward, are arms of one
executor:

    flat           a boundary after every layer, λ = 0          hierarchical   the same boundaries, λ = 1
    clustered      several layers to a stage, λ = 0             forest         two networks side by side
    decoders       each stage has a layer of its own before its head

The paper's networks saw MNIST and CIFAR-10, for how long it does not say; ours are smaller, see the pictures
that --data names, and are trained briefly, so the figures beside each other compare orders, not levels. Each
arm has the rate that was best for it on pictures held out of its training. Memory is that of a step over
backprop's; depth is that of leaving at a confidence of 0.9. Cost: with the preset `small` 2 to 25 s for an
arm and a seed, half an hour in all on one thread.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.image_arms import (
    Arm,
    Group,
    best_rate,
    fewer,
    shown,
    step_memory,
    train,
    values,
)
from papers.verdicts import Claim, above
from topograd.data.images import DIGITS, ImageData, read_images
from topograd.nn.images.config import ImageConfig

LEAVE_AT = 0.9


def _chain(partition: str, **more: object) -> dict[str, object]:
    return {"partition": partition, **more}


MLP_ARMS = (
    Arm("backprop", _chain("3"), paper="97.80"),
    Arm("flat", _chain("1,1,1")),
    Arm("clustered", _chain("2,1")),
    Arm("hierarchical", _chain("1,1,1", grad_scale=1.0)),
    Arm("diversity", _chain("1,1,1", objective="diversity"), paper="98.00"),
    Arm("forest", {"graph": "forest", "branches": ("3", "3")}),
    Arm("decoders", _chain("1,1,1", decoder=1)),
    Arm("sigmoid backprop", _chain("3"), {"activation": "sigmoid"}),
    Arm("log-odds backprop", _chain("3"), {"activation": "log-odds"}, "10.28"),
    Arm("autoencoders", _chain("1,1,1", objective="autoencoder"), paper="90.99"),
    Arm("target propagation", _chain("1,1,1", graph="targets"), paper="97.70"),
    Arm("byol", _chain("1,1,1", objective="byol")),
    Arm("ridge", _chain("1,1,1", objective="ridge")),
    Arm(
        "forward-forward",
        _chain("1,1", objective="forward-forward"),
        {"model": "forward-forward", "widths": ()},
    ),
)


def _convolutional(layers: int, gap: str) -> tuple[Arm, ...]:
    one = ",".join(["1"] * layers)
    return (
        Arm("backprop", _chain(str(layers))),
        Arm("flat", _chain(one)),
        Arm("clustered", _chain(f"{layers - layers // 2},{layers // 2}")),
        Arm("hierarchical", _chain(one, grad_scale=1.0), paper=gap),
        Arm("decoders", _chain(one, decoder=1)),
        Arm("autoencoders", _chain(one, objective="autoencoder")),
        Arm("target propagation", _chain(one, graph="targets")),
    )


def groups(args: Asked) -> tuple[Group, ...]:
    """The networks of a preset with their arms, and the steps that are asked for."""
    small = args.preset == "small"
    mlp_steps, vgg_steps, resnet_steps = args.parts("steps")
    rates = (0.001, 0.003, 0.01) if small else (0.003,)
    vgg = (8, 8, 16, 16) if small else (4, 6)
    resnet = (8, 16, 32) if small else (4, 4, 6)
    forward = tuple(a for a in MLP_ARMS if small or a.name != "forward-forward")
    return (
        Group(
            name="mlp",
            network=ImageConfig(widths=(256, 128) if small else (24, 16)),
            steps=mlp_steps,
            batch=64 if small else 32,
            rates=rates,
            arms=forward,
        ),
        Group(
            name="vgg",
            network=ImageConfig(network="vgg", widths=vgg),
            steps=vgg_steps,
            batch=64 if small else 16,
            rates=rates,
            arms=_convolutional(len(vgg), "89.78, gap −1.25"),
        ),
        Group(
            name="resnet8",
            network=ImageConfig(network="resnet8", widths=resnet),
            steps=resnet_steps,
            batch=64 if small else 16,
            rates=rates,
            arms=_convolutional(3, "89.61, gap −2.45"),
        ),
    )


def run(args: Asked) -> Result:
    """Every arm of every network with every seed."""
    seeds, data = args.seeds, args.data
    check_seeds(seeds)
    pictures = fewer(read_images(data or DIGITS), args.preset)
    chosen = groups(args)
    total = seeds * sum(len(group.arms) for group in chosen)
    rows: list[Row] = []
    for group in chosen:
        for arm in group.arms:
            place = {"network": group.name, "arm": arm.name}
            rate = args.kept.row(place, partial(_best_rate, group, arm, pictures))["rate"]
            for seed in range(seeds):
                make = partial(_row, group, arm, pictures, seed, rate)
                rows.append(args.kept.row({**place, "seed": seed}, make))
                args.on_more(len(rows), total)
    claims = _claims(rows)
    name = "scikit-learn's digits" if data in (None, DIGITS) else str(data).rstrip("/").rpartition("/")[2]
    sizes = "; ".join(f"{g.name}: {g.steps} steps of {g.batch}" for g in chosen)
    return Result(
        setting=f"{name}: {len(pictures.train)} pictures to learn from. {sizes}. AdamW, a rate for each arm.",
        rows=rows,
        tables=tuple(table for group in chosen for table in _tables(rows, group)),
        claims=claims,
        seeds=seeds,
    )


def _best_rate(group: Group, arm: Arm, data: ImageData) -> Row:
    return {"rate": best_rate(group, arm, data)}


def _row(group: Group, arm: Arm, data: ImageData, seed: int, rate: float) -> Row:
    began = time.perf_counter()
    stack, plan, result = train(group, arm, data, seed, rate)
    seconds = time.perf_counter() - began
    leaving = next((point for point in result.exits if point.threshold == LEAVE_AT), None)
    return {
        "network": group.name,
        "arm": arm.name,
        "seed": seed,
        "rate": rate,
        "accuracy": result.accuracy.prediction,
        "prefix": result.accuracy.prefix,
        "sum": result.accuracy.sum,
        "seconds": seconds,
        "peak_bytes": step_memory(stack, plan, data, group.batch),
        "exit_accuracy": None if leaving is None else leaving.accuracy,
        "exit_depth": None if leaving is None else leaving.depth,
    }


def _tables(rows: list[Row], group: Group) -> tuple[ResultTable, ResultTable]:
    """What the arms of a network predict, and what they cost."""
    base = statistics.fmean(values(rows, group.name, "backprop"))
    memory = values(rows, group.name, "backprop", "peak_bytes")[0]
    time_ = statistics.fmean(values(rows, group.name, "backprop", "seconds"))
    right, costs = [], []
    for arm in group.arms:
        mine = [row for row in rows if (row["network"], row["arm"]) == (group.name, arm.name)]
        results = [row["accuracy"] for row in mine]
        first = statistics.fmean(row["prefix"][0] for row in mine)
        gap = statistics.fmean(results) - base
        right.append((arm.name, shown(results), f"{100 * gap:+.2f}", f"{100 * first:.1f}", arm.paper))
        leaving = "–"
        if mine[0]["exit_depth"] is not None:
            accuracy, depth = (statistics.fmean(r[k] for r in mine) for k in ("exit_accuracy", "exit_depth"))
            leaving = f"{100 * accuracy:.1f} at {100 * depth:.0f} % depth"
        seconds = statistics.fmean(row["seconds"] for row in mine) / time_
        peak = f"{mine[0]['peak_bytes'] / memory:.2f}"
        costs.append((arm.name, leaving, peak, f"{seconds:.2f}", f"{mine[0]['rate']:g}"))
    headers = (
        ("arm", "accuracy, %", "gap", "exit 1", "paper, %"),
        ("arm", "leaving at 0.9", "memory", "time", "rate"),
    )
    return (
        ResultTable(f"{group.name}: accuracy", headers[0], tuple(right)),
        ResultTable(f"{group.name}: costs over backprop", headers[1], tuple(costs)),
    )


def _claims(rows: list[Row]) -> tuple[Claim, ...]:
    def difference(network: str, a: str, b: str) -> list[float]:
        pairs = zip(values(rows, network, a), values(rows, network, b), strict=True)
        return [x - y for x, y in pairs]

    results = [
        above(
            "mlp: diversity",
            "PoE + Diversity is not below backprop by half a point (+0.20 in the paper)",
            "the accuracy of diversity minus that of backprop",
            difference("mlp", "diversity", "backprop"),
            -0.005,
        ),
        above(
            "mlp: log-odds backprop fails",
            "without σ' backprop learns nothing (10.28 % in the paper)",
            "the accuracy of sigmoid backprop minus that of log-odds backprop",
            difference("mlp", "sigmoid backprop", "log-odds backprop"),
            0.5,
        ),
        above(
            "mlp: autoencoders fall behind",
            "local autoencoders lose points (6.93 in the paper)",
            "the accuracy of backprop minus that of autoencoders",
            difference("mlp", "backprop", "autoencoders"),
            0.01,
        ),
    ]
    for network in ("vgg", "resnet8"):
        results.append(
            above(
                f"{network}: flat fails",
                "flat PoE falls behind hierarchical PoE on convolutions",
                "the accuracy of hierarchical minus that of flat",
                difference(network, "hierarchical", "flat"),
            )
        )
        results.append(
            above(
                f"{network}: hierarchical keeps up",
                "hierarchical PoE stays within 3 points of backprop (paper: -1.25, VGG; -2.45, ResNet)",
                "the accuracy of hierarchical minus that of backprop",
                difference(network, "hierarchical", "backprop"),
                -0.03,
            )
        )
    return tuple(results)
