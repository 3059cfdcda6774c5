"""The properties P1-P11 of a trained configuration, as numbers.

Statement. For stages k = 0..K-1 that predict, with logits z_k, on held-out text:

    P1   bpb, information_bits     I(h_L; y) >= H(y) - CE(z, y), in bits per token
    P2   gradient_depth            P4  activation_layers, peak_bytes      P5  pipeline_granularity
    P3   target_alignment          P7  update                             P8  update.forgetting
    P6   coordination              coupling cost over that of backprop
    P9   wand                      share of layers that early exits skip, when at most ε of the tokens change
         prefix                    top-1 accuracy at each exit, and the best within a budget of layers
    P10  composition_gain          min_k BPB(z_k) - min(BPB(Σ z_k), BPB(mean z_k)); 0 with one stage
    P11  specialist_capacity
    and  head_parameters (C_head), effective_rank and edge_ranks (§8.9, eq. 23), ece (§7.6), coupling_cost

The closed forms come from the plan (`topology/closed_forms.py`), the readings from one evaluation and
one pass over the logits, the rest from short probes on copies (`search/property_probes.py`).

Symbols and shapes. A `Text` has inputs and targets (rows, time). Everything returned is plain JSON.
Cost: about 5 evaluations and 40 training steps of 4 rows.
Source: "Stage-Partitioned Learning" §7.1-7.3, §8.9, §10.1 (eq. 30), §10.6; the exits are those of "Product of
Experts" §5.3 by flip rates. The paper gives P1, P3, P6-P8 and P11 in words; the formulas are ours.
Limits. H(y) is the entropy of the targets' frequencies, which is too small on little text. WAND thresholds
are read on the even rows and judged on the odd ones. Exits in the order of the stages: where branches are
parallel, an exit pays for every stage before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from topograd.depth.calibration import Calibration
from topograd.depth.exit_rules import agreement, exits, thresholds
from topograd.depth.readings import Readings, join, read
from topograd.errors import ConfigError
from topograd.memory import peak_step_bytes
from topograd.nn.stack import Stack
from topograd.search.property_probes import (
    backwards,
    prediction,
    specialist_capacity,
    target_alignment,
    update_discipline,
)
from topograd.topology import closed_forms as closed
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan, Port
from topograd.training.evaluation import RANK_TOKENS, Text, activation_rank, evaluate
from topograd.training.executor import train_step
from topograd.training.forward import run_stage, stage_outputs

ROWS = 4
"""Rows of text in a pass and in the step whose memory is measured."""


@dataclass(frozen=True)
class EdgeRank:
    """The effective rank of what one stage says and of what another makes of it."""

    stage: int
    source: int
    relay: str
    before: float
    after: float


def measure(
    stack: Stack,
    plan: Plan,
    text: Text,
    new: Text | None = None,
    *,
    budget: float = 0.5,
    eps: float = 0.01,
) -> dict[str, Any]:
    """Every property of the module's head. `new` is the text of the probes; by default `text`, backwards.

    `budget` is the share of the layers that a prefix may run, `eps` the share of tokens that WAND may change.
    """
    if not 0 < budget <= 1:
        raise ConfigError(f"budget is {budget}; it is a share of the layers, above 0 and at most 1")
    new = backwards(text) if new is None else new
    was_training = stack.training
    stack.eval()
    read_out = evaluate(stack, plan, text)
    readings, accuracy = _pass(stack, plan, text)
    batch = _first_rows(stack, text)
    layers = closed.exit_layers(plan)
    measured = {
        "bpb": read_out["bpb"],
        "information_bits": information(read_out["bpb"][prediction(plan)], text),
        **closed.closed_forms(plan),
        "target_alignment": target_alignment(stack, plan, *batch),
        "peak_bytes": step_bytes(stack, plan, *batch),
        "head_parameters": head_parameters(stack, plan),
        "update": asdict(update_discipline(stack, plan, text, new)),
        "wand": wand(readings, union_layers(plan), eps),
        "prefix": prefix(accuracy, layers, plan.topology.layers, budget),
        "composition_gain": composition_gain(read_out["bpb"]),
        "specialist_capacity": specialist_capacity(stack, plan, new),
        "effective_rank": read_out["effective_rank"],
        "edge_ranks": [asdict(rank) for rank in edge_ranks(stack, plan, text.inputs)],
        "ece": read_out["ece"],
    }
    stack.train(was_training)
    return measured


def information(bpb: float, text: Text) -> float:
    """H(y) - CE in bits per token, at least 0: what the prediction knows of the target (P1)."""
    counts = text.targets[text.targets != -100].unique(return_counts=True)[1].double()
    tokens = counts.sum().item()
    entropy = torch.special.entr(counts / tokens).sum().item() / math.log(2)
    return max(0.0, entropy - bpb * text.nbytes / tokens)


def step_bytes(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> int:
    """Peak memory of a training step beyond parameters and gradients (P4); no gradient is left behind."""
    learning = [p for p in stack.parameters() if p.requires_grad]
    peak = peak_step_bytes(lambda: train_step(stack, plan.topology, inputs, targets), learning)
    stack.zero_grad(set_to_none=True)
    return peak


def head_parameters(stack: Stack, plan: Plan) -> int:
    """Numbers in the heads: the shared matrix, where there is one to see, and what each stage has alone."""
    shared = stack.projection(0)
    own = sum(p.numel() for k in range(len(plan.stages)) for p in stack.head_parameters(k))
    return own + (0 if shared is None else shared.weight.numel())


def wand(readings: Readings, layers: Sequence[int], eps: float) -> dict[str, float]:
    """The share of layers that early exits skip on the odd rows, and how often they agree with full depth."""
    if readings.stages == 1:
        return {"gain": 0.0, "agreement": 1.0}
    even, odd = readings.split()
    if not len(even) or not len(odd):
        raise ConfigError("the text has one row; WAND needs one to calibrate on and one to measure on")
    left = exits(odd, thresholds(Calibration.of(even, step=0), "flip-rate", eps=eps))
    ran = torch.tensor(layers, dtype=torch.float64)[left].mean().item()
    return {"gain": 1 - ran / layers[-1], "agreement": agreement(odd, left)}


def union_layers(plan: Plan) -> list[int]:
    """For each predicting stage, the layers that have run when every exit up to it has been tried."""
    ran: set[int] = set()
    counts = []
    for k in plan.predicting():
        ran |= {needed.index for needed in plan.needed(k)}
        counts.append(sum(len(plan.stages[i].layers) for i in ran))
    return counts


def prefix(accuracy: Sequence[float], layers: Sequence[int], total: int, budget: float) -> dict[str, Any]:
    """Top-1 accuracy at each exit, and the best that `budget` of the layers can buy; 0 if no exit fits."""
    within = [right for right, count in zip(accuracy, layers, strict=True) if count <= budget * total]
    return {"accuracy": list(accuracy), "budget": budget, "within_budget": max(within, default=0.0)}


def composition_gain(bpb: dict[str, Any]) -> float:
    """By how many bits per byte pooling all the stages beats the best single one; below 0 where it loses."""
    if len(bpb["prefix"]) == 1:
        return 0.0
    return float(min(bpb["prefix"]) - min(bpb["sum"], bpb["mean"]))


@torch.no_grad()
def edge_ranks(stack: Stack, plan: Plan, inputs: Tensor) -> list[EdgeRank]:
    """r_eff before and after the relay of every edge between stages, on the first `RANK_TOKENS` tokens."""
    rows = max(RANK_TOKENS // inputs.shape[1], 1)
    inputs = inputs[:rows].to(next(stack.parameters()).device)
    x0 = stack.embed(inputs)
    bus = stack.bus(x0, inputs)
    spoken: dict[Port, Tensor] = {}
    ranks = []
    for planned in plan.stages:
        messages = [x0 if port.source == EMBEDDING else spoken[port] for port, _ in planned.hears]
        for (port, _), message in zip(planned.hears, messages, strict=True):
            if port.source != EMBEDDING:
                got = stack.relay(port.relay).receive(message, bus)
                both = (activation_rank(h.flatten(0, -2)) for h in (message, got))
                ranks.append(EdgeRank(planned.index, port.source, port.relay, *both))
        spoken.update(run_stage(stack, planned, messages, bus)[1])
    return ranks


@torch.no_grad()
def _pass(stack: Stack, plan: Plan, text: Text) -> tuple[Readings, list[float]]:
    """The readings of every exit, and how often its top token is the target.

    An exit's logits are its stage's own, or the sum so far where stages correct the ones before.
    """
    stages, device = plan.predicting(), next(stack.parameters()).device
    summed = prediction(plan) == "sum"
    parts = []
    for start in range(0, len(text.inputs), ROWS):
        inputs = text.inputs[start : start + ROWS].to(device)
        counted = (text.targets[start : start + ROWS] != -100).to(device)
        outputs = stage_outputs(stack, plan, inputs, stages)
        rows = torch.arange(start, start + len(inputs), device=device)[:, None].expand_as(inputs)
        logits = [stack.readout(outputs[k][counted], k) for k in stages]
        parts.append(read(list(accumulate(logits)) if summed else logits, rows[counted]))
    readings = join(parts)
    targets = text.targets[text.targets != -100].cpu()
    return readings, (readings.top == targets).double().mean(1).tolist()


def _first_rows(stack: Stack, text: Text) -> tuple[Tensor, Tensor]:
    device = next(stack.parameters()).device
    return text.inputs[:ROWS].to(device), text.targets[:ROWS].to(device)
