"""Exact gradients of bounded-interface regions on ranks, by recursive doubling over the ranks.

Statement ("LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Algorithms 1 and 2). Rank p has
regions a..b. Forward, the message m (batch, n) goes from rank to rank. As soon as a rank has sent its own, it
builds the Jacobians J of its inner regions, while later ranks go forward: the overlap of Algorithm 2. With

    Π_p = J_b ... J_a  (batch, n, n),     ḡ behind rank p = ḡ_last Π_{P-1} ... Π_{p+1}

and ḡ_last the adjoint behind the last rank's early regions, every rank but the last keeps E_p, the product of
the c ranks behind it. First c = 1 and E_p = Π_{p+1}, sent by its neighbour. Then, while p + c < P - 1,

    E_p ← E_{p+c} E_p,     c ← 2 c

so that after 1 + ⌈log₂(P - 1)⌉ hops all ranks are done. What reaches the last rank is a row, ḡ_last Π ... Π,
and costs n numbers instead of n² to send and a row's product instead of a matrix's. Messages go from later to
earlier ranks only. Everything is float32 or better, whatever autocast computes in. From there the suffix scan
over a rank's own Jacobians is local, and so is every region's backward (`interfaces/engines.py`). The canvas
x0 and the interfaces, which two ranks use, are added up with all else that is shared (`stage_loop.py`). Of a
canvas of layers every rank sends its gradient, one for each micro-batch, to the first, which adds them up
before the backward of region 0.

Where the last `carried` regions hand the adjoint on (`Hybrid`), the ranks behind the one with the first of
them, q, do so by their own backwards, a row of n numbers from each to the one before it. Rank q then stands
for the last one above; ranks before it have built their Jacobians meanwhile. Micro-batches are pipelined as
in 1F1B: a rank runs as many of them forward as ranks lie behind it, then scans and runs forward in turns.

Bytes of a micro-batch: B n for each boundary going forward; back, of P - 1 hops to a neighbour and of each
doubling B n² each, but B n where a row is sent, and B T d from each rank for a canvas of layers. A rank
multiplies at most ⌈log₂(P - 1)⌉ times. Once a step come the shared gradients.
The paper's "56 KB" (r = 64, K = 7, bf16) is K r² without the batch, whose samples have a Jacobian each, and
without the gradient of the canvas, which is most of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.gradient import PendingStage, StepGraph
from topograd.interfaces.engines import Scan, canvas_of, interface_of
from topograd.parallel.ranks import Ranks

TAG = 40
"""Of what this module sends, apart from messages that go forward."""
AHEAD = 16
"""Products under way before a rank waits for the oldest: a receiver asks for one when its own scan is there,
and a rank that waited for it would be late for all micro-batches behind."""


@dataclass
class RegionScan(Scan):
    """The scan of one rank: the adjoint behind its regions comes from the ranks behind it."""

    ranks: Ranks = field(kw_only=True)
    owners: Sequence[int] = field(default=(), kw_only=True)
    """The rank of each region; with none, all but the last hand nothing on."""
    scan_bytes: int = field(default=0, init=False)
    """What this rank has sent to others for the scan."""
    _sending: deque[tuple[Tensor, dist.Work, int]] = field(default_factory=deque, init=False)
    crosses_ranks: ClassVar[bool] = True

    def begin(self, graph: StepGraph) -> None:
        super().begin(graph)
        if not self._regions.alike:
            raise ConfigError(
                setting="interface",
                given=graph.plan.topology.interface,
                allowed="the same at every boundary for a scan over ranks; backward autograd takes others",
            )

    def finish(self, graph: StepGraph) -> None:
        canvas = canvas_of(list(graph.pending.values()))
        super().finish(graph)
        if canvas is not None and self.ranks.place > 0:
            found = torch.zeros_like(canvas.value) if canvas.gradient is None else canvas.gradient
            self._swap(found, 0, None, 0)

    def before_backward(self, stage: PendingStage) -> None:
        canvas = canvas_of([stage])
        if canvas is None or stage.planned.index > 0:
            return
        for place in range(1, self.ranks.config.stages):
            room = torch.empty_like(canvas.value, memory_format=torch.contiguous_format)
            self._swap(None, 0, room, place)
            canvas.add_gradient(room)

    @property
    def _last(self) -> int:
        """The place at which the scan begins."""
        return self.owners[self._building.stop] if self.owners else self.ranks.config.stages - 1

    def backwards(self, stages: Sequence[PendingStage], scale: float) -> list[Tensor]:
        place = self.ranks.place
        if stages and stages[-1].planned.index < self._regions.count - 1:  # a later rank hands on to this
            (message,) = stages[-1].sent.values()
            room = torch.empty_like(message.value, memory_format=torch.contiguous_format)
            message.gradient = self._swap(None, place, room, place + 1)
        adjoints = super().backwards(stages, scale)
        if adjoints and place > self._last:
            self._swap(adjoints[0], place - 1, None, place)
        return adjoints

    def adjoint_behind(
        self, late: Tensor | None, jacobians: Sequence[Tensor], early: Sequence[PendingStage]
    ) -> Tensor | None:
        if self.ranks.place > self._last:
            return None
        row = late if late is not None else interface_of(early[-1]).value.flatten(1)
        dtype = torch.promote_types(row.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(row.device.type, enabled=False):
            batch, n = row.shape
            last = self.ranks.place == self._last
            own = torch.eye(n, dtype=dtype, device=row.device).expand(batch, n, n)
            for J in jacobians:
                own = J.to(dtype) @ own
            if last:
                own = row.to(dtype)[:, None] @ own
            behind = self._doubled(own)
            return row.to(dtype) if behind is None else behind[:, 0]

    def _doubled(self, own: Tensor) -> Tensor | None:
        """The row (B, 1, n) behind this rank, from each rank's product, or row at the last; None there."""
        place, last = self.ranks.place, self._last
        if last == 0:
            return None
        batch, _, n = own.shape
        reach = 1
        behind = self._swap(
            own if place > 0 else None,
            place - 1,
            own.new_empty(batch, 1 if place + 1 == last else n, n) if place < last else None,
            place + 1,
        )
        while reach < last:  # a rank is done when its product reaches the last one
            waits = place + reach < last
            later = place + reach
            received = self._swap(
                behind if place < last and place >= reach else None,
                place - reach,
                own.new_empty(batch, 1 if later + reach >= last else n, n) if waits else None,
                later,
            )
            if waits:
                assert received is not None
                assert behind is not None
                behind = received @ behind
            reach *= 2
        return behind

    def _swap(self, sent: Tensor | None, to: int, room: Tensor | None, source: int) -> Tensor | None:
        """Send a product to one place of this replica, and receive another's into `room`; or gradients."""
        what = "a product of Jacobians, or the gradient of a canvas"
        if sent is not None:
            sent, peer = sent.contiguous(), self.ranks.at(to)
            self.scan_bytes += sent.numel() * sent.element_size()
            self._sending.append((sent, self.ranks.begin(dist.isend, sent, peer, what, TAG), peer))
        if room is not None:
            other = self.ranks.at(source)
            self.ranks.wait(self.ranks.begin(dist.irecv, room, other, what, TAG), what, other)
        while len(self._sending) > AHEAD:
            _, work, peer = self._sending.popleft()
            self.ranks.wait(work, what, peer)
        return room
