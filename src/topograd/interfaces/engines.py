"""Gradient engines for regions that are joined by interfaces: a scan over Jacobians instead of a chain.

    Scan     three phases: Jacobians of the regions, all independent; a suffix scan over them, which gives
             every interface's adjoint; each region's own backward, all independent (Algorithm 1)
    Hybrid   the last `carried` inner regions hand the adjoint on by their own backward, and the scan begins
             behind the regions before them

Statement: with m̄_k = ∂L/∂m_k and J_k = ∂m_{k+1}/∂m_k, m̄_k = J_kᵀ m̄_{k+1} and
∇_{θ_k} L = (∂m_{k+1}/∂θ_k)ᵀ m̄_{k+1} (Theorem 2.7, Corollary 2.9 of "LBI: Parallel Scan Backpropagation via
Latent Bounded Interfaces"). The last region gives m̄_{K-1} in its own backward, and no state goes into the
first, so only regions 1..K-2 need a Jacobian. The canvas, x0 or what the first layers of region 0 make of it,
and parameters that regions share collect the gradients of each region, and region 0's own backward runs last;
no backward runs through the whole graph.

Cost on one device, F the forward of a region: autograd about 2.9 K F; scan K F + (K-2) J + 1.9 K F, with
J near (r-2) F. It is a way to shorten the span on several devices, not the work (`timeline.py`,
`planner.py`). With a step's `recompute`, a region runs once more for its Jacobian, with a graph that lives
for that long, and its layers once more in its backward: two forwards more.

Limits: a chain of interfaces with one loss, at its end; no frozen stages, no hidden states that are given
(`regions.py`). Jacobians by hand ("pullback") know neither layer dropout nor autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.gradient import Message, PendingStage, StepGraph
from topograd.interfaces.exactness import check_jacobian
from topograd.interfaces.jacobian import Visit, by_hand, check_rows, interface_jacobian, recording, visit
from topograd.interfaces.regions import Regions
from topograd.interfaces.suffix_scan import Method, suffix_adjoints
from topograd.interfaces.tape import Tape
from topograd.nn.layer_dropout import drops_layers
from topograd.runs.topology_config import Jacobian
from topograd.topology.dag import CANVAS
from topograd.topology.plan import PlannedStage


@dataclass
class Scan:
    """`jacobian`, `chunk` and `trimmed` say how Jacobians are built, `scan` how adjoints follow from them."""

    jacobian: Jacobian = "loop"
    chunk: int | None = None
    """Rows or columns of a Jacobian that are made together."""
    scan: Method = "matvec"
    trimmed: bool = True
    carried: int | None = 0
    """How many inner regions hand the adjoint on; None is half of them."""
    adjoints: Tensor | None = field(default=None, init=False)
    """Of the last step, m̄_1 ... m̄_{K-1} as far as gradient reaches, (K-1, batch, n)."""
    jacobians: Tensor | None = field(default=None, init=False)
    """Of the last step, J of the inner regions that have one, (count, batch, n, n); n is that of the
    longest message, and shorter ones have zeros."""
    _taped: dict[int, dict[int, Tape | None]] = field(default_factory=dict, init=False, repr=False)
    crosses_ranks: ClassVar[bool] = False

    def begin(self, graph: StepGraph) -> None:
        self.adjoints = self.jacobians = None
        if graph.known:
            raise ConfigError(
                "a scan takes no states, which frozen stages have",
                setting="states",
                remedy="use backward 'autograd'",
            )
        if graph.transport is not None and not self.crosses_ranks:
            raise ConfigError(
                "a scan takes no transport",
                setting="transport",
                remedy="use parallel.region_scan.RegionScan on ranks",
            )
        self._regions = Regions.of(graph.stack, graph.plan)
        inner = self._regions.count - 2
        carried = -(-inner // 2) if self.carried is None else self.carried
        if not 0 <= carried <= inner:
            raise ConfigError(
                setting="carried",
                given=carried,
                remedy=f"of {inner + 2} regions, 0 to {inner} can hand it on",
            )
        self._building = range(1, inner + 1 - carried)
        for k in self._building:
            check_rows(self._regions, k)
        self._recompute = graph.recompute
        self._tapes: dict[int, Tape | None] = {}
        self._taped[id(graph)] = self._tapes  # several steps may be open
        if self.jacobian == "pullback":
            self._check_pullback()

    def _check_pullback(self) -> None:
        """Raise for what the formulas do not know; layers of another kind are refused by the tape."""
        stack = self._regions.stack
        layers = [stack.layers[i] for k in self._building for i in self._regions.plan.stages[k].layers]
        if layers:
            Tape(layers)
            for k in (self._building.start - 1, *self._building):
                by_hand(self._regions, k)
        if any(drops_layers(layer) for layer in layers):
            raise ConfigError(
                setting="jacobian", given="pullback", allowed="another with layer dropout, such as loop"
            )

    @contextmanager
    def forward(self, planned: PlannedStage) -> Iterator[None]:
        way = "loop" if planned.index not in self._building or self._recompute else self.jacobian
        with recording(self._regions, planned.index, way) as tape:
            yield
        self._tapes[planned.index] = tape

    def after_stage(self, graph: StepGraph, index: int) -> None:
        """Every stage waits for the scan."""

    def finish(self, graph: StepGraph) -> None:
        stages = list(graph.pending.values())
        graph.pending.clear()
        canvas = canvas_of(stages)
        self._canvas = None if canvas is None else canvas.value.detach()
        self._tapes = self._taped.pop(id(graph))
        early = [stage for stage in stages if stage.planned.index < self._building.stop]
        jacobians = [self._jacobian(stage) for stage in early if stage.planned.index > 0 and stage.leaves]
        late = self.backwards(stages[len(early) :], graph.scale)  # the first that touches `.grad`
        behind = self.adjoint_behind(late[0] if late else None, jacobians, early)
        if behind is None:  # nothing before the last regions learns
            return
        most = max(n for one in (behind, *jacobians, *late) for n in one.shape[1:])
        behind = _widened(behind, most)
        adjoints = behind[None]
        if jacobians:
            self.jacobians = torch.stack([_widened(J, most) for J in jacobians])
            adjoints = suffix_adjoints(self.jacobians, behind, self.scan)
        rest = (_widened(one, most)[None].to(adjoints) for one in late[1:])
        self.adjoints = torch.cat((adjoints, *rest))
        for stage, adjoint in zip(reversed(early), adjoints.flip(0), strict=False):
            message = interface_of(stage)
            self.before_backward(stage)
            if message.value.requires_grad:
                n = message.value[0].numel()
                message.gradient = adjoint[:, :n].view_as(message.value).to(message.value)
                stage.leaves = stage.leaves[1:]  # the adjoint that it would hand on is known
                stage.backward(graph.scale)

    def adjoint_behind(
        self, late: Tensor | None, jacobians: Sequence[Tensor], early: Sequence[PendingStage]
    ) -> Tensor | None:
        """m̄ (batch, n) of what the `early` regions send; `late` is what the later ones' backwards found."""
        return late

    def before_backward(self, stage: PendingStage) -> None:
        """Called before the backward of each early region; the gradient of the canvas is all there."""

    def _jacobian(self, stage: PendingStage) -> Tensor:
        """J (batch, n, n) of a region, from the graph of its forward or, with `recompute`, a new one."""
        region, leaf, message = stage.planned.index, stage.leaves[0].tensor, interface_of(stage)
        ctx = replace(stage.ctx, canvas=self._canvas)
        ran = Visit(self._regions, region, ctx, leaf, message.value, self._tapes.pop(region))
        seen = visit(self._regions, region, leaf, ctx, self.jacobian) if self._recompute else ran
        J = interface_jacobian(seen, self.jacobian, self.chunk, self.trimmed)
        check_jacobian(ran, J, self.jacobian, self.trimmed)
        return J

    def backwards(self, stages: Sequence[PendingStage], scale: float) -> list[Tensor]:
        """Run backwards one after the other, the last first; the adjoints (batch, n) of what came in."""
        adjoints: list[Tensor] = []
        for stage in reversed(stages):
            stage.backward(scale)
            for source in (leaf.source for leaf in stage.leaves[:1]):  # a canvas collects in region 0
                if source.gradient is None:  # nothing of the message was read
                    source.gradient = torch.zeros_like(source.value)
                adjoints.insert(0, source.gradient.flatten(1))
        return adjoints


def canvas_of(stages: Sequence[PendingStage]) -> Message | None:
    """The hidden state that is the canvas, where region 0 runs or where it is read."""
    sent = (message for stage in stages for output, message in stage.sent.items() if output.relay == CANVAS)
    read = (leaf.source for stage in stages for leaf in stage.leaves[1:])
    return next(chain(sent, read), None)


def interface_of(stage: PendingStage) -> Message:
    """m_{k+1} of what a region sends; region 0 may send a canvas too."""
    return next(message for output, message in stage.sent.items() if output.relay != CANVAS)


def _widened(values: Tensor, n: int) -> Tensor:
    """(batch, n) or (batch, n, n) with zeros where a message is shorter than the longest: products of such
    matrices are the products themselves, widened."""
    shape = (len(values), *(n for _ in values.shape[1:]))
    if values.shape == shape:
        return values
    wide = values.new_zeros(shape)
    wide[tuple(slice(0, size) for size in values.shape)] = values
    return wide


@dataclass
class Hybrid(Scan):
    """A scan of which some regions hand the adjoint on."""

    carried: int | None = None
