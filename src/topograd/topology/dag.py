"""The topology: a DAG of stages over a stack of L layers. Pure data.

A stage is an interval of layers, the sources that it reads, a head and an objective. Each source carries
a grad_scale λ in [0, 1]: the forward value never depends on it, the gradient that goes back is
multiplied by it. λ = 0 is a stop-gradient, λ = 1 is plain backprop. This is the space C⁺(L) of
"Stage-Partitioned Learning" (§10.4, eq. 37) with the soft boundaries of §9 (eq. 26); the constructors of
`Topology` are its named points. An edge also says when that gradient arrives (`delay`, in steps) and in how
many bits (`grad_bits`): 0 and 32 are plain backprop.

Stages are listed so that each reads only earlier ones, so the graph has no cycle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from topograd.errors import TopologyError
from topograd.topology.composition import MAX_LAYERS, Composition
from topograd.topology.configuration import Configuration
from topograd.topology.prediction import prediction_of

EMBEDDING = -1
"""The source that is not a stage: the embedding x0."""
HEADLESS = ("autoencoder", "inverse")
"""Objectives that train no head: their stages have a loss and do not predict."""
CANVAS = "canvas"
"""The relay of a source that is not added: the stage's other sources, bounded interfaces, add to it."""
PLAIN_RELAYS = ("identity", "pre-norm")
"""The relays without parameters; every other one belongs to a single edge and has a name of its own."""
GRAD_BITS = (32, 16, 8, 4, 3)
"""Bits of each number of a gradient that crosses an edge; 32 leaves it as it is."""
MAX_DELAY = 64
"""Steps that a gradient may take to cross an edge: a stage keeps its weights of so many steps."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A source of a stage: the hidden state of stage `source` after `layer` layers of the stack."""

    source: int
    layer: int | None = None
    """Where in the source it is read; None is the end of its interval."""
    grad_scale: float = 0.0
    relay: str = "identity"
    delay: int = 0
    """Steps after which the gradient arrives: that of the step's own batch is awaited with 0."""
    grad_bits: int = 32
    """Bits of each number of the gradient, rounded at random without bias; 32 does not round."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers start..stop-1 of the stack, their sources and their objective."""

    start: int
    stop: int
    sources: tuple[Edge, ...]
    objective: str = "cross-entropy"
    weight: float = 1.0
    """The loss has this weight; 0 means that the stage has no loss of its own."""
    frozen: bool = False
    """Run without gradients and without a loss."""
    head: bool = True
    """Whether its loss trains its head, or did before it was frozen; a head that nothing trained is not
    read."""
    every: int = 1
    """Its loss counts every n-th target, shifted by one from sequence to sequence; 1 counts all."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Stages over `layers` layers. Compile it with `Plan.of` to run it."""

    layers: int
    stages: tuple[Stage, ...]
    heads: Literal["shared", "per-stage"] = "shared"
    bus: Literal["live", "detached"] = "live"
    """Whether x0, which every layer may read, carries gradient from stages that do not start at it."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the stages' losses become one: the mean weighs each by weight / total weight."""
    prediction: str | tuple[float, ...] = "auto"
    """How the stages predict (`prediction.py`): auto, last, sum, mean, path:1,3, or a weight for each."""
    head_rank: int | None = None
    """Rank of the stages' own heads; None is the stack's own choice."""
    relay_rank: int | None = None
    """Rank of learned relays; None is a quarter of the width."""
    interface: str | None = None
    """The shape of bounded interfaces, as S=8,r=8,pool=tail; for `regions`."""
    own_heads: bool = False
    """Whether the stages' own heads are all that learns of the heads, so that stages share none."""
    reach: Literal["all", "next"] = "all"
    """Which gradient goes back along an edge: that of all losses behind it, or with `next` that of the
    receiving stage's own loss. With `next` a loss trains its own stage and the one before: stages overlap."""

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def chain(
        cls,
        configuration: Configuration | Composition | str,
        *,
        grad_scale: float = 0.0,
        objective: str = "cross-entropy",
        bus: Literal["live", "detached"] = "live",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Topology:
        """The partition as a chain: clustered Product of Experts (λ = 0) or hierarchical (λ = 1)."""
        configuration = _configuration(configuration)
        stages = []
        for k, (start, stop) in enumerate(configuration.composition.intervals):
            source = _root() if k == 0 else Edge(k - 1, grad_scale=grad_scale)
            stages.append(Stage(start, stop, (source,), objective))
        heads = configuration.heads.value
        return cls(configuration.composition.layers, tuple(stages), heads, bus, reduction)

    @classmethod
    def regions(
        cls,
        composition: Composition | str,
        interface: str | None = None,
        *,
        first_region: int = 1,
        canvas: int = 0,
    ) -> Topology:
        """Regions joined by bounded interfaces: a chain of relays, λ = 1, one loss at the end.

        The relay into region k is called `interface_name(k)`; the stack must own it, and `prepare` adds it
        where `interface` says its shape. With `first_region` 0 the canvas is read through one too. The canvas
        is the embedding or, for all regions but the first, the hidden state behind `canvas` layers of that.
        """
        composition = _configuration(composition).composition
        last = composition.stages - 1
        if not 0 <= canvas <= composition.parts[0]:
            allowed = f"0, the embedding, to {composition.parts[0]}, the layers of the first region"
            raise TopologyError(setting="canvas", given=canvas, allowed=allowed)
        stages = []
        for k, (start, stop) in enumerate(composition.intervals):
            source = _root() if k == 0 else Edge(k - 1, grad_scale=1.0)
            if k >= first_region:
                source = replace(source, relay=interface_name(k))
            beside = (Edge(0, canvas, 1.0, CANVAS),) if canvas and k else ()
            stages.append(Stage(start, stop, (source, *beside), weight=float(k == last)))
        return cls(composition.layers, tuple(stages), interface=interface)

    @classmethod
    def targets(cls, composition: Composition | str) -> Topology:
        """Difference target propagation: stages send targets back instead of gradients.

        Only the last stage has a loss of its own, whose gradient goes back one stage. Every stage between the
        first and the last sends errors back through its own inverse map (`nn/inverse.py`), which it learns
        by reconstruction.
        """
        composition = _configuration(composition).composition
        last = composition.stages - 1
        stages = []
        for k, (start, stop) in enumerate(composition.intervals):
            relay = f"target-{k}" if 0 < k < last else "identity"
            source = _root() if k == 0 else Edge(k - 1, grad_scale=1.0, relay=relay)
            objective = "inverse" if 0 < k < last else "cross-entropy"
            weight = 0.0 if k == 0 < last else 1.0
            stages.append(Stage(start, stop, (source,), objective, weight, head=k == last))
        return cls(composition.layers, tuple(stages), reduction="sum")

    @classmethod
    def soft(cls, grad_scales: Sequence[float], heads: Literal["shared", "per-stage"] = "shared") -> Topology:
        """A boundary after every layer with its own λ_i, losses weighted τ_i = 1 - λ_i (Def. 9.5)."""
        layers = len(grad_scales) + 1
        stages = []
        for i in range(layers):
            source = _root() if i == 0 else Edge(i - 1, grad_scale=grad_scales[i - 1])
            # A λ outside [0, 1] raises at its edge, not at the weight that it would give.
            weight = 1.0 if i == layers - 1 else max(0.0, 1.0 - grad_scales[i])
            stages.append(Stage(i, i + 1, (source,), weight=weight))
        return cls(layers, tuple(stages), heads)

    @classmethod
    def forest(
        cls,
        branches: Sequence[Configuration | Composition | str],
        heads: Literal["shared", "per-stage"] = "shared",
    ) -> Topology:
        """Several chains from the input, each with layers of its own (Def. 10.11)."""
        stages: list[Stage] = []
        offset = 0
        for branch in branches:
            composition = _configuration(branch).composition
            for k, (start, stop) in enumerate(composition.intervals):
                source = _root() if k == 0 else Edge(len(stages) - 1)
                stages.append(Stage(offset + start, offset + stop, (source,)))
            offset += composition.layers
        return cls(offset, tuple(stages), heads)

    @classmethod
    def cover(
        cls, intervals: Sequence[tuple[int, int]], heads: Literal["shared", "per-stage"] = "shared"
    ) -> Topology:
        """Overlapping interval experts (Def. 10.13): each starts, detached, where an earlier one passed."""
        stages: list[Stage] = []
        for start, stop in intervals:
            if start == 0:
                source = _root()
            else:
                passing = [j for j, s in enumerate(stages) if s.start < start <= s.stop]
                if not passing:
                    raise TopologyError(
                        f"interval {start}..{stop} starts after layer {start}, which no earlier "
                        "interval computes",
                        setting="intervals",
                        given=intervals,
                        remedy=f"list an interval that covers layer {start} before it",
                    )
                source = Edge(passing[-1], layer=start)
            stages.append(Stage(start, stop, (source,)))
        return cls(max((s.stop for s in stages), default=0), tuple(stages), heads)

    def with_grad_scale(self, value: float) -> Topology:
        """With this λ on every edge between stages."""
        return self._with_edges(grad_scale=value)

    def with_gradient(self, *, delay: int | None = None, bits: int | None = None) -> Topology:
        """With a gradient that is so many steps late, or has so many bits, on every edge between stages."""
        given = {"delay": delay, "grad_bits": bits}
        return self._with_edges(**{name: value for name, value in given.items() if value is not None})

    def _with_edges(self, **changes: Any) -> Topology:
        stages = []
        for stage in self.stages:
            edges = (e if e.source == EMBEDDING else replace(e, **changes) for e in stage.sources)
            stages.append(replace(stage, sources=tuple(edges)))
        return replace(self, stages=tuple(stages))

    def with_relays(self, kind: str) -> Topology:
        """A relay of `kind` on the first source of every stage that reads another stage (eq. 43).

        Relays with parameters get a name for each edge (`own_relay`); the stack must own them.
        """
        stages = []
        for k, stage in enumerate(self.stages):
            first, *beside = stage.sources
            if first.source != EMBEDDING:
                first = replace(first, relay=own_relay(kind, k))
            stages.append(replace(stage, sources=(first, *beside)))
        return replace(self, stages=tuple(stages))

    def with_input_bus(self, source: Edge | None = None) -> Topology:
        """Every stage but the roots reads `source` too; by default the embedding, detached (Def. 10.9).

        The relay of `source` says how it is joined (eq. 39): `identity` adds it, `gate` gates it, `low-rank`
        adds a learned low-rank reading of it. A concatenation [h; e] behind a linear map is `linear` on both
        edges, A h + B e: see `with_relays`. Only stages behind the source can read it.
        """
        source = source or Edge(EMBEDDING)
        if source.source >= len(self.stages) - 1 and source.source != EMBEDDING:
            problem = f"the input bus comes from stage {source.source}, behind which no stage lies"
            remedy = f"stages 0..{len(self.stages) - 1} exist, so use an earlier one or EMBEDDING"
            raise TopologyError(problem, setting="source", given=source.source, remedy=remedy)
        stages = []
        for k, stage in enumerate(self.stages):
            root = all(e.source == EMBEDDING for e in stage.sources)
            if (
                root
                or k <= source.source
                or self.source_layer(source) in map(self.source_layer, stage.sources)
            ):
                stages.append(stage)
            else:
                joined = replace(source, relay=own_relay(source.relay, k, len(stage.sources)))
                stages.append(replace(stage, sources=(*stage.sources, joined)))
        return replace(self, stages=tuple(stages))

    def source_layer(self, edge: Edge) -> tuple[int, int]:
        """(source, layer) of `edge`, the layer filled in; the embedding's is 0."""
        if edge.source == EMBEDDING:
            return EMBEDDING, 0
        return edge.source, self.stages[edge.source].stop if edge.layer is None else edge.layer

    def with_decoders(self, depth: int, last: bool = True) -> Topology:
        """Every stage with a loss gets `depth` layers of its own between its end and its head.

        A private decoder is a stage: it reads the one before it with λ = 1, has its loss, and no stage
        reads it. Its layers lie behind all others, so the stack needs `depth` more for each (DGL's and
        InfoPro's auxiliary heads; "Product of Experts" appendix A). Without `last` the last stage of the
        list predicts from its own end, as a model without decoders does.
        """
        if depth < 1:
            raise TopologyError(setting="depth", given=depth, allowed="at least 1")
        stages: list[Stage] = []
        place: list[int] = []
        layers = self.layers
        for k, stage in enumerate(self.stages):
            sources = tuple(
                e if e.source == EMBEDDING else replace(e, source=place[e.source]) for e in stage.sources
            )
            place.append(len(stages))
            decoded = stage.weight > 0 and (last or k < len(self.stages) - 1)
            stages.append(replace(stage, sources=sources, weight=0.0 if decoded else stage.weight))
            if decoded:
                own = Edge(place[-1], grad_scale=1.0)
                stages.append(replace(stage, start=layers, stop=layers + depth, sources=(own,)))
                layers += depth
        return replace(self, layers=layers, stages=tuple(stages), prediction=self._decoded(place, last))

    def _decoded(self, place: Sequence[int], last: bool) -> str | tuple[float, ...]:
        """The prediction of the decoders: that of their stages; without `last`, that of the last stage."""
        predicting = [k for k, stage in enumerate(self.stages) if stage.weight > 0]
        before = prediction_of(self, predicting)
        if not last and before.kind != "last":
            problem = f"the last stage is to have no decoder, and the stages predict by {before.kind}"
            remedy = "give all of them one, or let the last stage predict"
            raise TopologyError(problem, setting="last", given=last, remedy=remedy)
        if before.kind in ("last", "sum"):
            return before.kind
        if before.kind == "path":
            raise TopologyError(
                setting="prediction",
                given=self.prediction,
                allowed="'last' or weights, with private decoders",
            )
        weights = [0.0] * (len(self.stages) + len(predicting))
        for stage, weight in before.full:
            weights[place[stage] + 1] = weight
        return tuple(weights)

    def with_specialist(self, depth: int, objective: str = "cross-entropy") -> Topology:
        """A stage of `depth` new layers behind the leaves, everything before it frozen.

        Behind a chain that is the last stage; behind a forest it is the end of every branch. The model then
        predicts as the new stage's objective says, however the base did.
        """
        return self.with_specialists((depth,), objective)

    def with_specialists(
        self, depths: Sequence[int], objective: str = "cross-entropy", source: int | None = None
    ) -> Topology:
        """Parallel stages, each behind the end of stage `source`, or of all leaves ("Product of Experts"
        eq. 12). A depth of 0 is a head alone.

        `specialists/composition.py` decides how several predict together.
        """
        base = tuple(
            replace(s, frozen=True, weight=0.0, head=s.head and (s.frozen or s.weight > 0))
            for s in self.stages
        )
        sources = tuple(Edge(k) for k in (self.leaves() if source is None else [source]))
        ends = [self.layers + sum(depths[:i]) for i in range(len(depths) + 1)]
        added = tuple(Stage(start, stop, sources, objective) for start, stop in itertools.pairwise(ends))
        return replace(self, layers=ends[-1], stages=(*base, *added), heads="per-stage", prediction="auto")

    def leaves(self) -> list[int]:
        """The stages whose end no other stage reads."""
        read = {self.source_layer(edge) for stage in self.stages for edge in stage.sources}
        return [k for k, stage in enumerate(self.stages) if (k, stage.stop) not in read]


def interface_name(region: int) -> str:
    """The name of the relay through which region `region` reads the one before it."""
    return f"interface-{region}"


def own_relay(kind: str, stage: int, source: int = 0) -> str:
    """The name of the relay of `kind` through which stage `stage` reads source number `source`.

    >>> own_relay("gate", 2), own_relay("low-rank", 2, 1), own_relay("identity", 2)
    ('gate-2', 'low-rank-2-beside-1', 'identity')
    """
    if kind in PLAIN_RELAYS:
        return kind
    return f"{kind}-{stage}" + (f"-beside-{source}" if source else "")


def _root() -> Edge:
    return Edge(EMBEDDING, grad_scale=1.0)


def _configuration(value: Configuration | Composition | str) -> Configuration:
    if isinstance(value, Configuration):
        return value
    return Configuration.parse(str(value), heads="shared")


def _validate(topology: Topology) -> None:
    if not topology.stages:
        raise TopologyError("a topology needs at least one stage", setting="stages", given=())
    for name, allowed in (
        ("heads", ("shared", "per-stage")),
        ("bus", ("live", "detached")),
        ("reduction", ("mean", "sum")),
        ("reach", ("all", "next")),
    ):
        if getattr(topology, name) not in allowed:
            raise TopologyError(setting=name, given=getattr(topology, name), allowed=f"one of {allowed}")
    if topology.layers > MAX_LAYERS:
        problem = f"the topology has {topology.layers} layers"
        remedy = f"there may be at most {MAX_LAYERS}"
        raise TopologyError(problem, setting="layers", given=topology.layers, remedy=remedy)
    for k, stage in enumerate(topology.stages):
        _validate_stage(topology, k, stage)
    for name in ("head_rank", "relay_rank"):
        rank = getattr(topology, name)
        if rank is not None and rank < 1:
            raise TopologyError(setting=name, given=rank, allowed="at least 1, or be left out")
    covered = {i for stage in topology.stages for i in range(stage.start, stage.stop)}
    idle = sorted(set(range(topology.layers)) - covered)
    if idle:
        problem = f"layers {idle} belong to no stage"
        raise TopologyError(problem, setting="stages", given=idle, remedy="every layer needs one")
    if all(stage.weight == 0 for stage in topology.stages):
        problem = "every stage has weight 0, so nothing would be learned"
        raise TopologyError(problem, setting="weight", given=0, remedy="give one a loss")


def _validate_stage(topology: Topology, k: int, stage: Stage) -> None:
    alone = len(stage.sources) == 1 and stage.sources[0].source != EMBEDDING
    if not 0 <= stage.start < stage.stop + alone <= topology.layers + alone:
        raise _stage_error(
            k, "stop", stage.stop, allowed=f"above start {stage.start} and at most {topology.layers}"
        )
    if not 0 <= stage.weight < math.inf:
        raise _stage_error(k, "weight", stage.weight, allowed="finite and at least 0")
    if stage.every < 1:
        raise _stage_error(k, "every", stage.every, allowed="at least 1")
    if stage.frozen and stage.weight:
        raise _stage_error(k, "weight", stage.weight, allowed="0, because the stage is frozen")
    if not stage.sources:
        raise _stage_error(k, "sources", (), remedy="give it a source (EMBEDDING or an earlier stage)")
    for edge in stage.sources:
        _validate_edge(topology, k, edge)
    if stage.sources[0].relay == CANVAS:
        raise _stage_error(k, "sources", stage.sources, allowed="an interface first, then what it adds to")
    if len({(*topology.source_layer(e), e.relay == CANVAS) for e in stage.sources}) < len(stage.sources):
        raise _stage_error(k, "sources", stage.sources, allowed="different sources")


def _validate_edge(topology: Topology, k: int, edge: Edge) -> None:
    if not 0.0 <= edge.grad_scale <= 1.0:  # also false for nan
        raise _stage_error(k, "grad_scale", edge.grad_scale, allowed="in [0, 1]")
    _validate_gradient(topology, k, edge)
    if edge.source == EMBEDDING:
        if edge.layer is not None:
            raise _stage_error(k, "layer", edge.layer, remedy="leave it out where the embedding is read")
        return
    if not 0 <= edge.source < k:
        raise _stage_error(k, "source", edge.source, allowed="an earlier stage, or a cycle could form")
    source = topology.stages[edge.source]
    if edge.layer is not None and not source.start < edge.layer <= source.stop:
        computes = f"stage {edge.source} computes layers {source.start + 1}..{source.stop}"
        raise _stage_error(k, "layer", edge.layer, remedy=computes)
    if source.frozen and not topology.stages[k].frozen and edge.grad_scale > 0:
        frozen = f"0, because stage {edge.source} is frozen"
        raise _stage_error(k, "grad_scale", edge.grad_scale, allowed=frozen)


def _validate_gradient(topology: Topology, k: int, edge: Edge) -> None:
    """When and in how many bits an edge's gradient comes."""
    if isinstance(edge.delay, bool) or not isinstance(edge.delay, int) or not 0 <= edge.delay <= MAX_DELAY:
        raise _stage_error(k, "delay", edge.delay, allowed=f"a whole number of steps from 0 to {MAX_DELAY}")
    if edge.grad_bits not in GRAD_BITS:
        few = edge.grad_bits in (1, 2)
        remedy = "with fewer than 3 bits a model learns less than with no gradient at all" if few else ""
        allowed = f"one of {', '.join(map(str, GRAD_BITS))}"
        raise _stage_error(k, "grad_bits", edge.grad_bits, allowed=allowed, remedy=remedy)
    if edge.source == EMBEDDING and (edge.delay, edge.grad_bits) != (0, 32):
        name = "delay" if edge.delay else "grad_bits"
        remedy = "leave it out where the embedding is read: its gradient is added up by batch"
        raise _stage_error(k, name, getattr(edge, name), remedy=remedy)
    if edge.delay and topology.reach == "next":
        raise _stage_error(k, "delay", edge.delay, allowed="0 where gradient reaches the next stage only")


def _stage_error(k: int, setting: str, given: object, allowed: str = "", remedy: str = "") -> TopologyError:
    problem = f"stage {k} has {setting} {given!r}"
    return TopologyError(problem, setting=setting, given=given, allowed=allowed, remedy=remedy)
