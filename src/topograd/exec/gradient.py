"""Gradient engines: the protocol, and autograd.

A step (`train_step.py`) runs the stages forward. Every stage leaves a graph of its own, from the messages
that it receives, which are leaves, to its loss and the messages that it sends. An engine decides how the
gradient of a message is computed, and when a stage's backward runs.

`Autograd` runs a stage's backward as soon as its forward is done, unless a later stage sends gradient back to
it; then it waits for the last of those. So with λ = 0 on every edge, one stage's activations live at a time.
The gradient of a leaf, times λ, is added to its message: D_λ of "Stage-Partitioned Learning" eq. 26. Where
the edge has few bits, it is rounded first (`thin.py`). A stage that a gradient reaches at a later step
only is not pending in its own: it runs again then (`late.py`).

Where gradient reaches the next stage only (`Topology.reach`), what goes back along an edge is the gradient of
the receiving stage's own loss. A stage that itself waits for gradient sends that back as soon as its forward
is done, by a pass through its graph to its inputs alone; its own backward comes later, with everything that
it receives. So two stages live at a time, nothing runs forward twice, and the cost is that pass: a third of a
stage, for stages that have both a stage before and one behind them.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError
from topograd.exec.thin import Key, rounded
from topograd.nn.stack import LayerContext, Stack
from topograd.registry import Registry
from topograd.topology.plan import EdgeOutput, Plan, PlannedStage


class Transport(Protocol):
    """Messages to and from stages that run elsewhere."""

    @property
    def stages(self) -> Collection[int]:
        """The stages that run here."""

    def incoming(self, stage: int) -> Collection[EdgeOutput]:
        """The outputs of a stage elsewhere that are needed here."""

    def receive(self, output: EdgeOutput) -> Tensor:
        """The next message of `output`, without a graph; waits for it."""

    def send(self, output: EdgeOutput, value: Tensor) -> None:
        """Send a message to its receivers; returns at once."""

    def send_back(self, stage: int, number: int, gradient: Tensor, key: Key) -> None:
        """Send the gradient of source `number` of a stage here to where that source runs, in the edge's bits
        with draws seeded by `key`; returns at once."""

    def receive_back(self, stage: int, number: int) -> Tensor:
        """The next gradient of source `number` of a stage elsewhere; waits for it."""


@dataclass
class Message:
    """A tensor that crosses an edge: its value, in the sender's graph while that lives, and its gradient."""

    value: Tensor
    gradient: Tensor | None = None
    of_embedding: bool = False
    """Whether this is x0, whose backward comes last."""

    def add_gradient(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(frozen=True)
class Leaf:
    """An input of a stage with gradient."""

    tensor: Tensor
    grad_scale: float
    source: Message
    """The message whose gradient it adds to."""
    bits: int = 32
    key: Key = ()
    """What its rounding is seeded by."""
    wire: Callable[[Tensor, Key], None] | None = None
    """Sends it, where the message came from elsewhere."""

    def send(self, gradient: Tensor | None) -> None:
        """Add what crosses the edge of the leaf's gradient to the message, here or elsewhere."""
        if self.wire is not None:  # where it is waited for, even if it is nothing
            whole = torch.zeros_like(self.tensor) if gradient is None else gradient * self.grad_scale
            self.wire(whole, self.key)
        elif gradient is not None:
            self.source.add_gradient(rounded(gradient * self.grad_scale, self.bits, self.key))


@dataclass
class PendingStage:
    """A stage whose backward has not run yet."""

    planned: PlannedStage
    ctx: LayerContext
    """As the stage sees it: its x0 carries gradient, or not."""
    loss: Tensor | None = None
    sent: dict[EdgeOutput, Message] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    grads_sent: bool = False
    """Whether the stages before it already have its gradient."""

    def backward(self, scale: float) -> None:
        """Run its backward; afterwards its messages are plain values and its graph is gone."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
            gradients.append(self.loss.new_full((), self.planned.scale * scale))
        for message in self.sent.values():
            if message.gradient is not None:
                roots.append(message.value)
                gradients.append(message.gradient)
            message.gradient = None
        if roots:
            torch.autograd.backward(roots, gradients)
        for message in self.sent.values():
            message.value = message.value.detach()
        for leaf in self.leaves:
            leaf.send(leaf.tensor.grad)


@dataclass
class StepGraph:
    """The state of one step, for its engine."""

    stack: Stack
    plan: Plan
    scale: float = 1.0
    transport: Transport | None = None
    known: bool = False
    """Whether hidden states are given, so that some stages do not run."""
    recompute: bool = False
    """Whether layers keep their inputs alone and run again in the backward."""
    draw: Key = (0, 0, 0)
    """What rounding is seeded by: the run's seed, the step, and the number of this batch in it."""
    pending: dict[int, PendingStage] = field(default_factory=dict)
    """The stages that ran here, in order, while their backward has not."""
    waiting: dict[int, int] = field(init=False)
    """The number of later stages that have not yet sent gradient back to each stage."""

    def __post_init__(self) -> None:
        self.waiting = {planned.index: planned.num_grad_consumers for planned in self.plan.stages}
        for name, module in self.stack.layers.named_modules() if self.recompute else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                raise ConfigError(
                    f"recompute is on and layers.{name} is a {type(module).__name__}, whose "
                    "running means would move twice in a step",
                    setting="recompute",
                    given=True,
                    remedy="leave recompute out",
                )


def readers_elsewhere(
    plan: Plan, transport: Transport | None, stage: int
) -> list[tuple[int, int, EdgeOutput]]:
    """The edges with gradient from `stage` to stages elsewhere: reader, number of its source, output."""
    if transport is None:
        return []
    return [
        (planned.index, number, output)
        for planned in plan.stages
        if planned.index not in transport.stages
        for number, (output, lam) in enumerate(planned.inputs)
        if output.source == stage and lam > 0
    ]


def sends_back(plan: Plan, reader: int, stage: int) -> bool:
    """Whether gradient comes along such an edge: not where one of the two was halted."""
    return not (plan.stages[reader].stage.frozen or plan.stages[stage].stage.frozen)


class GradientEngine(Protocol):
    """The computation of gradients across edges."""

    crosses_ranks: ClassVar[bool]
    """Whether gradient goes back to stages that run elsewhere."""

    def begin(self, graph: StepGraph) -> None:
        """Called before anything runs; raises for what the engine does not take."""

    def forward(self, planned: PlannedStage) -> AbstractContextManager[object]:
        """The layers of a stage run within it."""

    def after_stage(self, graph: StepGraph, index: int) -> None:
        """Called when stage `index` is pending and its messages are sent."""

    def finish(self, graph: StepGraph) -> None:
        """Called when every stage has run; afterwards every gradient but the embedding's is added."""


class Autograd:
    """PyTorch autograd: a stage's backward runs when it has all gradients of its outputs."""

    crosses_ranks: ClassVar[bool] = False

    def begin(self, graph: StepGraph) -> None:
        """It takes everything."""

    def forward(self, planned: PlannedStage) -> AbstractContextManager[object]:
        return nullcontext()

    def after_stage(self, graph: StepGraph, index: int) -> None:
        """Run the stage's backward if no more gradient comes back to it, then those that become ready."""
        ready = [index] if not graph.waiting[index] else []
        if not ready and graph.plan.topology.reach == "next":
            _send_early_grads(graph.pending[index], graph.scale)
            ready = _newly_ready(graph, graph.pending[index])
        while ready:
            stage = graph.pending.pop(ready.pop())
            stage.backward(graph.scale)
            ready += _newly_ready(graph, stage)

    def finish(self, graph: StepGraph) -> None:
        """No backward is left to run."""


BACKWARDS: Registry[Callable[..., GradientEngine]] = Registry(
    "backward engine", {"autograd": "topograd.exec.gradient:Autograd"}
)
"""Engines by name; packages above declare more."""


def _newly_ready(graph: StepGraph, stage: PendingStage) -> list[int]:
    """The stages to which no more gradient comes, now that `stage` has sent its own; none a second time."""
    sources = [] if stage.grads_sent else graph.plan.gradient_sources(stage.planned.index)
    stage.grads_sent = True
    for source in sources:
        graph.waiting[source] -= 1
    return [source for source in sources if not graph.waiting[source] and source in graph.pending]


def _send_early_grads(stage: PendingStage, scale: float) -> None:
    """Send back the gradient of the stage's own loss, and no other; its graph stays for its own backward."""
    inner = [leaf for leaf in stage.leaves if not leaf.source.of_embedding]
    stage.leaves = [leaf for leaf in stage.leaves if leaf.source.of_embedding]
    if stage.loss is None or not stage.loss.requires_grad or not inner:
        return
    start = stage.loss.new_full((), stage.planned.scale * scale)
    leaves = [leaf.tensor for leaf in inner]
    gradients = torch.autograd.grad(stage.loss, leaves, start, retain_graph=True, allow_unused=True)
    for gradient, leaf in zip(gradients, inner, strict=True):
        leaf.send(gradient)
