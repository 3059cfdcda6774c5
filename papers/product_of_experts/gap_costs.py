"""What a step of an arm costs beside backprop's: time, memory, traffic between stages.

Time is that of whole steps, optimizers included, on random weights, arms taking turns. With one thread it is
the processor's time, which other work on the machine disturbs less; with several it is the clock's. Memory is
the peak of a step's forward and backward (`memory.py`). A topology that changes over a training is read in
each quarter of it, and counts with the mean of the times and the largest of the memories. Traffic is what
would cross the borders between devices for each token, in hidden states: one forward for each border, and one
back where gradient crosses.

Cost: about 10 steps of every arm. Limits: one machine, one thread count; the ratios of small models say
little of large ones, where heads weigh less (docs/results has them by width).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from papers.kept import Row
from papers.product_of_experts.gap_arms import BACKPROP, PARTITION, Arm
from papers.product_of_experts.gap_training import Training
from topograd.memory import peak_step_bytes
from topograd.runs.config import TrainConfig
from topograd.timing import Spread, ratio, read_in_turns
from topograd.topology.closed_forms import activation_layers, gradient_depth
from topograd.topology.composition import Composition
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan

QUARTERS = (0.125, 0.375, 0.625, 0.875)
ROUNDS = 9


def costs(arms: Sequence[Arm], config: TrainConfig, batch: tuple[Tensor, Tensor]) -> dict[str, Row]:
    """Each arm's step beside backprop's: the ratio of times with its quartiles, and that of memories."""
    steps: dict[str, Callable[[], object]] = {}
    parts: dict[str, list[str]] = {}
    memory: dict[str, int] = {}
    for arm in arms:
        inputs, targets = (torch.cat([part] * arm.batch) for part in batch)
        shares = (0.0,) if arm.at is None else QUARTERS
        parts[arm.name] = [f"{arm.name} at {share}" for share in shares]
        peaks = []
        for name, share in zip(parts[arm.name], shares, strict=True):
            training = Training(arm, config)
            steps[name] = partial(training.learn, share, inputs, targets)
            steps[name]()  # so that gradients and momenta exist
            peaks.append(_peak(training, share, inputs, targets))
        memory[arm.name] = max(peaks)
    seconds = read_in_turns({name: partial(_seconds, step) for name, step in steps.items()}, ROUNDS, warmup=1)
    for name, pieces in parts.items():
        seconds[name] = [statistics.fmean(turn) for turn in zip(*(seconds[p] for p in pieces), strict=True)]
    return {
        arm.name: {
            "step_time": ratio(seconds, arm.name, BACKPROP).as_dict(),
            "seconds": Spread.of(seconds[arm.name]).median,
            "memory_ratio": memory[arm.name] / memory[BACKPROP],
            "memory_bytes": memory[arm.name],
            **shape(arm),
        }
        for arm in arms
    }


def shape(arm: Arm) -> Row:
    """What follows from the topology alone, the largest over a training; traffic is its mean."""
    plans = [_plan(arm.topology_at(share)) for share in ((0.0,) if arm.at is None else QUARTERS)]
    return {
        "gradient_depth": max(gradient_depth(plan) for plan in plans),
        "activation_layers": max(activation_layers(plan) for plan in plans),
        "traffic": statistics.fmean(traffic(plan.topology) for plan in plans),
    }


def traffic(topology: Topology) -> float:
    """Hidden states for each token between devices that hold one stage each; backprop's as if cut alike.

    >>> traffic(Topology.chain("6")), traffic(Topology.chain("2,2,2"))
    (4.0, 2.0)
    """
    if len(topology.stages) == 1:
        return 4.0 * (Composition.parse(PARTITION).stages - 1) / 2
    heads = [k for k, stage in enumerate(topology.stages) if k in _heard(topology)]
    edges = [e for s in topology.stages for e in s.sources if e.source in heads and not _private(topology, s)]
    return float(sum(1 + (edge.grad_scale > 0) for edge in edges))


def _heard(topology: Topology) -> set[int]:
    return {e.source for stage in topology.stages for e in stage.sources if e.source != EMBEDDING}


def _private(topology: Topology, stage: object) -> bool:
    """Whether a stage is a private decoder: nobody hears it, and another stage goes on behind it."""
    k = next(i for i, other in enumerate(topology.stages) if other is stage)
    return k not in _heard(topology) and k != len(topology.stages) - 1


def _plan(topology: Topology) -> Plan:
    return Plan.of(topology, topology.layers)


def _seconds(step: Callable[[], object]) -> float:
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = now()
    step()
    return now() - began


def _peak(training: Training, share: float, inputs: Tensor, targets: Tensor) -> int:
    parameters = list(training.stack.parameters())
    return peak_step_bytes(lambda: training.gradients(share, inputs, targets), parameters)
