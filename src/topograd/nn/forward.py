"""Running a plan forward: one stage, or all the stages that a prediction needs.

The executor, the evaluation and decoding all go through `run_stage`, so that a stage's forward values are
the same wherever it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.relays import RELAYS, Relay
from topograd.nn.stack import Bus, Stack
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan, PlannedStage, Port


def relay_of(relays: Mapping[str, Relay], name: str) -> Relay:
    """The relay called `name`."""
    if name not in relays:
        raise StackError(f"relay {name!r} is unknown; known are {sorted(relays)}")
    return relays[name]


def run_stage(
    stack: Stack,
    planned: PlannedStage,
    messages: Sequence[Tensor],
    bus: Bus,
    relays: Mapping[str, Relay] = RELAYS,
    states: Sequence[Any] | None = None,
) -> tuple[Tensor, dict[Port, Tensor]]:
    """The stage's last hidden state, and what it sends through each of its ports.

    `messages` holds one tensor for each entry of `planned.hears`; `states` one state per layer, to decode.
    """
    h = None
    for (port, _), message in zip(planned.hears, messages, strict=True):
        received = relay_of(relays, port.relay).receive(message, bus)
        h = received if h is None else h + received
    assert h is not None, "a stage without sources cannot be built"
    tapped = {}
    for i, layer in enumerate(planned.layers):
        module = stack.layers[layer]
        h = module(h, bus) if states is None else module(h, bus, states[i])
        tapped[layer + 1] = h
    heard = messages[0]
    sent = {port: relay_of(relays, port.relay).send(tapped[port.layer], heard) for port in planned.sends}
    return h, sent


class StageStates:
    """The decoding memory of a plan: a state for each layer of each stage, and the last token seen.

    All rows go on together and no stage lags behind: the plain form of `depth.cache.Cache`.
    """

    def __init__(self, stack: Stack, plan: Plan, batch: int, capacity: int) -> None:
        first = stack.layers[0]
        if not hasattr(first, "new_state"):
            raise StackError(f"{type(first).__name__} layers cannot decode step by step; they lack new_state")
        self.layers = [
            [stack.layers[i].new_state(batch, capacity) for i in planned.layers]  # type: ignore[operator]
            for planned in plan.stages
        ]
        self.seen = [0] * len(plan.stages)
        """How many positions each stage has run; one that was not needed lags behind."""
        self.previous: Tensor | None = None
        self.length = 0

    def truncate(self, length: int, previous: Tensor | None) -> None:
        """Forget everything from position `length` on; `previous` (batch,) is the token before it."""
        for stage, states in enumerate(self.layers):
            if self.seen[stage] > length:
                for state in states:
                    state.truncate(length)
                self.seen[stage] = length
        self.previous, self.length = previous, length


@torch.no_grad()
def stage_outputs(
    stack: Stack,
    plan: Plan,
    inputs: Tensor,
    stages: Sequence[int],
    relays: Mapping[str, Relay] = RELAYS,
    states: StageStates | None = None,
) -> dict[int, Tensor]:
    """The last hidden state of each of `stages`, running only what they need."""
    needed = {p.index for stage in stages for p in plan.needed(stage)}
    previous, offset = (states.previous, states.length) if states else (None, 0)
    x0 = stack.embed(inputs, previous)
    bus = stack.bus(x0, inputs, offset)
    spoken: dict[Port, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for planned in plan.stages:
        if planned.index not in needed:
            continue
        messages = [x0 if port.source == EMBEDDING else spoken[port] for port, _ in planned.hears]
        memory = None
        if states:
            if states.seen[planned.index] != offset:
                raise StackError(
                    f"stage {planned.index} has seen {states.seen[planned.index]} of {offset} positions; "
                    "ask for the same stages at every step"
                )
            states.seen[planned.index] += inputs.shape[1]
            memory = states.layers[planned.index]
        h, sent = run_stage(stack, planned, messages, bus, relays, memory)
        spoken.update(sent)
        for port in planned.forget:
            spoken.pop(port, None)
        if planned.index in stages:
            outputs[planned.index] = h
    if states:
        states.previous, states.length = inputs[:, -1], offset + inputs.shape[1]
    return outputs
