"""Experiment B: later stages also hear the input, detached.

Three partitions, each as a plain chain and with two input buses: `e0` adds the embedding to what a stage
hears from the one before (eq. 39, the sum), and `r0` adds a learned low-rank reading U V h of the hidden
state after the first layer. No gradient goes back through either.

A fair start and rate for `r0`. A relay beside another usually starts silent (U = 0) and relays learn slowly,
so that a bus would hardly be heard in a short training. Here U = Vᵀ at first, which lets a quarter of the
directions through unchanged, and the learning rate of the bus is the one of RATES with the least BPB of 2,2,2
on seed TUNING, which is not used again. Those trainings are rows too.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.5.1 (Def. 10.9), §10.7 (Experiment B). Cost: 30 trainings with the preset `small`.
Limits. A stage that follows directly on the first layer hears it anyway: in 1,3,2 the second stage has no
bus `r0`, the third does. U_k is read on the running sum of stages that were each trained to predict alone
(see `experiment_a.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from papers.outcome import Asked, Row
from papers.staged_runs import (
    SHALLOW,
    Arm,
    Sizes,
    chain,
    differences,
    mean,
    slopes,
    spread,
    tail_use,
    train_arms,
    values,
)
from papers.verdicts import Claim, Drawing, Found, Series, above
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import LowRank
from topograd.topology.dag import EMBEDDING, Edge

PARTITIONS = ("1,3,2", SHALLOW, "4,1,1")
BUSES = {"e0": Edge(EMBEDDING), "r0": Edge(0, layer=1, relay="low-rank")}
NAMES = {"e0": "the embedding", "r0": "a low-rank reading of the first layer"}
RATES = (1e-3, 4e-3, 2e-2)
"""Learning rates of the bus to choose from."""
TUNING = 100
"""The seed on which the rate is chosen."""


def with_bus(partition: str, bus: str | None) -> Arm:
    """The chain, with a bus where one is named."""
    arm = chain(partition, f"{partition} {bus or 'chain'}")
    if bus is None:
        return arm
    return replace(arm, topology=arm.topology.with_input_bus(BUSES[bus]), start=open_buses)


@torch.no_grad()
def open_buses(stack: GPT) -> None:
    """Let every low-rank reading through from the start: U = Vᵀ, an orthogonal projection."""
    for relay in stack.learned_relays().values():
        if isinstance(relay, LowRank):
            relay.up.weight.copy_(relay.down.weight.t())


ARMS = {bus: [with_bus(partition, bus) for partition in PARTITIONS] for bus in (None, *BUSES)}


def run(sizes: Sizes, args: Asked) -> Found:
    """Train the chains with and without buses, and judge."""
    arms = [arm for bus in ARMS.values() for arm in bus]
    total = len(RATES) + sizes.seeds * len(arms)
    tried = tune(sizes, replace(args, on_more=lambda done, _: args.on_more(done, total)))
    rate = min(tried, key=lambda row: row["bpb"])["relays"]
    tuned = [replace(arm, relays=rate) for arm in arms]
    behind = replace(args, on_more=lambda done, _: args.on_more(len(tried) + done, total))
    rows = train_arms(tuned, sizes, behind)
    return Found(
        [*tried, *rows],
        f"Chains, and the same with a detached input bus; r0 at the rate {rate:g}",
        ("arm", "BPB", "±", "Δ", "U of later stages"),
        tuple(_cells(rows, bus, i) for i in range(len(PARTITIONS)) for bus in ARMS),
        Drawing(
            "BPB by the depth of the first stage",
            "layers in the first stage",
            "bits per byte",
            tuple(_curve(rows, bus) for bus in ARMS),
        ),
        tuple(claim for bus in BUSES for claim in claims(rows, bus)),
    )


def tune(sizes: Sizes, args: Asked) -> list[Row]:
    """The bus r0 of equal stages at every rate, on the seed that is not used again."""
    arms = [replace(with_bus(SHALLOW, "r0"), name=f"{SHALLOW} r0 at {rate:g}", relays=rate) for rate in RATES]
    rows = train_arms(arms, sizes, args, seeds=[TUNING])
    return [{**row, "relays": rate} for rate, row in zip(RATES, rows, strict=True)]


def claims(rows: Sequence[Row], bus: str) -> tuple[Claim, ...]:
    """The three questions of the experiment, of one bus."""
    plain, inputs = (slopes(rows, ARMS[which]) for which in (None, bus))
    uses = zip(tail_use(rows, ARMS[bus]), tail_use(rows, ARMS[None]), strict=True)
    return (
        above(
            f"{bus}: better when shallow",
            f"BPB of {SHALLOW} improves with {NAMES[bus]} on the bus",
            f"BPB of {SHALLOW} without the bus minus with it",
            differences(rows, f"{SHALLOW} chain", f"{SHALLOW} {bus}"),
        ),
        above(
            f"{bus}: flatter slope",
            "the slope of BPB by the depth of the first stage flattens",
            "the slope's size without the bus minus with it, BPB for each layer,",
            [abs(a) - abs(b) for a, b in zip(plain, inputs, strict=True)],
        ),
        above(
            f"{bus}: tail use",
            "U_k of later stages rises",
            "the mean U_k of later stages with the bus minus without it, nats,",
            [with_it - without for with_it, without in uses],
        ),
    )


def _curve(rows: Sequence[Row], bus: str | None) -> Series:
    arms = ARMS[bus]
    name = "chain" if bus is None else f"bus: {NAMES[bus]}"
    return Series.of(name, [arm.depth for arm in arms], [values(rows, arm.name) for arm in arms])


def _cells(rows: Sequence[Row], bus: str | None, i: int) -> tuple[str, ...]:
    arm, base = ARMS[bus][i].name, ARMS[None][i].name
    used = tail_use(rows, [ARMS[bus][i]])
    against = "–" if bus is None else f"{mean(rows, arm) - mean(rows, base):+.4f}"
    return (arm, f"{mean(rows, arm):.4f}", spread(rows, arm), against, f"{sum(used) / len(used):+.4f}")
