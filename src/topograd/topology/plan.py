"""A topology compiled: what the executor, the engine and the closed forms need to know, and no more.

For every stage the plan says which hidden states it sends and to whom, whether gradient comes back
(then its backward waits for its listeners), what its loss weighs, and when its messages may be forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from topograd.errors import TopologyError
from topograd.topology.dag import EMBEDDING, Stage, Topology


@dataclass(frozen=True, slots=True)
class Port:
    """One thing that a stage sends: its hidden state after `layer` layers of the stack, through a relay."""

    source: int
    layer: int
    relay: str


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage with everything that follows from its place in the DAG."""

    index: int
    stage: Stage
    hears: tuple[tuple[Port, float], ...]
    """What comes in, each with its transmissivity."""
    sends: tuple[Port, ...]
    listeners: int
    """How many later stages send gradient back here; 0 means that the backward runs at once."""
    live_bus: bool
    """Whether x0 on the bus carries gradient from this stage."""
    scale: float
    """The factor of its loss in the training loss; 0 where it has none."""
    forget: tuple[Port, ...]
    """Ports that nobody hears after this stage."""

    @property
    def predicts(self) -> bool:
        """Whether its head is worth reading: it has a loss, or had one before it was frozen."""
        return self.scale > 0 or (self.stage.frozen and self.stage.head)

    @property
    def layers(self) -> range:
        return range(self.stage.start, self.stage.stop)


@dataclass(frozen=True, slots=True)
class Plan:
    """The compiled topology: stages in the order in which they run."""

    topology: Topology
    stages: tuple[PlannedStage, ...]
    frozen: bool
    """Whether the embedding and the shared head are frozen, because a stage is."""

    @classmethod
    def of(cls, topology: Topology, layers: int) -> Plan:
        """Compile `topology` for a stack of `layers` layers."""
        if topology.layers != layers:
            raise TopologyError(
                f"the topology has {topology.layers} layers and the stack has {layers}; "
                f"use a partition of {layers}"
            )
        hears = [
            tuple(
                (Port(*topology.tap(edge), edge.relay), 0.0 if stage.frozen else float(edge.transmissivity))
                for edge in stage.sources
            )
            for stage in topology.stages
        ]
        last_use = {port: k for k, heard in enumerate(hears) for port, _ in heard}
        total = sum(stage.weight for stage in topology.stages)
        stages = []
        for k, stage in enumerate(topology.stages):
            rooted = any(e.source == EMBEDDING and e.transmissivity > 0 for e in stage.sources)
            stages.append(
                PlannedStage(
                    index=k,
                    stage=stage,
                    hears=hears[k],
                    sends=tuple(sorted((p for p in last_use if p.source == k), key=lambda p: p.layer)),
                    listeners=sum(any(p.source == k and lam > 0 for p, lam in heard) for heard in hears),
                    live_bus=not stage.frozen and (topology.bus == "live" or rooted),
                    scale=stage.weight / total if topology.reduction == "mean" else stage.weight,
                    forget=tuple(p for p, last in last_use.items() if last == k),
                )
            )
        return cls(topology, tuple(stages), any(stage.frozen for stage in topology.stages))

    def needed(self, stage: int) -> list[PlannedStage]:
        """The stages that must run to compute `stage`, itself included, in order."""
        wanted = {stage}
        for planned in reversed(self.stages[: stage + 1]):
            if planned.index in wanted:
                wanted |= {port.source for port, _ in planned.hears}
        return [planned for planned in self.stages if planned.index in wanted]

    def gradient_sources(self, stage: int) -> list[int]:
        """The earlier stages to which `stage` sends gradient, each once."""
        hears = self.stages[stage].hears
        return sorted({port.source for port, lam in hears if lam > 0 and port.source != EMBEDDING})

    def predicting(self) -> list[int]:
        """Indices of the stages that predict."""
        return [p.index for p in self.stages if p.predicts]
