"""Optimizers on the second device: a step reads nothing and copies nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices import assert_same, on_both
from tests.devices.pinned import check
from topograd import optim
from topograd.training.muon import Muon

Begin = Callable[[], None]


def data(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 6, generator=generator).double()
    return inputs.to(device), torch.randint(4, (12,), generator=generator).to(device)


def network(device: torch.device, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias), nn.ReLU(), nn.Linear(8, 8, bias), nn.ReLU(), nn.Linear(8, 4, bias)]
    return nn.Sequential(*layers).double().to(device)


def gauges(bias: bool) -> list[optim.Gauge]:
    if not bias:
        return [optim.ReLURescale("0.weight", "2.weight")]
    chain = optim.ChainedReLURescale(["0.weight", "2.weight", "4.weight"], ["0.bias", "2.bias"])
    return [chain, optim.CEShiftBias("4.bias")]


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": lambda m: Muon([p for p in m.parameters() if p.dim() == 2]),
    "ddc-momentum": lambda m: optim.DDCMomentum(m.named_parameters(), gauges(False), lr=1e-2),
    "ddc-muon": lambda m: optim.DDCMuon(m.named_parameters(), gauges(False), lr=1e-2),
    **{
        f"ddc-adam {settings}": lambda m, settings=settings: optim.DDCAdam(  # type: ignore[misc]
            m.named_parameters(), gauges(True), lr=1e-2, **settings
        )
        for settings in (
            {},
            {"vertical": "adam"},
            {"vertical": "sgd"},
            {"retract": True},
            {"rms": True},
            {"fused": True},
            {"foreach": True},
        )
    },
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_step_stays_on_the_device(maker: str) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        model = network(device, bias="ddc-adam" in maker)
        optimizer = MAKERS[maker](model)
        inputs, labels = data(device)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            begin()
            optimizer.step()
        return dict(model.named_parameters())

    expected, result, transfers = on_both(run)
    check(transfers, "optimizers")
    assert_same(result, expected)


def test_gauges_are_found_and_move_a_network_on_a_device() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        model = network(device)
        result = optim.find_gauges(model, data(device)[0])
        named = dict(model.named_parameters())
        gauge = optim.ReLURescale("0.weight", "2.weight", bias="0.bias")
        element = gauge.element(named, torch.Generator().manual_seed(0))
        return [repr(one) for one in result.gauges], gauge.act(named, element), gauge.horizontal(named, named)

    expected, result, _ = on_both(run)
    assert expected[0], "there is a symmetry to find"
    assert_same(result, expected)
