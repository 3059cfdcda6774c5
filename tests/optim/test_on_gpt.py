"""DDCAdam on this package's own GPT: its gauges hold, it learns, and its function keeps to the orbit."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raising import refused
from topograd.errors import OptimError
from topograd.nn.gpt import GPT
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import CEShiftRowShift, Gauge, HeadShift, ReLURescale


def gpt(heads: int = 0, **settings: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=11, context=6, **settings).double()
    model.add_heads(range(heads))
    return model


def mlp_gauge(layer: int, degree: int = 2) -> ReLURescale:
    return ReLURescale(f"layers.{layer}.mlp.up.weight", f"layers.{layer}.mlp.down.weight", degree=degree)


def test_the_gauges_of_a_gpt_hold_and_others_do_not() -> None:
    model = gpt()
    assert mlp_gauge(0).residual(model) < 1e-13
    assert mlp_gauge(0, degree=1).residual(model) > 1e-3
    assert CEShiftRowShift("head.weight").residual(model) < 1e-13
    assert CEShiftRowShift("head.weight").residual(gpt(tied=True)) > 1e-3
    assert CEShiftRowShift("head.weight").residual(gpt(softcap=1.0)) > 1e-5  # its first logits are small


@pytest.mark.parametrize("rows", [False, True])
def test_heads_shift_when_every_stage_is_named(rows: bool) -> None:
    model = gpt(heads=2)
    tokens = torch.randint(11, (2, 6))

    def every_stage(network: nn.Module) -> list[Tensor]:
        assert isinstance(network, GPT)
        h = network.embed(tokens)
        return [network.readout(h, stage) for stage in range(2)]

    deltas = [f"head.deltas.{stage}.weight" for stage in range(2)]
    assert HeadShift("head.weight", deltas, rows=rows).residual(model, every_stage) < 1e-13
    assert HeadShift("head.weight", deltas[:1], rows=rows).residual(model, every_stage) > 1e-3


def test_outputs_that_start_at_zero_are_refused() -> None:
    model = gpt()
    with refused(OptimError, setting="gauges", given="layers.0.mlp.down.weight"):
        DDCAdam(model.named_parameters(), [mlp_gauge(0)])


def test_two_gpts_on_one_orbit_stay_one_function() -> None:
    model = gpt()
    for layer in range(2):
        nn.init.normal_(model.get_parameter(f"layers.{layer}.mlp.down.weight"), std=0.2)
    gauges: list[Gauge] = [mlp_gauge(0), mlp_gauge(1), CEShiftRowShift("head.weight")]
    twin = copy.deepcopy(model)
    named = {name: parameter.detach() for name, parameter in twin.named_parameters()}
    for gauge in gauges:
        for name, tensor in gauge.act(named, gauge.element(named)).items():
            named[name].copy_(tensor)
    inputs, targets = torch.randint(11, (4, 6)), torch.randint(11, (24,))
    losses: list[list[float]] = [[], []]
    for network, seen in zip((model, twin), losses, strict=True):
        optimizer = DDCAdam(network.named_parameters(), gauges, lr=0.01, rms=True)
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs).flatten(0, 1), targets)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0][-1] < losses[0][0] - 0.3
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
