"""Check of a Jacobian against the forward that ran, in one random direction.

Statement. A Jacobian is built sample by sample, by running the region again (prefixes, forward mode) or by
formulas (pullback). That is J of the forward that ran only if the region is a function of its message:
nothing in it is random or kept from one call to the next, samples do not mix, no position reads a later one,
and it computes what the formulas say. So for a random v (batch, n),

    ‖v J - w‖ <= √ε max(‖v J‖, ‖w‖),     w the VJP of v through the graph of that forward, all samples at once

with ε the spacing of the numbers of the message, or of autocast where it is on.

Cost: one VJP for each Jacobian, about 1.1 forwards of its region. It is paid at a stack's first step, and
again when the regions, the way to J, or what train() and eval() set have changed; never otherwise.
Limits: what begins to be random later is not seen, nor what moves v J by less than √ε (3e-4 in float32, 0.09
in bfloat16). `regions.py` raises for modules such as dropout before anything runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.interfaces.jacobian import Visit, vjp
from topograd.nn.stack import Stack
from topograd.runs.topology_config import Jacobian

_CHECKED: WeakKeyDictionary[Stack, set[Hashable]] = WeakKeyDictionary()


def check_jacobian(one: Visit, J: Tensor, way: Jacobian, trimmed: bool) -> None:
    """Refuse a Jacobian (batch, n, n) that is not the visit's; what held is not tried twice."""
    regions = one.regions
    layers = (regions.stack.layers[i] for i in regions.plan.stages[one.region].layers)
    key = (
        way,
        trimmed,
        one.region,
        tuple(planned.stage.stop for planned in regions.plan.stages),
        tuple(module.training for layer in layers for module in layer.modules()),
    )
    tried = _CHECKED.setdefault(regions.stack, set())
    if key not in tried and _is_exact(one, J, way):
        tried.add(key)


def _is_exact(one: Visit, J: Tensor, way: Jacobian) -> bool:
    """Whether J could be tried and holds; numbers that are not finite are reported elsewhere."""
    v = torch.randn(one.message_out.shape, generator=torch.Generator().manual_seed(0)).to(one.message_out)
    expected = vjp(one.message_out, one.message_in, v).flatten(1).to(J)
    actual = (v.flatten(1).to(J)[:, None] @ J)[:, 0]
    off, *sizes = torch.stack([x.norm() for x in (actual - expected, actual, expected)]).tolist()
    size = max(sizes)
    if not size < float("inf"):
        return False
    device = one.message_out.device.type
    coarsest = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else one.message_out.dtype
    )
    if off <= torch.finfo(coarsest).eps ** 0.5 * size:
        return True
    layers = one.regions.plan.stages[one.region].layers
    raise StackError(
        f"the Jacobian of region {one.region + 1} (layers.{layers[0]} to layers.{layers[-1]}) is off by "
        f"{off / size:.1%} from the forward that ran: {_reason(one, way)}"
    )


@torch.no_grad()
def _reason(one: Visit, way: Jacobian) -> str:
    first, second = (one.regions.visit(one.region, one.message_in, one.ctx) for _ in range(2))
    if not torch.equal(first, second):
        return (
            "two runs of it differ, so something is random (as F.dropout) or kept from one call to the next; "
            "call eval() or remove it, or use backward 'autograd'"
        )
    if way == "pullback":
        return "it computes something that the hand-written pullback does not know; use jacobian='loop'"
    return (
        "a sample of the batch reaches another, or a position reads a later one; remove what does that, or "
        "use backward 'autograd'"
    )
