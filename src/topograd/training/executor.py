"""One training step of any topology: forward, losses and gradients, one stage at a time.

A stage's backward runs as soon as its forward is done, unless a later stage sends gradient back to it; then
it waits for the last of those. So with λ = 0 on every edge, one stage's activations live at a time. Every
message that crosses an edge becomes a leaf of the listening stage, and its gradient, times λ, is handed to
the speaking stage's backward: D_λ of "Stage-Partitioned Learning" eq. 26. The embedding stream x0 is a
leaf too: its gradient adds up over the stages, and the embedding's own backward runs once, at the end.

With one stage this is backprop, bit for bit (Theorem 5.1). `reference/executor.py` is the obvious version:
one graph, one backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan, PlannedStage, Port
from topograd.training.forward import run_stage
from topograd.training.objectives import OBJECTIVES, Logits, Objective, objectives_of, stage_loss


def prepare(stack: Stack, topology: Topology) -> Plan:
    """Compile `topology` for `stack`, and make the stack fit it.

    Heads that the topology calls for and the stack lacks are added (zero, so that no output changes), and
    parameters that only frozen stages use stop asking for gradients, until you say otherwise. Call it
    before you build an optimizer.
    """
    plan = Plan.of(topology, len(stack.layers))
    if topology.heads == "per-stage":
        stack.add_heads(len(plan.stages))
    if plan.frozen:
        learning = [planned for planned in plan.stages if not planned.stage.frozen]
        modules = [stack.layers[i] for planned in learning for i in planned.layers]
        heard = {port.relay for planned in learning for port, _ in planned.hears}
        modules += [relay for name, relay in stack.own_relays().items() if name in heard]
        kept = {id(p) for module in modules for p in module.parameters()}
        kept |= {id(p) for planned in learning for p in stack.head_parameters(planned.index)}
        for parameter in stack.parameters():
            if id(parameter) not in kept:
                parameter.requires_grad_(False)
    return plan


@dataclass
class _Spoken:
    """A message: its value, within the speaker's graph as long as that lives, and what came back for it."""

    value: Tensor
    gradient: Tensor | None = None

    def answer(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass
class _Open:
    """A stage whose backward has not run yet."""

    planned: PlannedStage
    loss: Tensor | None
    sent: dict[Port, _Spoken]
    leaves: list[tuple[Tensor, float, _Spoken]] = field(default_factory=list)


def train_step(
    stack: Stack,
    topology: Topology,
    inputs: Tensor,
    targets: Tensor,
    *,
    teacher: Logits | None = None,
    objectives: Mapping[str, Objective] = OBJECTIVES,
    scale: float = 1.0,
) -> Tensor:
    """Add the gradients of the training loss, times `scale`, to every `.grad`; return each stage's loss.

    inputs and targets (batch, time); targets of -100 are ignored. The losses (stages,) are unscaled; a
    stage without a loss of its own has nan.
    """
    plan = prepare(stack, topology)
    embedded = stack.embed(inputs)
    x0 = embedded.detach().requires_grad_(embedded.requires_grad and not plan.frozen)
    bus = stack.bus(x0, inputs)
    detached_bus = replace(bus, x0=x0.detach())
    stream = _Spoken(x0)
    spoken: dict[Port, _Spoken] = {}
    waiting = {planned.index: planned.listeners for planned in plan.stages}
    open_stages: dict[int, _Open] = {}
    finished: list[tuple[int, Tensor]] = []
    losses: list[Tensor] = []
    asked = objectives_of(plan, objectives)
    keep = any(objective.uses_prior for objective in asked)
    for planned in plan.stages:
        opened = _Open(planned, None, {})
        messages = [_hear(port, lam, spoken, stream, opened) for port, lam in planned.hears]
        heard_bus = bus if planned.live_bus else detached_bus
        with torch.set_grad_enabled(not planned.stage.frozen):
            h, sent = run_stage(stack, planned, messages, heard_bus, lean=not planned.predicts)
            if planned.scale > 0:
                objective = asked[planned.index]
                opened.loss = stage_loss(stack, h, planned.index, objective, targets, finished, teacher)
        opened.sent = {port: _Spoken(value) for port, value in sent.items()}
        spoken.update(opened.sent)
        losses.append(x0.new_tensor(float("nan")) if opened.loss is None else opened.loss.detach())
        if keep and planned.predicts:
            finished.append((planned.index, h.detach()))
        open_stages[planned.index] = opened
        del h, sent, messages
        _close_ready(plan, planned.index, open_stages, waiting, scale)
        for port in planned.forget:
            spoken.pop(port, None)
    _close_embedding(embedded, x0, stream)
    return torch.stack([loss.to(losses[-1].dtype) for loss in losses])


def _hear(
    port: Port, transmissivity: float, spoken: Mapping[Port, _Spoken], stream: _Spoken, opened: _Open
) -> Tensor:
    """The message at `port`, as the listening stage sees it: detached, a leaf, or x0 itself."""
    source = stream if port.source == EMBEDDING else spoken[port]
    if transmissivity == 0 or opened.planned.stage.frozen or not source.value.requires_grad:
        return source.value.detach()
    if source is stream and transmissivity == 1:
        return source.value
    leaf = source.value.detach().requires_grad_()
    opened.leaves.append((leaf, transmissivity, source))
    return leaf


def _close_ready(
    plan: Plan, index: int, open_stages: dict[int, _Open], waiting: dict[int, int], scale: float
) -> None:
    """Run the backward of stage `index` if nothing will answer it any more, then of whatever that frees."""
    ready = [index] if not waiting[index] else []
    while ready:
        done = ready.pop()
        _backward(open_stages.pop(done), scale)
        for source in plan.gradient_sources(done):
            waiting[source] -= 1
            if not waiting[source]:
                ready.append(source)


def _backward(opened: _Open, scale: float) -> None:
    """Backward of one stage; afterwards its messages are plain values and its graph is gone."""
    roots: list[Tensor] = []
    gradients: list[Tensor] = []
    if opened.loss is not None and opened.loss.requires_grad:
        roots.append(opened.loss)
        gradients.append(opened.loss.new_tensor(opened.planned.scale * scale))
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
            source.answer(leaf.grad * transmissivity)


def _close_embedding(embedded: Tensor, x0: Tensor, stream: _Spoken) -> None:
    """The embedding's own backward, with all that the stages said about x0."""
    if stream.gradient is not None:
        x0.grad = stream.gradient if x0.grad is None else x0.grad + stream.gradient
    if x0.grad is not None:
        embedded.backward(x0.grad)
