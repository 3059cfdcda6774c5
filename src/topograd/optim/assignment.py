"""Assignment of parameters to gauges, and its checks.

A parameter belongs to at most one gauge: the step of one gauge would undo that of the other. Gauges that
share a tensor raise OptimError, with the joint gauge to use instead where there is one.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge
from topograd.optim.gauges.homogeneous import ChainedReLURescale, LNScale, ReLURescale
from topograd.optim.gauges.rescaling import Rescaling
from topograd.optim.gauges.translation import CEShiftRowShift, HeadShift, Translation

_CHAINS = (ReLURescale, ChainedReLURescale)
_PRECISE = (torch.float32, torch.float64)


def check_parameters(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptimError for parameters that are given twice, complex, or not floating."""
    seen: dict[int, str] = {}
    taken: set[str] = set()
    for group in groups:
        entries = group["params"]
        for entry in [entries] if isinstance(entries, Tensor) else entries:
            name, tensor = entry if isinstance(entry, tuple) else ("", entry)
            label = repr(name) if name else f"a parameter of shape {tuple(tensor.shape)}"
            if id(tensor) in seen or name in taken:
                raise OptimError(
                    f"{label} is given twice (first as {seen.get(id(tensor), label)})",
                    setting="params",
                    given=name,
                    remedy="give it once",
                )
            if not tensor.is_floating_point():
                raise OptimError(
                    f"{label} is {tensor.dtype}", setting="params", given=name, allowed="real and floating"
                )
            seen[id(tensor)] = label
            taken |= {name} - {""}


def check_gauges(gauges: Sequence[Gauge], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptimError for gauges that overlap, or that do not hold for the parameters."""
    if gauges and any("param_names" not in group for group in groups):
        raise OptimError(
            "gauges name their parameters", setting="params", allowed="model.named_parameters(), not tensors"
        )
    check_disjoint(gauges)
    named = [dict(zip(group.get("param_names", ()), group["params"], strict=False)) for group in groups]
    everything = {name: tensor for part in named for name, tensor in part.items()}
    for gauge in gauges:
        gauge.check(everything)
        at = {index for index, part in enumerate(named) for name in gauge.names if name in part}
        if len(at) > 1:
            raise OptimError(
                f"{gauge} spans param groups {sorted(at)}",
                setting="params",
                given=sorted(at),
                remedy="put its parameters into one group",
            )
        tensors = [everything[name] for name in gauge.names]
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            raise OptimError(
                f"{gauge} has tensors of several dtypes or devices",
                setting="params",
                remedy="keep them alike",
            )
        if (dtype := tensors[0].dtype) not in _PRECISE:
            raise OptimError(
                f"{gauge} is on {dtype} tensors", setting="params", given=dtype, allowed="float32 or float64"
            )
        check_decay(gauge, groups[at.pop()]["weight_decay"])
        if isinstance(gauge, Rescaling):
            gauge.check_norms({name: everything[name].detach() for name in gauge.names})


def check_disjoint(gauges: Sequence[Gauge]) -> None:
    """Raise OptimError if two gauges share a tensor.

    >>> check_disjoint([ReLURescale("a", "b"), ReLURescale("b", "c")])
    Traceback (most recent call last):
    ...
    topograd.errors.OptimError: ReLURescale and ReLURescale share 'b'; use a ChainedReLURescale over all
    """
    for one, other in combinations(gauges, 2):
        if shared := sorted(set(one.names) & set(other.names)):
            kinds = f"{type(one).__name__} and {type(other).__name__} share {shared[0]!r}"
            raise OptimError(kinds, setting="gauges", given=shared[0], remedy=_joint(one, other))


def check_decay(gauge: Gauge, weight_decay: float) -> None:
    """Shrinking does not commute with shifting."""
    if weight_decay and isinstance(gauge, Translation):
        raise OptimError(
            f"weight_decay {weight_decay} on {gauge} breaks the translation",
            setting="weight_decay",
            given=weight_decay,
            remedy="put its tensors into a param group with weight_decay=0",
        )


def _joint(one: Gauge, other: Gauge) -> str:
    """The gauge that covers both."""
    if isinstance(one, _CHAINS) and isinstance(other, _CHAINS):
        return "use a ChainedReLURescale over all"
    heads = [isinstance(gauge, HeadShift) for gauge in (one, other)]
    if all(heads):
        return "use one HeadShift with all stages"
    if any(heads) and any(isinstance(gauge, CEShiftRowShift) for gauge in (one, other)):
        return "use HeadShift(..., rows=True), which is both"
    if isinstance(one, LNScale) and isinstance(other, LNScale) and one.scale == other.scale:
        return "use one LNScale with all readers"
    return "no gauge here covers both: keep one of them"
