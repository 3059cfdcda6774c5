"""Gauges that share a tensor are refused with the joint one; so is what an optimizer cannot keep."""

import pytest
import torch
from torch import Tensor, nn

from raising import refused
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
    ("one", "other", "setting"),
    [
        (ReLURescale("a", "b"), ReLURescale("b", "c"), "gauges"),
        (ChainedReLURescale(["a", "b", "c"]), ReLURescale("c", "d"), "gauges"),
        (HeadShift("a", ["b"]), CEShiftRowShift("a"), "gauges"),
        (CEShiftRowShift("b"), HeadShift("a", ["b"]), "gauges"),
        (HeadShift("a", ["b"]), HeadShift("a", ["c"]), "gauges"),
        (LNScale("a", "b"), LNScale("a", "c"), "gauges"),
        (LNScale("a", "b"), ReLURescale("b", "c"), "gauges"),
        (LNScale("a", "b"), LNScale("c", "b"), "gauges"),
    ],
)
def test_overlaps_are_refused_with_the_joint_gauge(one: Gauge, other: Gauge, setting: str) -> None:
    with refused(OptimError, setting=setting):
        check_disjoint([one, CEShiftBias("z"), other])


def test_disjoint_gauges_pass() -> None:
    check_disjoint([ReLURescale("a", "b"), ReLURescale("c", "d"), CEShiftBias("e"), CEShiftRowShift("f")])


def pair() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"up": nn.Parameter(torch.randn(4, 3)), "down": nn.Parameter(torch.randn(2, 4))}


GAUGE = ReLURescale("up", "down")


def test_gauges_need_names() -> None:
    with refused(OptimError, setting="params"):
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
        with refused(OptimError, setting="params"):
            DDCAdam(given, [GAUGE])
    with refused(OptimError, setting="params", given=""):
        DDCAdam([named["up"], named["up"]])


def test_a_gauge_across_groups() -> None:
    named = pair()
    with refused(OptimError, setting="params"):
        DDCAdam([{"params": [("up", named["up"])]}, {"params": [("down", named["down"])]}], [GAUGE])


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        (lambda tensor: torch.zeros_like(tensor), "gauges"),
        (lambda tensor: tensor.to(torch.bfloat16), "params"),
        (lambda tensor: tensor.to(torch.complex64), "params"),
        (lambda tensor: tensor.T.contiguous(), "gauges"),
    ],
)
def test_tensors_that_a_gauge_cannot_use(change: object, setting: str) -> None:
    named = pair()
    assert callable(change)
    named["down"] = nn.Parameter(change(named["down"].detach()))
    with refused(OptimError, setting=setting):
        DDCAdam(named.items(), [GAUGE])


def test_half_precision_is_refused_under_a_gauge_only() -> None:
    named = {name: nn.Parameter(tensor.detach().bfloat16()) for name, tensor in pair().items()}
    with refused(OptimError, setting="params"):
        DDCAdam(named.items(), [GAUGE])
    DDCAdam(named.items())


def test_decay_on_a_translation_is_refused_at_once_and_later() -> None:
    named: dict[str, Tensor] = {"bias": nn.Parameter(torch.ones(3))}
    with refused(OptimError, setting="weight_decay", given=0.1):
        DDCAdam(named.items(), [CEShiftBias("bias")], weight_decay=0.1)
    optimizer = DDCAdam(named.items(), [CEShiftBias("bias")])
    optimizer.param_groups[0]["weight_decay"] = 0.1
    named["bias"].grad = torch.ones(3)
    with refused(OptimError, setting="weight_decay", given=0.1):
        optimizer.step()
