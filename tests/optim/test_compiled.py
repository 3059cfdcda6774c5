"""The compiled step is the plain one: traced whole, in float64; one line where it cannot be compiled."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from topograd.optim import ddc_adam
from topograd.optim.compiled import CompiledStep
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import ChainedReLURescale, Gauge, LNScale


def chain() -> tuple[nn.Module, Gauge]:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    weights = ["0.weight", "2.weight", "4.weight"]
    return model, ChainedReLURescale(weights, ["0.bias", "2.bias"], [2, 1])


def normed() -> tuple[nn.Module, Gauge]:
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)).double()
    return model, LNScale("0.weight", "1.weight", bias="0.bias")


def steps(model: nn.Module, optimizer: DDCAdam, count: int = 4) -> None:
    for seed in range(count):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + seed)  # a schedule compiles nothing again
        model.zero_grad()
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "options"), [(chain, {"rms": True, "retract": True}), (normed, {"vertical": "sgd"})]
)
def test_the_traced_step_is_the_plain_one(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddc_adam, "CompiledStep", lambda: CompiledStep("eager"))
    torch.manual_seed(0)
    model, gauge = make()
    twin = copy.deepcopy(model)
    plain = DDCAdam(model.named_parameters(), [gauge], weight_decay=0.3, **options)
    traced = DDCAdam(twin.named_parameters(), [gauge], weight_decay=0.3, compile=True, **options)
    steps(model, plain)
    steps(twin, traced)
    assert traced._compiled is not None
    assert traced._compiled.works, "it was traced in one graph"
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
        for name, value in plain.state[other].items():
            torch.testing.assert_close(traced.state[one][name], value, rtol=1e-10, atol=1e-13)


def test_without_a_compiler_the_plain_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("no compiler\nand more")

    model, gauge = chain()
    twin = copy.deepcopy(model)
    optimizer = DDCAdam(model.named_parameters(), [gauge], compile=True)
    optimizer._compiled = CompiledStep("eager")
    monkeypatch.setattr(optimizer._compiled, "_step", broken)
    with pytest.warns(UserWarning, match=r"was not compiled \(no compiler\); it runs uncompiled"):
        steps(model, optimizer)
    steps(twin, DDCAdam(twin.named_parameters(), [gauge]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
