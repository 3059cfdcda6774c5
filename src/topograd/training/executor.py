"""One training step of any topology: forward, losses and gradients, one stage at a time.

A stage's backward runs as soon as its forward is done, unless a later stage sends gradient back to it; then
it waits for the last of those. So with λ = 0 on every edge, one stage's activations live at a time. Every
message that crosses an edge becomes a leaf of the receiving stage, and its gradient, times λ, is handed to
the sending stage's backward: D_λ of "Stage-Partitioned Learning" eq. 26. The embedding stream x0 is a
leaf too: its gradient adds up over the stages, and the embedding's own backward runs once, at the end.

Where gradient reaches the next stage only (`Topology.reach`), what goes back along an edge is the gradient of
the receiving stage's own loss. A stage that itself waits for gradient hands that back as soon as its forward
is done, by a pass through its graph to its inputs alone; its own backward comes later, with everything that
it hears. So two stages live at a time, nothing runs forward twice, and the cost is that pass: a third of a
stage, for stages that have both a stage before and one behind them.

Some stages may run elsewhere (`parallel/`): then a `Wire` carries the messages, and every place goes through
the stages in the same order, receiving from those that are not its own. What a stage sends leaves as soon as
its forward is done, before its loss and backward.

With one stage this is backprop, bit for bit (Theorem 5.1). `tests/oracles/executor.py` is the obvious
version: one graph, one backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from topograd.exec.forward import given_messages, needed_stages, run_stage
from topograd.nn.preparation import check_prepared
from topograd.nn.stack import Bus, Stack
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan, PlannedStage, Port
from topograd.training.local_objectives import LocalObjective, StageView
from topograd.training.objectives import (
    CrossEntropy,
    Logits,
    Objective,
    every_nth,
    objectives_of,
    stage_loss,
)


class Wire(Protocol):
    """What a step needs of the stages that run elsewhere."""

    stages: Collection[int]
    """Those that run here."""

    def incoming(self, stage: int) -> Collection[Port]:
        """What of a stage elsewhere is wanted here."""

    def receive(self, port: Port) -> Tensor:
        """The next message of `port`, without a graph; waits for it."""

    def send(self, port: Port, value: Tensor) -> None:
        """Hand a message to whoever wants it; returns at once."""


@dataclass
class _Message:
    """What crosses an edge: its value, in the sender's graph as long as that lives, and its gradient."""

    value: Tensor
    gradient: Tensor | None = None

    def add_gradient(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass
class _Open:
    """A stage whose backward has not run yet."""

    planned: PlannedStage
    loss: Tensor | None
    sent: dict[Port, _Message]
    leaves: list[tuple[Tensor, float, _Message]] = field(default_factory=list)
    answered: bool = False
    """Whether the stages before it have its gradient already."""


def train_step(
    stack: Stack,
    topology: Plan | Topology | Configuration | Composition | str,
    inputs: Tensor,
    targets: Tensor,
    *,
    teacher: Logits | None = None,
    objectives: Mapping[str, Objective] | None = None,
    scale: float = 1.0,
    states: Mapping[int, Tensor] | None = None,
    wire: Wire | None = None,
) -> Tensor:
    """Add the gradients of the training loss, times `scale`, to every `.grad`; return each stage's loss.

    inputs and targets (batch, time); targets of -100 are ignored. The losses (stages,) are unscaled; a
    stage without a loss of its own has nan, and so has one that runs elsewhere (`wire`). `objectives`
    replaces registered ones by name. `states` are hidden states by layer (`training/hidden_states.py`):
    frozen stages are not run where these are all that is heard of them. Nothing but `.grad` changes: a stack
    that lacks what the topology calls for is refused (`prepare` adds it).
    """
    plan = Plan.of(topology, len(stack.layers))
    check_prepared(stack, plan)
    embedded = stack.embed(inputs)
    x0 = embedded.detach().requires_grad_(embedded.requires_grad and not plan.frozen)
    bus = stack.bus(x0, inputs)
    detached_bus = replace(bus, x0=x0.detach())
    stream = _Message(x0)
    messages: dict[Port, _Message] = {}
    waiting = {planned.index: planned.listeners for planned in plan.stages}
    open_stages: dict[int, _Open] = {}
    finished: list[tuple[int, Tensor]] = []
    losses: list[Tensor] = []
    asked = objectives_of(plan, objectives)
    keep = any(objective.uses_prior for objective in asked)
    known = {layer: h.to(x0.device, x0.dtype) for layer, h in (states or {}).items()}
    given, running = given_messages(plan, known), _running(stack, plan, known, embedded, keep)
    for planned in plan.stages:
        if wire is not None and planned.index not in wire.stages:
            messages |= {port: _Message(wire.receive(port)) for port in wire.incoming(planned.index)}
            if keep and planned.predicts and output_port(planned) in messages:
                finished.append((planned.head, messages[output_port(planned)].value))
            losses.append(x0.new_full((), torch.nan))
            continue
        opened = _Open(planned, None, {})
        own_bus = bus if planned.live_bus else detached_bus
        wanted = every_nth(targets, planned.stage.every)
        received: list[Tensor] = []
        with torch.set_grad_enabled(not planned.stage.frozen), _still(stack, planned):
            if planned.index in running:
                received = [_receive(port, lam, messages, stream, opened) for port, lam in planned.inputs]
                h, sent = run_stage(stack, planned, received, own_bus, lean=not planned.predicts)
            else:
                h = known.get(planned.stage.stop, x0)  # x0 where nobody reads it
                sent = {port: value for port, value in given.items() if port.source == planned.index}
            if wire is not None:
                for port, value in {output_port(planned): h, **sent}.items():
                    wire.send(port, value.detach())
            if planned.scale > 0:
                objective = asked[planned.index]
                if isinstance(objective, LocalObjective):
                    opened.loss = objective.of_stage(_view(stack, planned, received, h, own_bus, wanted))
                else:
                    opened.loss = stage_loss(stack, h, planned.head, objective, wanted, finished, teacher)
        opened.sent = {port: _Message(value) for port, value in sent.items()}
        messages.update(opened.sent)
        losses.append(x0.new_full((), torch.nan) if opened.loss is None else opened.loss.detach())
        if keep and planned.predicts:
            finished.append((planned.head, h.detach()))
        open_stages[planned.index] = opened
        del h, sent, received
        _close_ready(plan, planned.index, open_stages, waiting, stream, scale)
        for port in planned.forget:
            messages.pop(port, None)
    _close_embedding(embedded, x0, stream)
    return torch.stack([loss.to(losses[-1].dtype) for loss in losses])


def _running(
    stack: Stack, plan: Plan, states: Mapping[int, Tensor], embedded: Tensor, keep: bool
) -> set[int]:
    """The stages that must run: those that learn, and of the others those of which `states` say too little.

    Without states these are all.
    """
    if not states:
        return {planned.index for planned in plan.stages}
    still = 0 if embedded.requires_grad and not plan.frozen else _trunk(stack)
    learning = {p.index for p in plan.stages if not (p.stage.frozen or p.stage.stop <= still)}
    read = [p.index for p in plan.stages if p.scale > 0 or (keep and p.predicts)]
    return needed_stages(plan, read, states, learning)


def _trunk(stack: Stack) -> int:
    """How many leading layers do not learn."""
    for index, layer in enumerate(stack.layers):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return index
    return len(stack.layers)


def _view(
    stack: Stack, planned: PlannedStage, received: Sequence[Tensor], h: Tensor, bus: Bus, targets: Tensor
) -> StageView:
    def cross_entropy() -> Tensor:
        return stage_loss(stack, h, planned.head, CrossEntropy(), targets)

    return StageView(stack, planned, received[0].detach(), h, bus, targets, cross_entropy)


@contextmanager
def _still(stack: Stack, planned: PlannedStage) -> Iterator[None]:
    """Within it, the layers of a frozen stage run as in inference: BatchNorm's running means do not move."""
    frozen = planned.layers if planned.stage.frozen else ()
    moving = [m for i in frozen for m in stack.layers[i].modules() if m.training]
    for module in moving:
        module.training = False
    try:
        yield
    finally:
        for module in moving:
            module.training = True


def output_port(planned: PlannedStage) -> Port:
    """The last hidden state of a stage as it is, which objectives that correct earlier stages read."""
    return Port(planned.index, planned.stage.stop, "identity")


def _receive(
    port: Port, transmissivity: float, messages: Mapping[Port, _Message], stream: _Message, opened: _Open
) -> Tensor:
    """The message at `port`, as the receiving stage sees it: detached, a leaf, or x0 itself."""
    source = stream if port.source == EMBEDDING else messages[port]
    if transmissivity == 0 or opened.planned.stage.frozen or not source.value.requires_grad:
        return source.value.detach()
    if source is stream and transmissivity == 1:
        return source.value
    leaf = source.value.detach().requires_grad_()
    opened.leaves.append((leaf, transmissivity, source))
    return leaf


def _close_ready(
    plan: Plan,
    index: int,
    open_stages: dict[int, _Open],
    waiting: dict[int, int],
    stream: _Message,
    scale: float,
) -> None:
    """Run the backward of stage `index` if no more gradient comes back to it, then of whatever that frees."""
    ready = [index] if not waiting[index] else []
    if not ready and plan.topology.reach == "next":
        _answer(open_stages[index], stream, scale)
        ready = _freed(plan, open_stages[index], waiting)
    while ready:
        opened = open_stages.pop(ready.pop())
        _backward(opened, scale)
        ready += _freed(plan, opened, waiting)


def _freed(plan: Plan, opened: _Open, waiting: dict[int, int]) -> list[int]:
    """The stages to which no more gradient comes, now that `opened` has sent its own; none a second time."""
    sources = [] if opened.answered else plan.gradient_sources(opened.planned.index)
    opened.answered = True
    for source in sources:
        waiting[source] -= 1
    return [source for source in sources if not waiting[source]]


def _answer(opened: _Open, stream: _Message, scale: float) -> None:
    """Send back the gradient of the stage's own loss, and no other; its graph stays for its own backward."""
    inner = [place for place in opened.leaves if place[2] is not stream]
    opened.leaves = [place for place in opened.leaves if place[2] is stream]
    if opened.loss is None or not opened.loss.requires_grad or not inner:
        return
    start = opened.loss.new_full((), opened.planned.scale * scale)
    leaves = [leaf for leaf, _, _ in inner]
    found = torch.autograd.grad(opened.loss, leaves, start, retain_graph=True, allow_unused=True)
    for gradient, (_, transmissivity, source) in zip(found, inner, strict=True):
        if gradient is not None:
            source.add_gradient(gradient * transmissivity)


def _backward(opened: _Open, scale: float) -> None:
    """Backward of one stage; afterwards its messages are plain values and its graph is gone."""
    roots: list[Tensor] = []
    gradients: list[Tensor] = []
    if opened.loss is not None and opened.loss.requires_grad:
        roots.append(opened.loss)
        gradients.append(opened.loss.new_full((), opened.planned.scale * scale))
    for message in opened.sent.values():
        if message.gradient is not None:
            roots.append(message.value)
            gradients.append(message.gradient)
        message.gradient = None
    if roots:
        torch.autograd.backward(roots, gradients)
    for message in opened.sent.values():
        message.value = message.value.detach()
    for leaf, transmissivity, source in opened.leaves:
        if leaf.grad is not None:
            source.add_gradient(leaf.grad * transmissivity)


def _close_embedding(embedded: Tensor, x0: Tensor, stream: _Message) -> None:
    """The embedding's own backward, with the gradients of all stages by x0."""
    if stream.gradient is not None:
        x0.grad = stream.gradient if x0.grad is None else x0.grad + stream.gradient
    if x0.grad is not None:
        embedded.backward(x0.grad)
