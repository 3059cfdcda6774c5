"""Regions of a bounded-interface model on ranks: exact gradients with one collective for the adjoints.

Statement ("LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Algorithms 1 and 2). Rank p has
regions a..b. Forward, the message m (batch, n) goes from rank to rank. As soon as a rank has sent its own, it
builds the Jacobians J of its inner regions, while later ranks go forward: the overlap of Algorithm 2. Then
every rank gives the product of its Jacobians, and the last one the adjoint of its message, to one gather:

    Π_p = J_b ... J_a  (batch, n, n),     ḡ behind rank p = ḡ_last Π_{P-1} ... Π_{p+1}

From there the suffix scan over its own Jacobians is local, and so is every region's backward. The canvas x0
and the interfaces, which two ranks use, are added up with everything else that is shared (`stage_loop.py`).

Bytes of a micro-batch: B n for each boundary, P B (n² + n) for the gather; once a step the shared gradients.
The paper's "56 KB" (r = 64, K = 7, bf16) is K r² without the batch, whose samples have a Jacobian each, and
without the gradient of the canvas, which is most of it.

`recompute` keeps no graph between forward and backward: a region is run again from its message for its
Jacobian and once more for its backward (appendix D.1); memory of one region at a time, two more forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from topograd.exec.forward import run_stage
from topograd.interfaces.exactness import check_jacobians
from topograd.interfaces.jacobian import Visit, interface_jacobian, visit
from topograd.interfaces.regions import Regions
from topograd.interfaces.settings import Way
from topograd.interfaces.suffix_scan import suffix_adjoints
from topograd.nn.stack import Bus, Stack
from topograd.parallel.ranks import Ranks
from topograd.parallel.wire import StageWire
from topograd.topology.plan import Plan, PlannedStage
from topograd.training.objectives import Logits, objectives_of, stage_loss


@dataclass
class RegionScan:
    """One rank's part of a step; `step` adds gradients like `train_step`."""

    ranks: Ranks
    wire: StageWire
    jacobian: Way = "loop"
    recompute: bool = False
    gathered_bytes: int = field(default=0, init=False)

    def step(
        self,
        stack: Stack,
        plan: Plan,
        inputs: Tensor,
        targets: Tensor,
        *,
        scale: float = 1.0,
        teacher: Logits | None = None,
    ) -> Tensor:
        """Each region's loss (stages,): nan but for the last one, and that on its own rank only."""
        regions = Regions.of(stack, plan)
        embedded = stack.embed(inputs)
        x0 = embedded.detach().requires_grad_(embedded.requires_grad)
        bus = stack.bus(x0, inputs)
        losses = x0.new_full((regions.count,), float("nan"))
        seen, terminal = self._forward(regions, x0, bus, targets, scale, teacher, losses)
        inner = [one for one in seen if one.index > 0]
        jacobians = self._jacobians(regions, inner, bus)
        behind = self._gather(jacobians, terminal, self._width(regions), x0, len(inputs))
        adjoints = suffix_adjoints(jacobians, behind) if inner else behind[None]
        for one, adjoint in zip(seen, adjoints[len(adjoints) - len(seen) :], strict=True):
            again = self._visit(regions, one.index, one.message, bus) if self.recompute else one.visit
            assert again is not None
            out = again.message_out
            if out.requires_grad:
                torch.autograd.backward(out, adjoint.view_as(out).to(out))
            one.visit = None
        if x0.grad is not None:
            embedded.backward(x0.grad)
        return losses

    def _forward(
        self,
        regions: Regions,
        x0: Tensor,
        bus: Bus,
        targets: Tensor,
        scale: float,
        teacher: Logits | None,
        losses: Tensor,
    ) -> tuple[list[_Seen], Tensor | None]:
        """The rank's regions in order; the last region's loss and backward too, which gives ḡ_last."""
        seen: list[_Seen] = []
        message = x0
        for planned in regions.plan.stages:
            k = planned.index
            if k not in self.wire.stages:
                for port in self.wire.incoming(k):
                    message = self.wire.receive(port)
                continue
            if k == regions.count - 1:
                leaf = message.detach().requires_grad_()
                h, _ = run_stage(regions.stack, planned, [leaf], _bus_of(planned, bus))
                objective = objectives_of(regions.plan)[k]
                loss = stage_loss(regions.stack, h, planned.head, objective, targets, teacher=teacher)
                (loss * (planned.scale * scale)).backward()
                losses[k] = loss.detach()
                assert leaf.grad is not None
                return seen, leaf.grad.flatten(1)
            start = message if k == 0 else message.detach().requires_grad_()
            with torch.set_grad_enabled(not self.recompute):
                found = self._visit(regions, k, start, bus)
            message = found.message_out
            self.wire.send(planned.sends[0], message.detach())
            seen.append(_Seen(k, start, None if self.recompute else found))
        return seen, None

    def _visit(self, regions: Regions, region: int, message: Tensor, bus: Bus) -> Visit:
        own = _bus_of(regions.plan.stages[region], bus)
        return visit(regions, region, message, own, self.jacobian if region else "loop")

    def _jacobians(self, regions: Regions, inner: list[_Seen], bus: Bus) -> Tensor:
        """J of the inner regions of this rank, (count, batch, n, n)."""
        if not inner:
            return torch.zeros(0)
        found = []
        for one in inner:
            again = self._visit(regions, one.index, one.message, bus) if one.visit is None else one.visit
            found.append(interface_jacobian(again, self.jacobian))
            check_jacobians([again], found[-1][None], self.jacobian, True)
        return torch.stack(found)

    def _width(self, regions: Regions) -> int:
        """n: numbers in a message of one sample."""
        settings = regions.settings
        return settings.rank * max(1, settings.segments - 1 if settings.causal else 1)

    def _gather(self, jacobians: Tensor, terminal: Tensor | None, n: int, like: Tensor, batch: int) -> Tensor:
        """ḡ behind this rank's inner regions: one collective of all products and the last adjoint."""
        place, places = self.ranks.place, self.ranks.config.stages
        product = torch.eye(n, dtype=like.dtype, device=like.device).expand(batch, n, n)
        for J in jacobians:
            product = J.to(like.dtype) @ product
        own = torch.zeros((batch, n, n + 1), dtype=like.dtype, device=like.device)
        own[..., :n] = product
        if terminal is not None:
            own[..., n] = terminal
        everybody = [torch.empty_like(own) for _ in range(places)]
        what = "gathering the products of Jacobians"
        self.ranks.collective(lambda: dist.all_gather(everybody, own.contiguous(), async_op=True), what)
        self.gathered_bytes += own.numel() * own.element_size() * (places - 1)
        row = everybody[places - 1][..., n]
        for p in range(places - 1, place, -1):
            row = (row[:, None] @ everybody[p][..., :n])[:, 0]
        return row


def _bus_of(planned: PlannedStage, bus: Bus) -> Bus:
    """The bus as this region sees it: its x0 carries gradient, or not."""
    return bus if planned.live_bus else replace(bus, x0=bus.x0.detach())


@dataclass
class _Seen:
    """A region that this rank has run: its index, what it heard, and its graph unless that is recomputed."""

    index: int
    message: Tensor
    visit: Visit | None
