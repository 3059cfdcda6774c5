"""The training step of any topology: forward, losses and gradients, one stage at a time.

Every message that crosses an edge becomes a leaf of the receiving stage. The `GradientEngine` (`gradient.py`)
decides how the leaf's gradient is computed and when a stage's backward runs. x0 is a leaf too: its gradient
adds up over the stages, and the embedding's own backward runs once, at the end.

Some stages may run elsewhere (`parallel/`): then a `Transport` carries the messages, and every rank goes
through the stages in the same order, receiving from those that are not its own. Messages are sent as soon as
a stage's forward is done, before its loss and backward.

A stage whose gradient comes at a later step runs on copies of its weights, and keeps its graph until then, or
its input (`late.py`).

With `recompute` a layer keeps its input alone and runs again in the backward (`torch.utils.checkpoint`), with
the same random numbers: the same gradients bit for bit, a third more work.

With one stage this is backprop, bit for bit (Theorem 5.1). `tests/oracles/train_step.py` is the obvious
version: one graph, one backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.forward import given_messages, needed_stages, run_stage
from topograd.exec.gradient import (
    Autograd,
    GradientEngine,
    Leaf,
    Message,
    PendingStage,
    StepGraph,
    Transport,
    readers_elsewhere,
    sends_back,
)
from topograd.exec.late import LateBatch, LateQueue, check_late, with_weights
from topograd.exec.local_objectives import LocalObjective, StageView
from topograd.exec.objectives import Logits, Objective, every_nth, objectives_of, stage_loss, uses_prior
from topograd.exec.thin import Key
from topograd.nn.preparation import check_prepared
from topograd.nn.stack import Stack, check_stack
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import AnyPlan, EdgeOutput, Plan, PlannedStage

AUTOGRAD = Autograd()


def train_step(
    stack: Stack,
    topology: AnyPlan,
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
    draw: Key = (0, 0, 0),
    late: LateQueue | None = None,
) -> Tensor:
    """Add the gradients of the training loss, times `scale`, to every `.grad`; return each stage's loss.

    inputs and targets (batch, time); targets of -100 are ignored. The losses (stages,) are unscaled; a
    stage without a loss of its own has nan, and so has one that runs elsewhere (`transport`). `objectives`
    replaces registered ones by name. `states` are known hidden states by layer:
    frozen stages do not run where these are all that is read of them. `draw` (seed, step, number of the batch
    in it) seeds the rounding of gradients with few bits. Topologies with delays need a queue `late`, in which
    what is learned at later steps is kept. Nothing else but `.grad` changes: a stack that lacks heads or
    relays of the topology raises StackError (`prepare` adds them).
    """
    step = start_step(
        stack,
        topology,
        inputs,
        targets,
        teacher=teacher,
        objectives=objectives,
        scale=scale,
        states=states,
        transport=transport,
        gradient=gradient,
        recompute=recompute,
        draw=draw,
        late=late,
    )
    step.finish()
    return step.losses


def start_step(
    stack: Stack,
    topology: AnyPlan,
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
    draw: Key = (0, 0, 0),
    late: LateQueue | None = None,
) -> OpenStep:
    """The first half of `train_step`: all forwards, and the backwards that wait for nothing elsewhere."""
    check_stack(stack)
    for name, value in {"inputs": inputs, "targets": targets}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(setting=name, given=value, allowed="a torch.Tensor")
    plan = Plan.of(topology, len(stack.layers))
    check_prepared(stack, plan)
    per_stage = objectives_of(plan, objectives)
    extras = {"hidden states that are given": bool(states), "a teacher": teacher is not None}
    check_late(stack, plan, per_stage, extras=extras | {"no queue (late=LateQueue())": late is None})
    graph = StepGraph(stack, plan, scale, transport, bool(states), recompute, draw)
    gradient.begin(graph)
    step = OpenStep(graph, gradient, per_stage, inputs, targets, teacher, late or LateQueue())
    step.known = {layer: h.to(step.x0.device, step.x0.dtype) for layer, h in (states or {}).items()}
    step.forward()
    return step


@dataclass
class OpenStep:
    """A step under way on one batch: the messages, outputs and losses of each stage."""

    graph: StepGraph
    gradient: GradientEngine
    objectives: Sequence[Objective]
    inputs: Tensor
    targets: Tensor
    teacher: Logits | None
    late: LateQueue
    age: int = 0
    """Steps since the batch ran forward."""
    known: Mapping[int, Tensor] = field(default_factory=dict)
    """Hidden states that are given, by layer."""
    losses: Tensor = field(init=False)
    messages: dict[EdgeOutput, Message] = field(default_factory=dict)
    kept: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """The inputs of stages that learn at a later step; None is x0."""
    held: dict[int, tuple[PendingStage, dict[EdgeOutput, Message]]] = field(default_factory=dict)
    """Their graphs, with the messages that they received; empty where they run again instead."""
    awaiting: dict[EdgeOutput, Message] = field(default_factory=dict)
    """The messages of those stages."""
    finished: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """Heads and hidden states of earlier stages, where an objective reads them."""

    def __post_init__(self) -> None:
        with self._on_copies(() if self.graph.plan.embedding_lateness > self.age else None):
            self.embedded = self.graph.stack.embed(self.inputs)
            learns = self.embedded.requires_grad and not self.graph.plan.frozen
            self.x0 = self.embedded.detach().requires_grad_(learns)
            self.root = Message(self.x0, of_embedding=True)
            self.ctx = self.graph.stack.layer_context(self.x0, self.inputs)

    def _on_copies(self, stages: Sequence[int] | None) -> AbstractContextManager[object]:
        """What runs within it, in these stages or outside of all, has a graph that outlives the step."""
        graph = self.graph
        if stages is None or self.age or graph.recompute:
            return nullcontext()
        return with_weights(self.late.places(graph.stack), self.late.copies(graph.stack, graph.plan, stages))

    def forward(self) -> None:
        """Run the stages forward, and every backward that is ready."""
        graph, transport = self.graph, self.graph.transport
        running = self.running(self.embedded.requires_grad)
        losses = []
        for planned in graph.plan.stages:
            if transport is not None and planned.index not in transport.stages:
                self.receive_remote(planned)
                loss = None
            else:
                loss = self.run(planned, planned.index in running)
                if planned.index in graph.pending:
                    self.gradient.after_stage(graph, planned.index)
                for output in planned.last_use:
                    self.messages.pop(output, None)
            losses.append(self.x0.new_full((), torch.nan) if loss is None else loss)
        self.losses = torch.stack([loss.to(losses[-1].dtype) for loss in losses])

    def finish(self) -> None:
        """Run the rest of the backwards: of this batch, and of earlier ones that are due with it."""
        graph = self.graph
        self._await_gradients()
        self.gradient.finish(graph)
        if graph.plan.late:
            step, number = self.late.step, graph.draw[2]
            earlier = self.late.left(number)
            batch = LateBatch(step, number, graph.scale, self.inputs, self.targets, self.kept)
            _take_gradients(batch, self.awaiting)
            self._close(batch)
            for other in earlier:
                self._run_again(other)
        else:
            self._embedding_backward()

    def _run_again(self, batch: LateBatch) -> None:
        """The backwards of an earlier batch that are due, of its graphs or with the weights that ran it."""
        now, age = self.graph, self.late.step - batch.step
        due = [p for p in now.plan.stages if p.index in batch.received and now.plan.lateness[p.index] == age]
        step = self.late.take(batch, now.plan)
        if step is None:
            draw = (now.draw[0], batch.step, batch.number)
            graph = StepGraph(now.stack, now.plan, batch.scale, now.transport, False, now.recompute, draw)
            given = (batch.inputs, batch.targets, None, self.late)
            with with_weights(self.late.places(now.stack), batch.weights):
                step = OpenStep(graph, self.gradient, self.objectives, *given, age)
        step.age = age
        step.x0.grad = None if batch.x0_gradient is None else batch.x0_gradient.clone()
        for planned in reversed(due):
            step._learn(planned, batch)
        step._close(batch)

    def _learn(self, planned: PlannedStage, batch: LateBatch) -> None:
        """The backward of one stage of an earlier batch, with the gradient that has come."""
        received = batch.received.pop(planned.index)
        gradients = {output: batch.gradients.pop(output, None) for output in planned.outputs}
        if planned.stage.frozen:  # it was halted since
            return
        if planned.index in self.held:
            self._backward_late(planned, *self.held.pop(planned.index), gradients, batch)
            return
        places = self.late.places(self.graph.stack)
        with with_weights(places, batch.weights):  # also in the backward, which may run layers again
            self._backward_late(planned, *self._ran_again(planned, received), gradients, batch)

    def _backward_late(
        self,
        planned: PlannedStage,
        stage: PendingStage,
        inputs: Mapping[EdgeOutput, Message],
        gradients: Mapping[EdgeOutput, Tensor | None],
        batch: LateBatch,
    ) -> None:
        """A late stage's backward; what it sends back here is kept with its batch."""
        for output, gradient in gradients.items():
            stage.sent[output].gradient = gradient
        transport = self.graph.transport
        for reader, number, output in readers_elsewhere(self.graph.plan, transport, planned.index):
            now = self.graph.plan.lateness[reader] == self.age  # the others' came before
            if transport is not None and now and sends_back(self.graph.plan, reader, planned.index):
                stage.sent[output].add_gradient(transport.receive_back(reader, number))
        stage.backward(self.graph.scale)
        _take_gradients(batch, inputs)

    def _ran_again(
        self, planned: PlannedStage, received: Sequence[Tensor | None]
    ) -> tuple[PendingStage, dict[EdgeOutput, Message]]:
        """A stage's graph, from its inputs, with these as messages."""
        for (output, _), value in zip(planned.inputs, received, strict=True):
            if value is not None:
                learns = not self.graph.plan.stages[output.source].stage.frozen
                self.messages[output] = Message(value.detach().requires_grad_(learns))
        inputs = dict(self.messages)
        self.run(planned, True)
        self.messages.clear()
        return self.graph.pending.pop(planned.index), inputs

    def _close(self, batch: LateBatch) -> None:
        """The embedding's backward, if it is its turn; else the gradient of x0 is kept."""
        if self.age == self.graph.plan.embedding_lateness:
            self._embedding_backward()
            batch.x0_gradient = None
        else:
            batch.x0_gradient = self._x0_gradient()
        if self.age == 0:
            self.late.add(batch)
        self.late.keep(self.graph.stack, self.graph.plan, batch)
        if not self.graph.recompute:
            self.late.hold(batch, self)

    def _x0_gradient(self) -> Tensor | None:
        if self.root.gradient is not None:
            self.x0.grad = self.root.gradient if self.x0.grad is None else self.x0.grad + self.root.gradient
            self.root.gradient = None
        return self.x0.grad

    def _embedding_backward(self) -> None:
        gradient = self._x0_gradient()
        if gradient is not None:
            self.embedded.backward(gradient)

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
            here = (p for p in self.graph.plan.stages if p.index in self.graph.transport.stages)
            wanted = any(lam > 0 and out == output for p in here for out, lam in p.inputs)
            self.messages[output] = Message(value.requires_grad_(wanted and not planned.stage.frozen))
        if self.keeps_finished and planned.predicts and output_port(planned) in self.messages:
            self.finished[planned.index] = planned.head, self.messages[output_port(planned)].value

    def run(self, planned: PlannedStage, runs: bool) -> Tensor | None:
        """The stage's forward; returns its loss, detached. With `runs` false its states are known."""
        graph, frozen = self.graph, planned.stage.frozen
        later = not frozen and graph.plan.lateness[planned.index] > self.age
        again = later and graph.recompute
        live = self.ctx if planned.live_bus else replace(self.ctx, x0=self.ctx.x0.detach())
        stage = PendingStage(planned, live)
        received: list[Tensor] = []
        with (
            torch.set_grad_enabled(not (frozen or again)),
            _eval_if_frozen(graph.stack, planned),
            self._on_copies((planned.index,) if later else None),
        ):
            if runs:
                received = [self._receive(i, stage) for i in range(len(planned.inputs))]
                recompute = graph.recompute and not frozen
                with self.gradient.forward(planned):
                    h, sent = run_stage(
                        graph.stack, planned, received, live, lean=not planned.predicts, recompute=recompute
                    )
            else:
                h = self.known.get(planned.stage.stop, self.ctx.x0)  # x0 where no stage reads it
                given = given_messages(graph.plan, self.known)
                sent = {output: value for output, value in given.items() if output.source == planned.index}
            if graph.transport is not None and self.age == 0:
                for output, value in {output_port(planned): h, **sent}.items():
                    graph.transport.send(output, value.detach())
            if planned.scale > 0:
                stage.loss = self._loss(stage, received, h)
        if again:
            sent = {output: value.detach().requires_grad_() for output, value in sent.items()}
        stage.sent = {output: Message(value) for output, value in sent.items()}
        self.messages.update(stage.sent)
        if self.keeps_finished and planned.predicts:
            self.finished[planned.index] = planned.head, h.detach()
        if later:
            self._keep(stage, received, again)
        else:
            graph.pending[planned.index] = stage
        return None if stage.loss is None else stage.loss.detach()

    def _keep(self, stage: PendingStage, received: Sequence[Tensor], again: bool) -> None:
        """What a stage needs to learn at a later step: its input and, unless it runs again, its graph."""
        planned = stage.planned
        self.awaiting |= stage.sent
        outputs = [output for output, _ in planned.inputs]
        values = zip(outputs, received, strict=True)
        self.kept[planned.index] = [None if o.source == EMBEDDING else h.detach() for o, h in values]
        if not again:
            heard = {output: self.messages[output] for output in outputs if output.source != EMBEDDING}
            self.held[planned.index] = stage, heard

    def _receive(self, number: int, stage: PendingStage) -> Tensor:
        """The message of a source for the receiving stage: detached, a leaf, or x0 itself."""
        planned = stage.planned
        output, grad_scale = planned.inputs[number]
        source = self.root if output.source == EMBEDDING else self.messages[output]
        if grad_scale == 0 or planned.stage.frozen or not source.value.requires_grad:
            return source.value.detach()
        if source is self.root and grad_scale == 1:
            return source.value
        leaf = source.value.detach().requires_grad_()
        key = (*self.graph.draw, planned.index, number)
        transport, wire = self.graph.transport, None
        if transport is not None and output.source not in (EMBEDDING, *transport.stages):
            # an engine that computes across ranks has no need of a wire back
            wire = (
                None if self.gradient.crosses_ranks else partial(transport.send_back, planned.index, number)
            )
        bits = planned.stage.sources[number].grad_bits
        stage.leaves.append(Leaf(leaf, grad_scale, source, bits, key, wire))
        return leaf

    def _await_gradients(self) -> None:
        """Receive what stages elsewhere send back for this batch now, and run the backwards that waited."""
        graph, transport = self.graph, self.graph.transport
        if transport is None or self.gradient.crosses_ranks:
            return
        for index in sorted(graph.pending, reverse=True):
            readers = readers_elsewhere(graph.plan, transport, index)
            if index not in graph.pending or not readers:
                continue
            for reader, number, output in readers:
                if sends_back(graph.plan, reader, index):
                    graph.pending[index].sent[output].add_gradient(transport.receive_back(reader, number))
            graph.waiting[index] -= len({reader for reader, _, _ in readers})
            self.gradient.after_stage(graph, index)

    def _loss(self, stage: PendingStage, received: Sequence[Tensor], h: Tensor) -> Tensor:
        stack, planned = self.graph.stack, stage.planned
        objective, targets = self.objectives[planned.index], every_nth(self.targets, planned.stage.every)
        if isinstance(objective, LocalObjective):
            return objective.of_stage(StageView(stack, planned, received[0].detach(), h, stage.ctx, targets))
        weights = dict.fromkeys([*self.finished, planned.index], 1.0)
        if getattr(objective, "pooled", False):
            weights = dict(self.graph.plan.prediction.after(planned.index))
        prior = [(*self.finished[k], w) for k, w in weights.items() if k in self.finished]
        own = weights[planned.index]
        return stage_loss(stack, h, planned.head, objective, targets, prior, self.teacher, own)


def _take_gradients(batch: LateBatch, messages: Mapping[EdgeOutput, Message]) -> None:
    """Move what messages have received into what is kept of their batch."""
    for output, message in messages.items():
        if message.gradient is not None:
            batch.add_gradient(output, message.gradient)
        message.gradient = None


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
