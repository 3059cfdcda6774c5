"""The training step of any topology: forward, losses and gradients, one stage at a time.

Every message that crosses an edge becomes a leaf of the receiving stage. The `GradientEngine` (`gradient.py`)
decides how the leaf's gradient is computed and when a stage's backward runs. x0 is a leaf too: its gradient
adds up over the stages, and the embedding's own backward runs once, at the end.

Some stages may run elsewhere (`parallel/`): then a `Transport` carries the messages, and every rank goes
through the stages in the same order, receiving from those that are not its own. Messages are sent as soon as
a stage's forward is done, before its loss and backward.

With `recompute` a layer keeps its input alone and runs again in the backward (`torch.utils.checkpoint`), with
the same random numbers: the same gradients bit for bit, a third more work.

With one stage this is backprop, bit for bit (Theorem 5.1). `tests/oracles/train_step.py` is the obvious
version: one graph, one backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.forward import given_messages, needed_stages, run_stage
from topograd.exec.gradient import Autograd, GradientEngine, Message, PendingStage, StepGraph, Transport
from topograd.exec.local_objectives import LocalObjective, StageView
from topograd.exec.objectives import Logits, Objective, every_nth, objectives_of, stage_loss, uses_prior
from topograd.nn.preparation import check_prepared
from topograd.nn.stack import LayerContext, Stack, check_stack
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import EdgeOutput, Plan, PlannedStage

AUTOGRAD = Autograd()


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
    transport: Transport | None = None,
    gradient: GradientEngine = AUTOGRAD,
    recompute: bool = False,
) -> Tensor:
    """Add the gradients of the training loss, times `scale`, to every `.grad`; return each stage's loss.

    inputs and targets (batch, time); targets of -100 are ignored. The losses (stages,) are unscaled; a
    stage without a loss of its own has nan, and so has one that runs elsewhere (`transport`). `objectives`
    replaces registered ones by name. `states` are known hidden states by layer:
    frozen stages do not run where these are all that is read of them. Nothing but `.grad` changes: a stack
    that lacks heads or relays of the topology raises StackError (`prepare` adds them).
    """
    check_stack(stack)
    for name, value in {"inputs": inputs, "targets": targets}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(setting=name, given=value, allowed="a torch.Tensor")
    plan = Plan.of(topology, len(stack.layers))
    check_prepared(stack, plan)
    graph = StepGraph(stack, plan, scale, transport, bool(states), recompute)
    gradient.begin(graph)
    embedded = stack.embed(inputs)
    x0 = embedded.detach().requires_grad_(embedded.requires_grad and not plan.frozen)
    per_stage = objectives_of(plan, objectives)
    known = {layer: h.to(x0.device, x0.dtype) for layer, h in (states or {}).items()}
    root = Message(x0, of_embedding=True)
    step = _Step(graph, gradient, per_stage, targets, teacher, stack.layer_context(x0, inputs), known, root)
    running = step.running(embedded.requires_grad)
    losses = []
    for planned in plan.stages:
        if transport is not None and planned.index not in transport.stages:
            step.receive_remote(planned)
            loss = None
        else:
            loss = step.run(planned, planned.index in running)
            gradient.after_stage(graph, planned.index)
            for output in planned.last_use:
                step.messages.pop(output, None)
        losses.append(x0.new_full((), torch.nan) if loss is None else loss)
    gradient.finish(graph)
    if root.gradient is not None:
        x0.grad = root.gradient if x0.grad is None else x0.grad + root.gradient
    if x0.grad is not None:
        embedded.backward(x0.grad)
    return torch.stack([loss.to(losses[-1].dtype) for loss in losses])


@dataclass
class _Step:
    """The forward of one step: the messages, outputs and losses of each stage."""

    graph: StepGraph
    gradient: GradientEngine
    objectives: Sequence[Objective]
    targets: Tensor
    teacher: Logits | None
    ctx: LayerContext
    known: Mapping[int, Tensor]
    root: Message
    """x0."""
    messages: dict[EdgeOutput, Message] = field(default_factory=dict)
    finished: list[tuple[int, Tensor]] = field(default_factory=list)
    """Heads and hidden states of earlier stages, where an objective reads them."""

    @property
    def keeps_finished(self) -> bool:
        return any(map(uses_prior, self.objectives))

    def running(self, embedding_learns: bool) -> set[int]:
        """The stages that must run: those that learn, and those whose outputs are needed and not known."""
        stack, plan = self.graph.stack, self.graph.plan
        if not self.known:
            return {planned.index for planned in plan.stages}
        frozen = 0  # leading layers that do not learn
        if plan.frozen or not embedding_learns:
            learns = (any(p.requires_grad for p in layer.parameters()) for layer in stack.layers)
            frozen = next((i for i, it_does in enumerate(learns) if it_does), len(stack.layers))
        learning = {p.index for p in plan.stages if not (p.stage.frozen or p.stage.stop <= frozen)}
        read = [p.index for p in plan.stages if p.scale > 0 or (self.keeps_finished and p.predicts)]
        return needed_stages(plan, read, self.known, learning)

    def receive_remote(self, planned: PlannedStage) -> None:
        """Receive the outputs that are needed here of a stage that runs elsewhere."""
        assert self.graph.transport is not None
        for output in self.graph.transport.incoming(planned.index):
            value = self.graph.transport.receive(output)
            self.messages[output] = Message(value.requires_grad_(self.gradient.crosses_ranks))
        if self.keeps_finished and planned.predicts and output_port(planned) in self.messages:
            self.finished.append((planned.head, self.messages[output_port(planned)].value))

    def run(self, planned: PlannedStage, runs: bool) -> Tensor | None:
        """The stage's forward; returns its loss, detached. With `runs` false its states are known."""
        graph, frozen = self.graph, planned.stage.frozen
        live = self.ctx if planned.live_bus else replace(self.ctx, x0=self.ctx.x0.detach())
        stage = PendingStage(planned, live)
        received: list[Tensor] = []
        with torch.set_grad_enabled(not frozen), _eval_if_frozen(graph.stack, planned):
            if runs:
                received = [self._receive(output, lam, stage) for output, lam in planned.inputs]
                again = graph.recompute and not frozen
                with self.gradient.forward(planned):
                    h, sent = run_stage(
                        graph.stack, planned, received, live, lean=not planned.predicts, recompute=again
                    )
            else:
                h = self.known.get(planned.stage.stop, self.ctx.x0)  # x0 where no stage reads it
                given = given_messages(graph.plan, self.known)
                sent = {output: value for output, value in given.items() if output.source == planned.index}
            if graph.transport is not None:
                for output, value in {output_port(planned): h, **sent}.items():
                    graph.transport.send(output, value.detach())
            if planned.scale > 0:
                stage.loss = self._loss(stage, received, h)
        stage.sent = {output: Message(value) for output, value in sent.items()}
        self.messages.update(stage.sent)
        if self.keeps_finished and planned.predicts:
            self.finished.append((planned.head, h.detach()))
        graph.pending[planned.index] = stage
        return None if stage.loss is None else stage.loss.detach()

    def _receive(self, output: EdgeOutput, grad_scale: float, stage: PendingStage) -> Tensor:
        """The message of `output` for the receiving stage: detached, a leaf, or x0 itself."""
        source = self.root if output.source == EMBEDDING else self.messages[output]
        if grad_scale == 0 or stage.planned.stage.frozen or not source.value.requires_grad:
            return source.value.detach()
        if source is self.root and grad_scale == 1:
            return source.value
        leaf = source.value.detach().requires_grad_()
        stage.leaves.append((leaf, grad_scale, source))
        return leaf

    def _loss(self, stage: PendingStage, received: Sequence[Tensor], h: Tensor) -> Tensor:
        stack, planned = self.graph.stack, stage.planned
        objective, targets = self.objectives[planned.index], every_nth(self.targets, planned.stage.every)
        if isinstance(objective, LocalObjective):
            return objective.of_stage(StageView(stack, planned, received[0].detach(), h, stage.ctx, targets))
        return stage_loss(stack, h, planned.head, objective, targets, self.finished, self.teacher)


@contextmanager
def _eval_if_frozen(stack: Stack, planned: PlannedStage) -> Iterator[None]:
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


def output_port(planned: PlannedStage) -> EdgeOutput:
    """The last hidden state of a stage, for objectives that use the logits of earlier stages."""
    return EdgeOutput(planned.index, planned.stage.stop, "identity")
