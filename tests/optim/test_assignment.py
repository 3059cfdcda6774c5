"""Gauges that share a tensor are refused with the joint one; so is what an optimizer cannot keep."""

import pytest
import torch
from torch import Tensor, nn

from topograd.errors import OptimError
from topograd.optim.assignment import check_disjoint
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import (
    CEShiftBias,
    CEShiftRowShift,
    ChainedReLURescale,
    Gauge,
    HeadShift,
    LNScale,
    ReLURescale,
)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (ReLURescale("a", "b"), ReLURescale("b", "c"), "share 'b'; use a ChainedReLURescale"),
        (ChainedReLURescale(["a", "b", "c"]), ReLURescale("c", "d"), "share 'c'; use a ChainedReLURescale"),
        (HeadShift("a", ["b"]), CEShiftRowShift("a"), r"HeadShift\(..., rows=True\)"),
        (CEShiftRowShift("b"), HeadShift("a", ["b"]), r"HeadShift\(..., rows=True\)"),
        (HeadShift("a", ["b"]), HeadShift("a", ["c"]), "one HeadShift with all stages"),
        (LNScale("a", "b"), LNScale("a", "c"), "one LNScale with all readers"),
        (LNScale("a", "b"), ReLURescale("b", "c"), "no gauge here covers both"),
        (LNScale("a", "b"), LNScale("c", "b"), "no gauge here covers both"),
    ],
)
def test_overlaps_are_refused_with_the_joint_gauge(one: Gauge, other: Gauge, message: str) -> None:
    with pytest.raises(OptimError, match=message):
        check_disjoint([one, CEShiftBias("z"), other])


def test_disjoint_gauges_pass() -> None:
    check_disjoint([ReLURescale("a", "b"), ReLURescale("c", "d"), CEShiftBias("e"), CEShiftRowShift("f")])


def pair() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"up": nn.Parameter(torch.randn(4, 3)), "down": nn.Parameter(torch.randn(2, 4))}


GAUGE = ReLURescale("up", "down")


def test_gauges_need_names() -> None:
    with pytest.raises(OptimError, match="bare tensors"):
        DDCAdam(pair().values(), [GAUGE])
    DDCAdam(pair().values())


def test_a_parameter_given_twice() -> None:
    named = pair()
    items = list(named.items())
    for given in (
        [*items, ("again", named["up"])],
        [*items, ("up", nn.Parameter(torch.ones(2)))],
        [{"params": items}, {"params": [("other", named["down"])]}],
    ):
        with pytest.raises(OptimError, match="is given twice"):
            DDCAdam(given, [GAUGE])
    with pytest.raises(OptimError, match=r"shape \(4, 3\) is given twice"):
        DDCAdam([named["up"], named["up"]])


def test_a_gauge_across_groups() -> None:
    named = pair()
    with pytest.raises(OptimError, match=r"spans param groups \[0, 1\]"):
        DDCAdam([{"params": [("up", named["up"])]}, {"params": [("down", named["down"])]}], [GAUGE])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: torch.zeros_like(tensor), "'down' has norm zero"),
        (lambda tensor: tensor.to(torch.bfloat16), "several dtypes"),
        (lambda tensor: tensor.to(torch.complex64), "is torch.complex64"),
        (lambda tensor: tensor.T.contiguous(), "are not inputs of"),
    ],
)
def test_tensors_that_a_gauge_cannot_use(change: object, message: str) -> None:
    named = pair()
    assert callable(change)
    named["down"] = nn.Parameter(change(named["down"].detach()))
    with pytest.raises(OptimError, match=message):
        DDCAdam(named.items(), [GAUGE])


def test_half_precision_is_refused_under_a_gauge_only() -> None:
    named = {name: nn.Parameter(tensor.detach().bfloat16()) for name, tensor in pair().items()}
    with pytest.raises(OptimError, match="keep its parameters in float32 or float64"):
        DDCAdam(named.items(), [GAUGE])
    DDCAdam(named.items())


def test_decay_on_a_translation_is_refused_at_once_and_later() -> None:
    named: dict[str, Tensor] = {"bias": nn.Parameter(torch.ones(3))}
    with pytest.raises(OptimError, match=r"weight_decay 0.1 on CEShiftBias\(bias='bias'\)"):
        DDCAdam(named.items(), [CEShiftBias("bias")], weight_decay=0.1)
    optimizer = DDCAdam(named.items(), [CEShiftBias("bias")])
    optimizer.param_groups[0]["weight_decay"] = 0.1
    named["bias"].grad = torch.ones(3)
    with pytest.raises(OptimError, match="breaks the translation"):
        optimizer.step()
