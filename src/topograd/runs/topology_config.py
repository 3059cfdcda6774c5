"""The `[topology]` table of a run's settings: every `Topology`, written in TOML.

    graph = "chain"        partition = "2,2"                   stages in sequence
    graph = "forest"       branches = ["2", "1,1"]             several chains from the embedding
    graph = "cover"        intervals = [[0, 3], [2, 4]]        experts whose layers overlap
    graph = "targets"      partition = "1,1,1"                 difference target propagation
    graph = "soft"         grad_scales = [0.2, 0.9, 0.0]  a boundary after every layer
    graph = "stages"       [[topology.stages]]                 every stage and edge by itself
    interface = "S=8,r=8"  partition = "2,2"                   regions joined by bounded interfaces

The rest applies to what the graph gives: heads, objectives, weights, grad_scales, relays, an input bus,
private decoders. A setting that the graph does not use raises ConfigError: nothing is ignored silently.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

import tyro

from topograd.errors import ConfigError, TopologyError
from topograd.limits import changed, check_exclusive, check_rules
from topograd.nn.interface_config import parse_interfaces
from topograd.topology.branches import predicting_plan
from topograd.topology.configuration import Configuration
from topograd.topology.dag import (
    EMBEDDING,
    GRAD_BITS,
    HEADLESS,
    MAX_DELAY,
    PLAIN_RELAYS,
    Edge,
    Stage,
    Topology,
)
from topograd.topology.plan import Plan

HEAD_RANK = 8
"""Rank of low-rank heads where none is given."""
OWN_TEACHER, AVERAGE_TEACHER = "self", "average"
"""Values of `teacher` for the model itself, and for an average of its past weights."""
Graph = Literal["chain", "forest", "cover", "soft", "targets", "stages"]
Backward = Literal["autograd", "scan", "hybrid"]
Jacobian = Literal["loop", "batched", "forward", "pullback"]
_USES: dict[str, tuple[str, ...]] = {
    "chain": ("partition", "grad_scale", "grad_scales", "grad_scale_schedule", "grad_delay", "grad_bits"),
    "forest": ("branches", "grad_scale_schedule"),
    "cover": ("intervals",),
    "soft": ("grad_scales",),
    "targets": ("partition",),
    "stages": ("stages", "grad_scale_schedule"),
}
_BITS = "32, 16, 8, 4 or 3: with fewer bits a model learns less than with no gradient at all"
_NOT_WITH_INTERFACES = (
    *("graph", "heads", "objective", "bus", "relay", "decoder", "source", "objectives", "weights"),
    *("grad_scale", "grad_scales", "grad_scale_schedule", "depth_weights", "reach"),
    *("loss_every", "grad_delay", "grad_bits"),
)


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Where gradients flow, and how the stages predict."""

    graph: Graph = "chain"
    """What the stages are: a chain, a forest, a cover, soft boundaries, a chain with target propagation
    (targets), or stages listed one by one."""
    partition: str = "L"
    """Layers per stage, as "2,2,2"; "L" or the number of layers alone is backprop."""
    branches: tuple[str, ...] = ()
    """Of a forest: the partition of each branch."""
    intervals: Annotated[tuple[tuple[int, int], ...], tyro.conf.Suppress] = ()
    """Of a cover: first and last boundary of each expert's layers."""
    stages: Annotated[tuple[Stage, ...], tyro.conf.Suppress] = ()
    """Each stage: start, stop, sources (source, layer, grad_scale, relay, delay, grad_bits), objective,
    weight."""
    heads: Annotated[Literal["shared", "per-stage", "low-rank", "own"], tyro.conf.arg(name="stage-heads")] = (
        "shared"
    )
    """One head for all stages, or one more for each, whole or of low rank; own: the shared one is fixed."""
    head_rank: int | None = None
    """Rank of the stages' own heads; 8 for low-rank ones if not given."""
    decoder: int = 0
    """Layers that every stage has to itself between its end and its head: a private decoder."""
    objective: str = "cross-entropy"
    """What every stage is asked: cross-entropy, residual (correct the sum of the stages before), z-loss,
    distillation (needs a teacher), diversity (make other mistakes than those before), autoencoder (rebuild
    what was received; the last stage predicts), byol, ridge, forward-forward, or package.module:attribute of
    your own."""
    objectives: tuple[str, ...] = ()
    """An objective for each stage with a loss, instead of one for all."""
    weights: tuple[float, ...] = ()
    """A weight for the loss of each stage; 0 means that it has none."""
    depth_weights: float | None = None
    """Weights by depth instead, as LayerSkip has them: quadratic in the layer an exit lies behind, times this
    (its e_scale), and the number of layers more for the last one."""
    grad_scale: float = 0.0
    """How much gradient crosses a boundary: 0 stops it, 1 is hierarchical training."""
    grad_scales: tuple[float, ...] = ()
    """The same for each boundary by itself."""
    grad_scale_schedule: str | None = None
    """The same for all boundaries, by the share of the steps that is done: "0:0,0.75:1" is 0 at first, and 1
    in the last quarter."""
    grad_delay: int = 0
    """Steps after which gradient arrives across a boundary: 0 waits for that of the step's own batch; with 1
    no stage waits, and each learns from a batch one step after the next stage does."""
    grad_bits: int = 32
    """Bits of each number of a gradient that crosses a boundary: 32 leaves it as it is; 16, 8, 4 or 3 round
    at random without bias, with one scale a position."""
    reach: Literal["all", "next"] = "all"
    """Whose gradient crosses a boundary: that of all losses behind it, or of the next stage's loss alone."""
    loss_every: tuple[int, ...] = ()
    """For each stage, that its loss counts every n-th token; 1 counts all."""
    relay: str = "identity"
    """What a stage makes of what it receives: identity, pre-norm, gate, residual-gate, low-rank, linear,
    sigmoid."""
    relay_rank: int | None = None
    """Rank of learned relays; a quarter of the width if not given."""
    source: str | None = None
    """What later stages receive beside the stage before them: embedding, or layer:2 for an early layer."""
    join: str = "identity"
    """How that source is joined: identity adds it; gate, low-rank, linear and the other relays learn to."""
    source_grad_scale: float = 0.0
    """How much gradient goes back along that source."""
    bus: Literal["live", "detached"] = "live"
    """Whether later stages train the embedding through x0."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the stages' losses become one."""
    prediction: str = "auto"
    """How the model predicts: auto (as it was trained), last, sum, mean, path:1,3, or weights as 0.5,0.5."""
    teacher: str | None = None
    """The folder of a run that teaches; self: what the model itself predicts at full depth; average: what an
    average of its past weights does. For the objective distillation."""
    teacher_decay: float = 0.98
    """Of the average that teaches: how much of it stays at a step."""
    teacher_temperature: float = 2.0
    """What the logits of both are divided by."""
    teacher_mix: float = 0.5
    """The teacher's share of the loss."""
    teacher_top: int = 0
    """Compute this many of the teacher's largest logits of each position once and keep them in the run's
    folder, instead of running it at every step; 0 runs it."""
    interface: str | None = None
    """Join the parts of the partition by bounded interfaces, as "S=8,r=8,pool=tail" or another form, as
    "residual:r=8": gradient crosses them, and only the last part has a loss."""
    canvas: int = 0
    """What interfaces add to: the hidden state behind so many layers of the first part, which goes to every
    later part as it is; 0 is the embedding."""
    backward: Backward = "autograd"
    """How gradients cross interfaces: autograd, an exact parallel scan, or a hybrid of both."""
    carried: int | None = None
    """With backward hybrid: how many of the inner parts hand the gradient on; half of them if not given."""
    jacobian: Jacobian = "loop"
    """How a scan builds the Jacobians of parts: row by row (loop), all rows at once (batched), column by
    column (forward), or by hand-written formulas for a GPT's blocks with attention (pullback)."""
    jacobian_chunk: int | None = None
    """Rows or columns of a Jacobian that are made together; batched and pullback make all, forward one."""

    def __post_init__(self) -> None:
        own_teacher = self.teacher in (None, OWN_TEACHER, AVERAGE_TEACHER)
        check_rules(
            self,
            decoder=(self.decoder >= 0, "at least 0"),
            teacher_temperature=(0 < self.teacher_temperature < math.inf, "above 0"),
            depth_weights=(self.depth_weights is None or 0 < self.depth_weights <= 1, "above 0, at most 1"),
            teacher_mix=(0 <= self.teacher_mix <= 1, "in [0, 1]"),
            grad_scale=(0 <= self.grad_scale <= 1, "in [0, 1]"),
            grad_delay=(0 <= self.grad_delay <= MAX_DELAY, f"in 0 to {MAX_DELAY} steps"),
            grad_bits=(self.grad_bits in GRAD_BITS, _BITS),
            source_grad_scale=(0 <= self.source_grad_scale <= 1, "in [0, 1]"),
            canvas=(self.canvas >= 0, "at least 0"),
            carried=(self.carried is None or self.carried >= 0, "at least 0"),
            jacobian_chunk=(self.jacobian_chunk is None or self.jacobian_chunk >= 1, "at least 1"),
            teacher_decay=(0 <= self.teacher_decay < 1, "in 0 to below 1"),
            teacher=(self.teacher is None or bool(self.teacher.strip()), "a run's folder, or left out"),
            graph=(self.graph in _USES, f"one of {', '.join(_USES)}"),
        )
        check_rules(
            self,
            teacher_top=(
                self.teacher_top == 0 or (self.teacher_top > 0 and not own_teacher),
                "0, or at least 1 with the folder of a run as teacher",
            ),
        )
        check_exclusive(self, "weights", "depth_weights")
        self._check_graph()
        self._check_idle()
        idle_scan = self.backward != "autograd" and self.interface is None
        check_rules(self, backward=(not idle_scan, "autograd where there is no interface to scan over"))

    def _check_graph(self) -> None:
        """Every setting that was changed is one that the graph uses."""
        mine = _USES[self.graph]
        for name in changed(self, (name for names in _USES.values() for name in names if name not in mine)):
            raise ConfigError(
                f"{name} is {getattr(self, name)!r} and graph is {self.graph}, which does not use it",
                setting=name,
                given=getattr(self, name),
                remedy="leave it out, or choose another graph",
            )
        own = mine[0]  # what the graph is made of; a chain has its partition, which is never empty
        if not getattr(self, own):
            raise ConfigError(
                f"graph is {self.graph} and {own} is empty", setting=own, remedy=f"give its {own}"
            )
        check_exclusive(self, "grad_scale", "grad_scales", "grad_scale_schedule")
        check_exclusive(self, "grad_scales", "grad_scale_schedule")
        if self.grad_scale_schedule is not None:
            parse_schedule(self.grad_scale_schedule)
        if self.interface is not None:
            for name in changed(self, _NOT_WITH_INTERFACES):
                default = getattr(type(self), name)
                remedy = f"with an interface it must be {default!r}, its default"
                raise ConfigError(setting=name, given=getattr(self, name), remedy=remedy)

    def _check_idle(self) -> None:
        """Every setting that goes with another one has it."""
        learned = self.graph == "stages" or not {self.relay, self.join} <= set(PLAIN_RELAYS)
        for name, used, needs in (
            ("head_rank", self.heads != "shared", "heads per-stage or low-rank"),
            ("join", self.source is not None, "a source"),
            ("source_grad_scale", self.source is not None, "a source"),
            ("relay_rank", learned, "a relay or a join that learns"),
            ("canvas", self.interface is not None, "an interface"),
            ("carried", self.backward == "hybrid", "backward hybrid"),
            ("jacobian", self.backward != "autograd", "backward scan or hybrid"),
            ("jacobian_chunk", self.jacobian != "loop", "jacobian batched, forward or pullback"),
            ("teacher_decay", self.teacher == AVERAGE_TEACHER, f"teacher {AVERAGE_TEACHER}"),
            ("grad_delay", self._crosses, "a grad_scale above 0"),
            ("grad_bits", self._crosses, "a grad_scale above 0"),
        ):
            if not used and changed(self, [name]):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, which nothing uses",
                    setting=name,
                    given=getattr(self, name),
                    remedy=f"give {needs} too, or leave it out",
                )
        for k, edge in ((k, edge) for k, stage in enumerate(self.stages) for edge in stage.sources):
            idle = edge.grad_scale == 0 and self.grad_scale_schedule is None
            if idle and (edge.delay, edge.grad_bits) != (0, 32):
                name = "delay" if edge.delay else "grad_bits"
                given, remedy = getattr(edge, name), "give it a grad_scale above 0, or leave it out"
                problem = f"a source of stage {k} has {name} {given!r}, and no gradient goes back along it"
                raise ConfigError(problem, setting=name, given=given, remedy=remedy)
        if self.objectives and self.objective != "cross-entropy":
            raise ConfigError(
                "objective and objectives are both given", setting="objective", remedy="give one"
            )

    @property
    def _crosses(self) -> bool:
        """Whether gradient crosses boundaries of a chain at some time."""
        return self.grad_scale > 0 or any(self.grad_scales) or self.grad_scale_schedule is not None

    def build(self, layers: int) -> Topology:
        """The stage DAG over a model of `layers` layers; private decoders add layers."""
        try:
            topology = self._build(layers)
            predicting_plan(Plan.of(topology, topology.layers))  # refuses what could not predict
        except TopologyError as error:
            message, setting = str(error), error.setting
            if self.graph in ("chain", "targets") and message.startswith("composition "):
                message = f"partition {message.removeprefix('composition ')}"  # as the setting is called
                setting = "partition"
            raise ConfigError(message, setting=setting, given=error.given) from None
        delay = max(edge.delay for stage in topology.stages for edge in stage.sources)
        if delay and self.grad_scale_schedule is not None:
            raise ConfigError(setting="grad_delay", given=delay, allowed="0 with grad_scale_schedule")
        return topology

    def _build(self, layers: int) -> Topology:
        topology = self._losses(self._edges(self._graph(layers)))
        own = _USES[self.graph][0]
        if topology.layers != layers:
            made_of = getattr(self, own)
            raise ConfigError(
                f"{own} {made_of} has {topology.layers} layers and the model has {layers}",
                setting=own,
                given=made_of,
                remedy=f"give parts that add up to {layers}",
            )
        heads: Literal["shared", "per-stage"] = "shared" if self.heads == "shared" else "per-stage"
        rank = HEAD_RANK if self.heads == "low-rank" and self.head_rank is None else self.head_rank
        topology = replace(
            topology,
            heads=heads,
            own_heads=self.heads == "own",
            head_rank=rank,
            relay_rank=self.relay_rank,
            bus=self.bus,
            reduction="sum" if self.graph == "targets" else self.reduction,
            prediction=_prediction(self.prediction),
            reach=self.reach,
        )
        return topology.with_decoders(self.decoder) if self.decoder else topology

    def grad_scale_at(self, share: float) -> float | None:
        """λ of every edge between stages when this share of the steps is done; None where it is fixed."""
        if self.grad_scale_schedule is None:
            return None
        return [lam for begins, lam in parse_schedule(self.grad_scale_schedule) if begins <= share][-1]

    def _graph(self, layers: int) -> Topology:
        partition = str(layers) if self.partition.strip() in ("L", "l") else self.partition
        makers: dict[str, Callable[[], Topology]] = {
            "chain": lambda: Topology.chain(Configuration.parse(partition), grad_scale=self.grad_scale),
            "forest": lambda: Topology.forest(self.branches),
            "cover": lambda: Topology.cover(self.intervals),
            "soft": lambda: Topology.soft(self.grad_scales),
            "targets": lambda: self._targets(partition),
            "stages": lambda: Topology(max(stage.stop for stage in self.stages), self.stages),
        }
        if self.interface is None:
            return makers[self.graph]()
        regions = Topology.regions(
            Configuration.parse(partition).composition,
            self.interface,
            first_region=parse_interfaces(self.interface)[0].first_region,
            canvas=self.canvas,
        )
        if len(regions.stages) < 2:
            raise ConfigError(
                setting="partition",
                given=self.partition,
                allowed="at least two parts, for an interface to join",
            )
        return regions

    def _targets(self, partition: str) -> Topology:
        own = ("objective", "objectives", "weights", "relay", "source", "decoder", "reduction")
        for name in changed(self, own):
            remedy = "target propagation has its own, leave it out"
            raise ConfigError(setting=name, given=getattr(self, name), remedy=remedy)
        return Topology.targets(partition)

    def _edges(self, topology: Topology) -> Topology:
        """Boundaries with their own grad_scale, relays, and an input bus."""
        if self.grad_scales and self.graph == "chain":
            self._check_count("grad_scales", len(topology.stages) - 1, "boundary")
            stages = list(topology.stages)
            for k, lam in enumerate(self.grad_scales, start=1):
                stages[k] = replace(stages[k], sources=(replace(stages[k].sources[0], grad_scale=lam),))
            topology = replace(topology, stages=tuple(stages))
        if (self.grad_delay, self.grad_bits) != (0, 32):
            topology = topology.with_gradient(delay=self.grad_delay, bits=self.grad_bits)
        if self.relay != "identity":
            topology = topology.with_relays(_relay("relay", self.relay))
        if self.source is not None:
            topology = topology.with_input_bus(self._source(topology))
        return topology

    def _source(self, topology: Topology) -> Edge:
        join = _relay("join", self.join)
        assert self.source is not None
        kind, colon, number = self.source.partition(":")
        if self.source == "embedding":
            return Edge(EMBEDDING, grad_scale=self.source_grad_scale, relay=join)
        if kind != "layer" or not colon or not number.isdecimal():
            raise ConfigError(
                setting="source", given=self.source, allowed="embedding, or layer:N for an early layer"
            )
        layer = int(number)
        for k, stage in enumerate(topology.stages):
            if stage.start < layer <= stage.stop:
                return Edge(k, layer, self.source_grad_scale, join)
        raise ConfigError(
            setting="source", given=self.source, remedy=f"the model has layers 1 to {topology.layers}"
        )

    def _losses(self, topology: Topology) -> Topology:
        """Objectives and weights, for all stages or for each."""
        stages = list(topology.stages)
        if self.weights:
            self._check_count("weights", len(stages), "stage")
            stages = [replace(s, weight=w) for s, w in zip(stages, self.weights, strict=True)]
        if self.depth_weights is not None:
            stages = [
                replace(stage, weight=depth_weight(stage.stop, topology.layers, self.depth_weights))
                for stage in stages
            ]
        if self.loss_every:
            self._check_count("loss_every", len(stages), "stage")
            stages = [replace(s, every=n) for s, n in zip(stages, self.loss_every, strict=True)]
        learning = [k for k, stage in enumerate(stages) if stage.weight > 0]
        if self.objectives:
            self._check_count("objectives", len(learning), "stage with a loss")
            for k, name in zip(learning, self.objectives, strict=True):
                stages[k] = replace(stages[k], objective=name)
        elif self.objective in HEADLESS:  # something must learn to predict: the last stage
            for k in learning[:-1]:
                stages[k] = replace(stages[k], objective=self.objective)
        elif self.objective != "cross-entropy":
            stages = [replace(stage, objective=self.objective) for stage in stages]
            if self.objective == "distillation" and self.teacher in (OWN_TEACHER, AVERAGE_TEACHER):
                last = learning[-1]  # which is, or was, what teaches the others
                stages[last] = replace(stages[last], objective="cross-entropy")
        stages = [replace(s, head=False) if s.objective in HEADLESS else s for s in stages]
        return replace(topology, stages=tuple(stages))

    def _check_count(self, name: str, count: int, of: str) -> None:
        if len(given := getattr(self, name)) != count:
            raise ConfigError(setting=name, given=given, allowed=f"{count}, one for each {of}")


def _prediction(text: str) -> str | tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        return text


def parse_schedule(text: str) -> list[tuple[float, float]]:
    """Shares of the steps, rising from 0, each with the λ from there on.

    >>> parse_schedule("0:0,0.75:1")
    [(0.0, 0.0), (0.75, 1.0)]
    """
    try:
        pairs = [(float(share), float(lam)) for share, lam in (part.split(":") for part in text.split(","))]
    except ValueError:
        pairs = []
    shares = [share for share, _ in pairs]
    rising = shares[:1] == [0] and all(a < b < 1 for a, b in pairwise(shares))
    if not rising or not all(0 <= lam <= 1 for _, lam in pairs):
        raise ConfigError(
            setting="grad_scale_schedule",
            given=text,
            allowed="share:value pairs such as 0:0,0.75:1, shares rising from 0 to below 1, values in [0, 1]",
        )
    return pairs


def depth_weight(stop: int, layers: int, scale: float) -> float:
    """e(l) of an exit behind layer l = stop - 1: s Σ_{i≤l} i, and L - 1 + s Σ_{i≤L-2} i for the last.

    "LayerSkip" (Elhoushi et al. 2024) eq. 6, before it is normalised, which `reduction` does.

    >>> [depth_weight(stop, 30, 0.1) for stop in (10, 20, 30)]
    [4.5, 19.0, 69.6]
    """
    if stop == layers:
        return layers - 1 + scale * (layers - 2) * (layers - 1) / 2
    return scale * (stop - 1) * stop / 2


def _relay(name: str, kind: str) -> str:
    known = (*PLAIN_RELAYS, "gate", "residual-gate", "low-rank", "linear", "sigmoid")
    if kind not in known:
        raise ConfigError(
            f"{name} {kind!r} is unknown",
            setting=name,
            given=kind,
            remedy=f"choose one of {', '.join(known)}",
        )
    return kind
