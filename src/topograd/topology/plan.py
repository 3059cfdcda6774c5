"""The compiled topology that the executor, the engine and the closed forms run.

For every stage the plan has the hidden states that it sends, the stages that send gradient back (its backward
waits for them), the weight of its loss, and the last use of each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from topograd.errors import TopologyError
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.prediction import Prediction, prediction_of

AnyTopology = Topology | Configuration | Composition | str
"""A topology, or the partition of a chain."""


@dataclass(frozen=True, slots=True)
class EdgeOutput:
    """One output of a stage: its hidden state after `layer` layers of the stack, through a relay."""

    source: int
    layer: int
    relay: str


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage with everything that follows from its place in the DAG."""

    index: int
    stage: Stage
    head: int
    """The stage whose head reads it: its own, but for the nodes of `branches.py`."""
    inputs: tuple[tuple[EdgeOutput, float], ...]
    """The outputs that it receives, each with its grad_scale."""
    outputs: tuple[EdgeOutput, ...]
    num_grad_consumers: int
    """How many later stages send gradient back here; 0 means that the backward runs at once."""
    live_bus: bool
    """Whether x0 on the input bus carries gradient from this stage."""
    scale: float
    """The factor of its loss in the training loss; 0 where it has none."""
    last_use: tuple[EdgeOutput, ...]
    """Outputs of which this stage is the last reader."""

    @property
    def predicts(self) -> bool:
        """Whether its head is worth reading: a loss trains it, or did before the stage was frozen."""
        return self.stage.head and (self.scale > 0 or self.stage.frozen)

    @property
    def layers(self) -> range:
        return range(self.stage.start, self.stage.stop)

    @property
    def taps(self) -> list[int]:
        """Behind how many layers of the stack its hidden state is wanted: the last, and what it sends."""
        return sorted({self.stage.stop, *(port.layer for port in self.outputs)})


@dataclass(frozen=True, slots=True)
class Plan:
    """The compiled topology: stages in the order in which they run."""

    topology: Topology
    stages: tuple[PlannedStage, ...]
    frozen: bool
    """Whether the embedding and the shared head are frozen, because a stage is."""
    prediction: Prediction
    """How the model predicts."""
    lateness: tuple[int, ...]
    """τ of each stage: the steps after which it learns from a batch, when all gradient of it has come."""
    embedding_lateness: int
    """The same for the embedding: the largest of the stages that send gradient to x0."""

    @classmethod
    def of(cls, topology: AnyPlan, layers: int) -> Plan:
        """Compile a topology for a stack of `layers` layers. A partition such as "2,2" is a chain; a plan
        is taken as it is."""
        if isinstance(topology, Plan):
            _check_layers(topology.topology, layers)
            return topology
        topology = topology_of(topology, layers)
        _check_layers(topology, layers)
        inputs = [
            tuple(
                (
                    EdgeOutput(*topology.source_layer(edge), edge.relay),
                    0.0 if stage.frozen else float(edge.grad_scale),
                )
                for edge in stage.sources
            )
            for stage in topology.stages
        ]
        last_use = {output: k for k, received in enumerate(inputs) for output, _ in received}
        total = sum(stage.weight for stage in topology.stages)
        stages = []
        for k, stage in enumerate(topology.stages):
            rooted = any(e.source == EMBEDDING and e.grad_scale > 0 for e in stage.sources)
            stages.append(
                PlannedStage(
                    index=k,
                    stage=stage,
                    head=k,
                    inputs=inputs[k],
                    outputs=tuple(sorted((p for p in last_use if p.source == k), key=lambda p: p.layer)),
                    num_grad_consumers=sum(
                        any(p.source == k and lam > 0 for p, lam in each) for each in inputs
                    ),
                    live_bus=not stage.frozen and (topology.bus == "live" or rooted),
                    scale=stage.weight / total if topology.reduction == "mean" else stage.weight,
                    last_use=tuple(p for p, last in last_use.items() if last == k),
                )
            )
        predicting = [planned.index for planned in stages if planned.predicts]
        frozen = any(stage.frozen for stage in topology.stages)
        lateness = _lateness(stages)
        last = max((late for late, p in zip(lateness, stages, strict=True) if p.live_bus), default=0)
        prediction = prediction_of(topology, predicting)
        return cls(topology, tuple(stages), frozen, prediction, lateness, last)

    @property
    def late(self) -> bool:
        """Whether some stage learns from a batch at a later step."""
        return any(self.lateness)

    @property
    def last(self) -> int:
        """The last stage that predicts; its exit predicts as the model does."""
        return self.predicting()[-1]

    def halted(self, stages: Iterable[int]) -> Plan:
        """The plan with some stages run without gradient and without a loss; all else learns on.

        Unlike frozen stages, halted ones leave the embedding and the shared head to the others.
        """
        out = frozenset(stages)
        planned = tuple(
            replace(
                p, stage=replace(p.stage, frozen=True, weight=0.0, head=p.predicts), scale=0.0, live_bus=False
            )
            if p.index in out
            else p
            for p in self.stages
        )
        return replace(self, stages=planned)

    def needed(self, stage: int) -> list[PlannedStage]:
        """The stages that must run to compute `stage`, itself included, in order."""
        wanted = {stage}
        for planned in reversed(self.stages[: stage + 1]):
            if planned.index in wanted:
                wanted |= {output.source for output, _ in planned.inputs}
        return [planned for planned in self.stages if planned.index in wanted]

    def gradient_sources(self, stage: int) -> list[int]:
        """The earlier stages to which `stage` sends gradient, each once."""
        return sorted({source for source, _ in gradient_edges(self.stages[stage])})

    def predicting(self) -> list[int]:
        """Indices of the stages that predict."""
        return [p.index for p in self.stages if p.predicts]

    def groups(self) -> list[list[int]]:
        """The stages that learn, in groups between which no gradient passes within a step.

        Two stages are in one group when gradient crosses between them without delay or when they share a
        layer. The head and the embedding, which all stages share, do not count.
        """
        group = list(range(len(self.stages)))

        def find(k: int) -> int:
            while group[k] != k:
                k = group[k]
            return k

        for planned in self.stages:
            neighbours = [source for source, edge in gradient_edges(planned) if not edge.delay]
            mine = set(planned.layers)
            neighbours += [q.index for q in self.stages[: planned.index] if mine & set(q.layers)]
            for other in neighbours:
                group[find(planned.index)] = find(other)
        groups: dict[int, list[int]] = {}
        for planned in self.stages:
            if not planned.stage.frozen:
                groups.setdefault(find(planned.index), []).append(planned.index)
        return list(groups.values())


def gradient_edges(planned: PlannedStage) -> list[tuple[int, Edge]]:
    """The edges along which a stage sends gradient to earlier stages, with those stages."""
    both = zip(planned.inputs, planned.stage.sources, strict=True)
    return [(out.source, edge) for (out, lam), edge in both if lam > 0 and out.source != EMBEDDING]


def _lateness(stages: Sequence[PlannedStage]) -> tuple[int, ...]:
    """τ_k = max over the stages j that send gradient to stage k of τ_j + delay; 0 where there is none."""
    late = [0] * len(stages)
    for planned in reversed(stages):
        for source, edge in gradient_edges(planned):
            late[source] = max(late[source], late[planned.index] + edge.delay)
    return tuple(late)


AnyPlan = Plan | AnyTopology
"""What a plan can be compiled of."""


def topology_of(value: AnyTopology, layers: int) -> Topology:
    """The topology that `value` names: itself, or the chain of a partition; "L" is one stage."""
    if isinstance(value, Topology):
        return value
    if isinstance(value, str) and value.strip() in ("L", "l"):
        value = str(layers)
    if not isinstance(value, str | Composition | Configuration):
        problem = f"{value!r} is no topology"
        remedy = 'give a partition such as "2,2", a Topology or a Plan'
        raise TopologyError(problem, setting="topology", given=value, remedy=remedy)
    return Topology.chain(value)


def _check_layers(topology: Topology, layers: int) -> None:
    if topology.layers != layers:
        problem = f"the topology has {topology.layers} layers and the stack has {layers}"
        remedy = f"use a partition of {layers}"
        raise TopologyError(problem, setting="layers", given=topology.layers, remedy=remedy)
