"""Batches whose gradient reaches some stages at a later step: what is kept of them, and for how long.

Statement. Stage k learns from the batch of step t at step t + τ_k, τ_k = max over the stages j that send it
gradient of τ_j + delay (`Plan.lateness`). Its gradient is the true one of the weights that ran the batch
forward. So a stage with τ_k > 0 runs forward on copies of its weights, because optimizers change weights in
place; its graph lives until step t + τ_k, when its backward runs, with its own loss and the gradient that has
come. Its own loss waits for that step too: one backward for each batch. The embedding's backward runs once
for each batch, when the last stage that sends gradient to x0 has run.

Its input and the copies are kept beside the graph. From those it runs again, forward and backward, with the
same numbers bit for bit, where the graph is not there: with a step's `recompute`, in a run that was resumed,
and in a step that is repeated because a stage broke in it.

Symbols: t step of a batch, m its number within the step, τ lateness in steps, age = steps since t.

Cost: the copies; with `recompute` one more forward of each late stage. Kept: τ_k graphs of stage k, or with
`recompute` τ_k inputs (batch, time, width), of a stage that reads the embedding its tokens alone; and τ_k
copies of what learns in it, of the head and of the embedding.

Nothing of a batch is changed in place and a step works on copies of the records, so that a step that fails
leaves the queue as it was. `tests/oracles/late.py` has the obvious version: a list of one-graph gradients.

Limits: layers must compute the same twice (no dropout, no BatchNorm), and objectives may read the stage's
own logits and the targets alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError
from topograd.exec.gradient import Transport, readers_elsewhere, sends_back
from topograd.exec.local_objectives import LocalObjective
from topograd.exec.objectives import Objective, uses_prior
from topograd.nn.stack import Stack
from topograd.topology.plan import EdgeOutput, Plan

if TYPE_CHECKING:
    from topograd.exec.train_step import OpenStep

CHANGING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Layers that compute something else when they run again."""


@dataclass
class LateBatch:
    """What is kept of a batch until all of it is learned."""

    step: int
    number: int
    """Its number within the step."""
    scale: float
    inputs: Tensor
    targets: Tensor
    received: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Of each stage that has not learned from it, its inputs; None is x0."""
    gradients: dict[EdgeOutput, Tensor] = field(default_factory=dict)
    """Of the messages of those stages, what has come."""
    x0_gradient: Tensor | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The parameters that ran it, by name."""

    def add_gradient(self, output: EdgeOutput, gradient: Tensor) -> None:
        known = self.gradients.get(output)
        self.gradients[output] = gradient if known is None else known + gradient


class LateQueue:
    """The batches of a training that are not learned whole, by step and number."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], LateBatch] = {}
        self.step = 0
        self.count = 1
        self._open: dict[tuple[int, int], LateBatch] = {}
        self._copies: dict[str, Tensor] = {}
        self._live: dict[tuple[int, int], OpenStep] = {}
        self._held: dict[tuple[int, int], OpenStep] = {}
        self._places: Places | None = None

    def begin(self, step: int, count: int = 1) -> None:
        """Step number `step` begins, or begins again: what was done since the last `commit` is dropped. It
        has `count` batches, on all replicas."""
        self.step, self.count = step, count
        self._copies, self._held, self._places = {}, {}, None
        self._open = {
            key: replace(batch, received=dict(batch.received), gradients=dict(batch.gradients))
            for key, batch in self.batches.items()
        }

    def commit(self) -> None:
        """The step is done."""
        self.batches, self._copies = self._open, {}
        self._live |= self._held

    def hold(self, batch: LateBatch, live: OpenStep) -> None:
        """Keep the graphs of a batch, if the step is committed, until they are taken."""
        if (batch.step, batch.number) in self._open:
            self._held[batch.step, batch.number] = live

    def take(self, batch: LateBatch, plan: Plan) -> OpenStep | None:
        """The graphs of a batch, once: a step that is repeated, or that halts a stage, finds none."""
        live = self._live.pop((batch.step, batch.number), None)
        return live if live is not None and live.graph.plan == plan else None

    def add(self, batch: LateBatch) -> None:
        self._open[batch.step, batch.number] = batch

    def left(self, number: int) -> list[LateBatch]:
        """The batches with this number of which some is left to learn, oldest first; with those of steps
        that had more batches, as before a resumption with fewer replicas."""
        return [self._open[key] for key in sorted(self._open) if key[1] % self.count == number]

    def keep(self, stack: Stack, plan: Plan, batch: LateBatch) -> None:
        """Give a batch the weights that it still needs, or drop it where it needs none."""
        age = self.step - batch.step
        if not batch.received and age >= plan.embedding_lateness:
            self._open.pop((batch.step, batch.number), None)
        elif age:
            left = self.places(stack).of(plan, batch.received)
            batch.weights = {name: w for name, w in batch.weights.items() if name in left}
        else:
            batch.weights = self.copies(stack, plan, batch.received)

    def copies(self, stack: Stack, plan: Plan, stages: Iterable[int]) -> dict[str, Tensor]:
        """The weights of these stages as they are in this step, by name."""
        own = self.places(stack).of(plan, stages)
        for name in own.keys() - self._copies.keys():
            self._copies[name] = own[name].detach().clone()
        return {name: self._copies[name] for name in own}

    def places(self, stack: Stack) -> Places:
        """Where the stack's parameters are in this step."""
        if self._places is None:
            self._places = Places(stack)
        return self._places

    # As a checkpoint keeps it

    def tensors(self, owner: int) -> dict[str, Tensor]:
        """Everything, by name; the gradient of x0 is named by `owner`, the first stage that runs here."""
        found: dict[str, Tensor] = {}
        for (step, number), batch in self.batches.items():
            place = f"late/{step}/{number}"
            found[f"{place}/scale"] = torch.tensor([batch.scale], dtype=torch.float64)
            found |= {f"{place}/inputs": batch.inputs, f"{place}/targets": batch.targets}
            for k, values in batch.received.items():
                found[f"{place}/given/{k}"] = torch.tensor([value is not None for value in values])
                found |= {f"{place}/received/{k}/{i}": v for i, v in enumerate(values) if v is not None}
            for output, gradient in batch.gradients.items():
                found[f"{place}/gradient/{output.source}/{output.layer}/{output.relay}"] = gradient
            if batch.x0_gradient is not None:
                found[f"{place}/x0/{owner}"] = batch.x0_gradient
            found |= {f"late/{step}/weights/{name}": w for name, w in batch.weights.items()}
        return found

    def load(self, tensors: Mapping[str, Tensor], stages: Collection[int], device: torch.device) -> None:
        """Restore what `tensors` gave: in one of several processes, what belongs to its `stages`."""
        self.batches, self._live = {}, {}
        own = {name: t.to(device) for name, t in sorted(tensors.items()) if name.startswith("late/")}
        for name, scale in own.items():
            if name.endswith("/scale"):
                place = name.removesuffix("/scale")
                step, number = map(int, place.split("/")[1:])
                inputs, targets = own[f"{place}/inputs"], own[f"{place}/targets"]
                batch = LateBatch(step, number, scale.item(), inputs, targets)
                _fill(batch, place, own, stages)
                weights = f"late/{step}/weights/"
                batch.weights = {n.removeprefix(weights): t for n, t in own.items() if n.startswith(weights)}
                self.batches[step, number] = batch


def _fill(batch: LateBatch, place: str, own: Mapping[str, Tensor], stages: Collection[int]) -> None:
    """What came in and what has come back of a batch."""
    for name, tensor in own.items():
        if not name.startswith(f"{place}/"):
            continue
        kind, _, rest = name.removeprefix(f"{place}/").partition("/")
        if kind not in ("given", "gradient", "x0") or int(rest.split("/")[0]) not in stages:
            continue
        if kind == "given":
            k = int(rest)
            each = enumerate(tensor.tolist())
            batch.received[k] = [own[f"{place}/received/{k}/{i}"] if given else None for i, given in each]
        elif kind == "gradient":
            source, layer, relay = rest.split("/", 2)
            batch.add_gradient(EdgeOutput(int(source), int(layer), relay), tensor)
        else:
            batch.x0_gradient = tensor if batch.x0_gradient is None else batch.x0_gradient + tensor


class _Copy(torch.autograd.Function):
    """A copy of a parameter, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Places:
    """What learns in a stack by name, with the tables of modules that hold it and the layers that have it.

    A walk through all modules takes as long as a small layer, so there is one a step.
    """

    def __init__(self, stack: Stack) -> None:
        tables: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for table in (module._parameters for module in stack.modules()):
            for key, parameter in table.items():
                tables.setdefault(id(parameter), []).append((table, key))
        layers: dict[int, set[int]] = {}
        for i, layer in enumerate(stack.layers):
            for parameter in layer.parameters():
                layers.setdefault(id(parameter), set()).add(i)
        learning = ((name, p) for name, p in stack.named_parameters() if p.requires_grad)
        self.known = {name: (p, tables[id(p)], layers.get(id(p), set())) for name, p in learning}

    def of(self, plan: Plan, stages: Iterable[int]) -> dict[str, nn.Parameter]:
        """What learns in these stages, and outside of all layers."""
        own = {i for k in stages for i in plan.stages[k].layers}
        return {name: p for name, (p, _, layers) in self.known.items() if not layers or layers & own}


@contextmanager
def with_weights(places: Places, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the modules compute with these values; gradients go to the same parameters as ever."""
    own = [(*places.known[name][:2], weight) for name, weight in weights.items() if name in places.known]
    with torch.enable_grad():
        copies = [(tables, _Copy.apply(p, weight)) for p, tables, weight in own]
    try:
        for tables, copy in copies:
            for table, key in tables:
                table[key] = copy
        yield
    finally:
        for parameter, tables, _ in own:
            for table, key in tables:
                table[key] = parameter


def collect_gradients(queue: LateQueue, plan: Plan, transport: Transport, numbers: Collection[int]) -> None:
    """At the end of a step, receive what stages elsewhere sent back in it for stages that learn later."""
    for number in numbers:
        for batch in queue.left(number):
            age = queue.step - batch.step
            for k in batch.received:
                for reader, source, output in readers_elsewhere(plan, transport, k):
                    later = plan.lateness[reader] == age < plan.lateness[k]
                    if later and sends_back(plan, reader, k):
                        batch.add_gradient(output, transport.receive_back(reader, source))


def check_late(
    stack: Stack, plan: Plan, objectives: Sequence[Objective], *, extras: Mapping[str, bool]
) -> None:
    """Raise ConfigError for what cannot be run again at a later step; `extras` are settings that are on."""
    if not plan.late:
        return
    delay = max(edge.delay for stage in plan.topology.stages for edge in stage.sources)
    for name, given in extras.items():
        if given:
            raise ConfigError(setting="delay", given=delay, allowed=f"0 with {name}")
    for planned, objective in zip(plan.stages, objectives, strict=True):
        if planned.scale > 0 and (uses_prior(objective) or isinstance(objective, LocalObjective)):
            raise ConfigError(
                setting="delay", given=delay, allowed=f"0 with the objective {planned.stage.objective}"
            )
    for planned in plan.stages:
        for i in planned.layers if plan.lateness[planned.index] else ():
            for module in stack.layers[i].modules():
                if isinstance(module, CHANGING) and module.training and getattr(module, "p", True):
                    kind = type(module).__name__
                    problem = f"delay is {delay} and layer {i + 1} has a {kind}, which computes something "
                    raise ConfigError(
                        problem + "else when it runs again",
                        setting="delay",
                        given=delay,
                        remedy="give it delay 0, or LayerNorm and no dropout",
                    )
