"""What a model loses when an interface's messages say nothing of their own row.

    zero       the message is 0
    shuffled   every row of a batch hears the message of the row before it: true messages, of another text
    mean       every row hears the mean over the batch: what all messages have in common

`silenced` changes what one region hears, and `ablated` gives the loss for each way and boundary, less the
loss with the messages as they are: nats a target, near 0 where nobody listens. Cost: a forward for each.
Limits: rows are changed within a batch, so it needs at least two; a message of zeros is one that a region may
never have seen, so `zero` may cost more than the message is worth. What the canvas alone would send, as the
residual form does (`BoundedRelay.empty`), stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.exec.forward import stage_logits
from topograd.interfaces.regions import Regions
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

Silence = Literal["zero", "shuffled", "mean"]


@contextmanager
def silenced(stack: Stack, how: Silence, name: str | None = None) -> Iterator[None]:
    """Within it, what is heard through the relay `name`, or by the last region, is changed."""
    relays = stack.learned_relays()
    relay: Any = relays[list(relays)[-1] if name is None else name]
    plain = relay.receive

    def receive(message: Tensor, ctx: LayerContext) -> Tensor:
        empty = relay.empty(ctx)
        told = message - empty
        if how == "zero":
            told = torch.zeros_like(told)
        elif how == "shuffled":
            told = told.roll(1, 0)
        else:
            told = told.mean(0, keepdim=True).expand_as(told)
        result: Tensor = plain(empty + told, ctx)
        return result

    relay.receive = receive
    try:
        yield
    finally:
        del relay.receive


@torch.no_grad()
def ablated(stack: Stack, topology: Topology | Plan, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """By way, what each boundary's silence adds to the loss, first boundary first."""
    regions = Regions.of(stack, topology)
    whole = _loss(regions, inputs, targets)
    costs: dict[str, list[float]] = {}
    for how in get_args(Silence):
        costs[how] = []
        for planned in regions.plan.stages[1:]:
            with silenced(stack, how, planned.inputs[0][0].relay):
                costs[how].append(_loss(regions, inputs, targets) - whole)
    return costs


def _loss(regions: Regions, inputs: Tensor, targets: Tensor) -> float:
    logits = stage_logits(regions.stack, regions.plan, regions.count - 1, inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten()).item()
