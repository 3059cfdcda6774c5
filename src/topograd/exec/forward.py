"""Running a plan forward: one stage, all the stages that a prediction needs, and the prediction itself.

The executor, the evaluation and decoding all go through `run_stage`, so that a stage's forward values are
the same wherever it runs; and through `predict`, so that a model predicts the same wherever it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.layer_state import History, KVState
from topograd.nn.relays import CausalRelay, Relay
from topograd.nn.stack import Bus, Stack
from topograd.topology.branches import predicting_plan
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan, PlannedStage, Port
from topograd.topology.prediction import Terms


class StageMemory:
    """The decoding memory of one stage: a state for each layer, a history for each relay that looks back."""

    def __init__(self, stack: Stack, planned: PlannedStage, rows: int, capacity: int) -> None:
        for i in planned.layers:
            if not hasattr(stack.layers[i], "new_state"):
                kind = type(stack.layers[i]).__name__
                raise StackError(f"{kind} layers cannot decode step by step; they lack new_state")
        self.layers = [stack.layers[i].new_state(rows, capacity) for i in planned.layers]  # type: ignore[operator]
        self.histories = histories_of(stack, planned, capacity)

    def run(self, stack: Stack, planned: PlannedStage, h: Tensor, bus: Bus) -> dict[int, Tensor]:
        """The layers on new positions: the hidden state behind each, by how many layers of the stack."""
        after = {}
        for layer, state in zip(planned.layers, self.layers, strict=True):
            after[layer + 1] = h = stack.layers[layer](h, bus, state)
        return after

    def rewind(self, marks: Sequence[int]) -> list[int]:
        """Go back to these positions, row by row, or before them; returns to where. The rest is replayed."""
        reached = list(marks)
        for memory in (*self.layers, *self.histories.values()):
            reached = [min(here, there) for here, there in zip(reached, memory.rewind(reached), strict=True)]
        return reached

    @property
    def copies(self) -> bool:
        """Whether the beginning of what it remembers can be copied: recurrent states and histories cannot."""
        return not self.histories and all(isinstance(state, KVState) for state in self.layers)

    def copy(self, source: StageMemory, length: int) -> None:
        """Remember what another one does of its first `length` positions, and nothing else."""
        for own, other in zip(self.layers, source.layers, strict=True):
            own.rewind([0])
            own.append(other.keys[:, :, :length], other.values[:, :, :length])

    def select(self, rows: Tensor) -> None:
        """Become the memory of these rows, in this order; a row may be taken several times."""
        for memory in (*self.layers, *self.histories.values()):
            memory.select(rows)


def histories_of(stack: Stack, planned: PlannedStage, capacity: int) -> dict[Port, History]:
    """A history for each of a stage's relays that look back."""
    ports = (*(port for port, _ in planned.inputs), *planned.sends)
    return {port: History(capacity) for port in ports if isinstance(stack.relay(port.relay), CausalRelay)}


def run_stage(
    stack: Stack,
    planned: PlannedStage,
    messages: Sequence[Tensor],
    bus: Bus,
    memory: StageMemory | None = None,
    lean: bool = False,
) -> tuple[Tensor, dict[Port, Tensor]]:
    """The stage's last hidden state, and what it sends through each of its ports.

    `messages` holds one tensor for each of `planned.inputs`; `memory` is there to decode. With `lean`
    only what the stage sends is wanted, and positions that nobody reads may be left out of its hidden state.
    """
    horizon, rows = _needed(stack, planned, bus) if lean and memory is None else (None, None)
    if horizon is not None:
        bus = stack.bus(bus.x0[:, :horizon], bus.inputs[:, :horizon])
    h = None
    for (port, _), message in zip(planned.inputs, messages, strict=True):
        received = _receive(stack.relay(port.relay), port, message, bus, memory)
        if horizon is not None:
            received = received[:, :horizon]
        h = received if h is None else h + received
    assert h is not None, "a stage without sources cannot be built"
    if memory is not None:
        tapped = memory.run(stack, planned, h, bus)
    else:
        tapped = {}
        for layer in planned.layers:
            module = stack.layers[layer]
            if rows is None or layer != planned.layers[-1]:
                h = module(h, bus)
            elif getattr(module, "takes_rows", False):
                h = module(h, bus, rows=rows)
            else:
                h = module(h, bus)[:, rows]
            tapped[layer + 1] = h
    h = tapped[planned.stage.stop]
    for (port, _), message in zip(planned.inputs, messages, strict=True):
        relay = stack.relay(port.relay)
        if hasattr(relay, "close"):  # a relay that chooses what goes back (`nn/inverse.py`)
            h = tapped[planned.stage.stop] = relay.close(h, message)
    sent = {}
    for port in planned.sends:
        relay = stack.relay(port.relay)
        if rows is not None:
            assert isinstance(relay, CausalRelay)
            sent[port] = relay.send_pooled(h, messages[0])
        else:
            sent[port] = _send(relay, port, tapped[port.layer], messages[0], bus, memory)
    return h, sent


def _receive(relay: Relay, port: Port, message: Tensor, bus: Bus, memory: StageMemory | None) -> Tensor:
    if memory is None or not isinstance(relay, CausalRelay):
        return relay.receive(message, bus)
    return relay.receive_next(memory.histories[port].append(message, bus.positions), bus)


def _send(
    relay: Relay, port: Port, h: Tensor, received: Tensor, bus: Bus, memory: StageMemory | None
) -> Tensor:
    if memory is None or not isinstance(relay, CausalRelay):
        return relay.send(h, received)
    return relay.send_next(memory.histories[port].append(h, bus.positions), received, bus)


def _needed(stack: Stack, planned: PlannedStage, bus: Bus) -> tuple[int | None, Tensor | None]:
    """How many leading positions the receiving stages need, and which they read alone; None means all."""
    relays = [stack.relay(port.relay) for port in planned.sends]
    looking = [relay for relay in relays if isinstance(relay, CausalRelay)]
    if not relays or len(looking) < len(relays):
        return None, None
    needs = [relay.needed(bus.inputs.shape[1]) for relay in looking]
    alone = len(needs) == 1 and planned.sends[0].layer == planned.stage.stop
    rows = needs[0][1] if alone else None
    return max(count for count, _ in needs), None if rows is None else rows.to(bus.inputs.device)


class StageStates:
    """The decoding memory of a plan: that of each stage, and the last token seen.

    All rows go on together and no stage lags behind: the plain form of `depth.cache.Cache`.
    """

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        batch: int,
        capacity: int,
        stages: Sequence[StageMemory] | None = None,
    ) -> None:
        if stages is None:
            stages = [StageMemory(stack, planned, batch, capacity) for planned in plan.stages]
        self.stages = stages
        """Torch's, unless they are given: another runtime's."""
        self.seen = [0] * len(plan.stages)
        """How many positions each stage has run; one that was not needed lags behind."""
        self.previous: Tensor | None = None
        self.length = 0

    def advance(self, stage: int, positions: int) -> StageMemory:
        """The memory of a stage that runs `positions` more; one that missed some before is refused."""
        if self.seen[stage] != self.length:
            raise StackError(
                f"stage {stage} has seen {self.seen[stage]} of {self.length} positions; "
                "ask for the same stages at every step"
            )
        self.seen[stage] += positions
        return self.stages[stage]


@torch.no_grad()
def stage_outputs(
    stack: Stack,
    plan: Plan,
    inputs: Tensor,
    stages: Iterable[int],
    states: StageStates | None = None,
) -> dict[int, Tensor]:
    """The last hidden state of each of `stages`, running only what they need."""
    return _outputs(stack, plan, inputs, stages, states=states)


def stage_logits(
    stack: Stack, plan: Plan, stage: int, inputs: Tensor, x0: Tensor | None = None, *, lean: bool = True
) -> Tensor:
    """What an exit after `stage` predicts, with its graph; from `x0` instead of the embedding.

    λ does not act here: gradients pass every boundary. `lean` as in `run_stage`, for the stages before it.
    """
    terms = plan.prediction.after(stage)
    outputs = _outputs(stack, plan, inputs, [j for j, _ in terms], x0=x0, lean=lean)
    return predict(stack, plan, outputs, terms)


class Reader(Protocol):
    """What has heads: a stack, or a runtime over one."""

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor: ...


def predict(
    stack: Reader, plan: Plan, outputs: Mapping[int, Tensor], terms: Terms, rows: Tensor | None = None
) -> Tensor:
    """Σ_j w_j z_j over the terms of a prediction, from the stages' outputs; on `rows` of the vocabulary."""
    total: Tensor | None = None
    for stage, weight in terms:
        z = stack.readout(outputs[stage], plan.stages[stage].head, rows)
        z = z if weight == 1 else weight * z
        total = z if total is None else total + z
    assert total is not None, "a prediction has a term"
    return total


class Predictor(nn.Module):
    """A stack and its plan as one module: inputs to the logits that the model predicts by."""

    def __init__(self, stack: Stack, topology: Plan | Topology | Configuration | Composition | str) -> None:
        super().__init__()
        self.stack = stack
        self.plan = predicting_plan(Plan.of(topology, len(stack.layers)))

    def outputs(self, inputs: Tensor, states: Mapping[int, Tensor] | None = None) -> dict[int, Tensor]:
        """The hidden states that the prediction reads; `states` by layer need not be computed."""
        wanted = [j for j, _ in self.plan.prediction.full]
        return _outputs(self.stack, self.plan, inputs, wanted, known=states)

    def forward(self, inputs: Tensor) -> Tensor:
        return predict(self.stack, self.plan, self.outputs(inputs), self.plan.prediction.full)


def needed_stages(
    plan: Plan, wanted: Iterable[int], known: Mapping[int, Tensor], learning: Iterable[int] = ()
) -> set[int]:
    """The stages that must run so that `wanted` are computed, where the hidden states `known` are given.

    A wanted stage whose last layer is known need not run, nor one whose messages are; `learning` ones run.
    """
    needed = set(learning)
    asked = set(wanted)
    for planned in reversed(plan.stages):
        heard = {port for later in plan.stages if later.index in needed for port, _ in later.inputs}
        missing = any(port in heard and not _is_known(port, known) for port in planned.sends)
        if missing or (planned.index in asked and planned.stage.stop not in known):
            needed.add(planned.index)
    return needed


def given_messages(plan: Plan, known: Mapping[int, Tensor]) -> dict[Port, Tensor]:
    """What stages send, as far as it is known."""
    ports = (port for planned in plan.stages for port in planned.sends)
    return {port: known[port.layer] for port in ports if _is_known(port, known)}


def _is_known(port: Port, known: Mapping[int, Tensor]) -> bool:
    return port.relay == "identity" and port.layer in known


def _outputs(
    stack: Stack,
    plan: Plan,
    inputs: Tensor,
    stages: Iterable[int],
    *,
    states: StageStates | None = None,
    x0: Tensor | None = None,
    lean: bool = True,
    known: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    wanted = set(stages)
    known = {layer: h.to(inputs.device) for layer, h in (known or {}).items()}
    needed = needed_stages(plan, wanted, known)
    previous, offset = (states.previous, states.length) if states else (None, 0)
    x0 = stack.embed(inputs, previous) if x0 is None else x0
    bus = stack.bus(x0, inputs, offset)
    messages = given_messages(plan, known)
    outputs = {k: known[plan.stages[k].stage.stop] for k in wanted - needed}
    for planned in plan.stages:
        if planned.index not in needed:
            continue
        received = [x0 if port.source == EMBEDDING else messages[port] for port, _ in planned.inputs]
        memory = None if states is None else states.advance(planned.index, inputs.shape[1])
        short = lean and planned.index not in wanted
        h, sent = run_stage(stack, planned, received, bus, memory, lean=short)
        messages.update(sent)
        for port in planned.forget:
            messages.pop(port, None)
        if planned.index in wanted:
            outputs[planned.index] = h
    if states:
        states.previous, states.length = inputs[:, -1], offset + inputs.shape[1]
    return outputs
