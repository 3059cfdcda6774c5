"""Exact gradients of bounded-interface regions on ranks, with one collective for the adjoints.

Statement ("LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Algorithms 1 and 2). Rank p has
regions a..b. Forward, the message m (batch, n) goes from rank to rank. As soon as a rank has sent its own, it
builds the Jacobians J of its inner regions, while later ranks go forward: the overlap of Algorithm 2. Then
every rank gives the product of its Jacobians, and the last one the adjoint of its message, to one gather
among the ranks of one replica:

    Π_p = J_b ... J_a  (batch, n, n),     ḡ behind rank p = ḡ_last Π_{P-1} ... Π_{p+1}

in float32 or better, whatever autocast computes in. From there the suffix scan over its own Jacobians is
local, and so is every region's backward (`interfaces/engines.py`). The canvas x0 and the interfaces, which
two ranks use, are added up with everything else that is shared (`stage_loop.py`).

Bytes of a micro-batch: B n for each boundary, P B (n² + n) for the gather; once a step the shared gradients.
The paper's "56 KB" (r = 64, K = 7, bf16) is K r² without the batch, whose samples have a Jacobian each, and
without the gradient of the canvas, which is most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from topograd.exec.gradient import PendingStage
from topograd.interfaces.engines import Scan
from topograd.parallel.ranks import Ranks


@dataclass
class RegionScan(Scan):
    """The scan of one rank: the adjoint behind its regions comes from a gather."""

    ranks: Ranks = field(kw_only=True)
    gathered_bytes: int = field(default=0, init=False)
    crosses_ranks: ClassVar[bool] = True

    def adjoint_behind(
        self, late: Tensor | None, jacobians: Sequence[Tensor], early: Sequence[PendingStage]
    ) -> Tensor:
        row = late if late is not None else next(iter(early[-1].sent.values())).value.flatten(1)
        dtype = torch.promote_types(row.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(row.device.type, enabled=False):
            batch, n = row.shape
            own = torch.zeros((batch, n, n + 1), dtype=dtype, device=row.device)
            own[..., :n] = torch.eye(n, dtype=dtype, device=row.device)
            for J in jacobians:
                own[..., :n] = J.to(dtype) @ own[..., :n]
            if late is not None:
                own[..., n] = late
            parts = self._gather(own)
            row = parts[-1][..., n]
            for part in reversed(parts[self.ranks.place + 1 :]):
                row = (row[:, None] @ part[..., :n])[:, 0]
        return row

    def _gather(self, own: Tensor) -> list[Tensor]:
        """The products of every rank of this replica, in the order of their stages."""
        parts = [torch.empty_like(own) for _ in range(self.ranks.config.stages)]
        group, what = self.ranks.stage_group, "gathering the products of Jacobians"
        self.ranks.collective(lambda: dist.all_gather(parts, own, group=group, async_op=True), what)
        self.gathered_bytes += own.numel() * own.element_size() * (len(parts) - 1)
        return parts
