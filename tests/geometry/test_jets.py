"""Jets: Taylor coefficients against closed forms, and the order of a network's direction."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.profiler import ProfilerActivity, profile

from topograd.geometry.jets import MOST, FixedMaps, Jet, read_jet
from topograd.geometry.line_scan import Probe
from topograd.nn.gpt import GPT


def size(c: Tensor) -> float:
    return float(c.square().sum()) / 2


@pytest.mark.parametrize("k", range(1, MOST + 1))
def test_the_order_is_the_first_power(k: int) -> None:
    ones = torch.ones(3, 1).double()
    jet = read_jet(lambda t: (2 * t**k + 8 * t ** (k + 1)) * ones, size, 1e-20)
    assert jet.order == k
    if k < MOST:
        assert jet.crossover == pytest.approx(0.25)
    else:
        assert jet.crossover is None


def test_what_has_no_order_and_no_next_power() -> None:
    assert read_jet(lambda t: t ** (MOST + 1), size, 1e-20) == Jet(None, None)
    assert read_jet(lambda t: 3 * t, size, 1e-20) == Jet(1, None)
    found = read_jet(torch.sin, size, 1e-20)
    assert found == Jet(1, None), "its next coefficient is zero"


def test_a_dead_unit_of_a_network_has_order_two_and_a_live_one_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model.get_parameter("0.weight")[0] = 0
        model.get_parameter("0.bias")[0] = 0
        model.get_parameter("2.weight")[:, 0] = 0
    parts = {name: torch.zeros_like(model.get_parameter(name)) for name in ("0.weight", "2.weight")}
    parts["0.weight"][0], parts["2.weight"][:, 0] = 1.0, 1.0
    probe = Probe(model, torch.randn(20, 3).double(), "squared-error", None, None)
    dead = probe.jet(parts)
    assert (dead.order, dead.crossover) == (2, None), "t tanh(t x) has no third power"
    parts["2.weight"][:, 1] = 1.0
    assert probe.jet(parts).order == 1


def test_attention_has_jets_and_the_crossover_is_where_finite_differences_say() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=16, context=8).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(16, (2, 8))
    probe = Probe(model, tokens, "cross-entropy", None, None)
    name = next(name for name, p in model.named_parameters() if "qkv" in name or "query" in name)
    parts = {name: torch.randn_like(model.get_parameter(name)).detach()}
    h = 1e-3
    up, down = (probe.outputs_with({name: probe.parameters[name] + side * parts[name]}) for side in (h, -h))
    first, second = (up - down) / (2 * h), (up + down - 2 * probe.before) / (2 * h * h)
    sizes = [float(probe._centred(c).square().sum()) for c in (first, second)]
    jet = probe.jet(parts)
    assert jet.order == 1
    assert jet.crossover == pytest.approx(math.sqrt(sizes[0] / sizes[1]), rel=1e-3)


def test_maps_that_do_not_move_give_the_same_derivatives_without_tangents_of_zeros() -> None:
    torch.manual_seed(0)
    maps = [nn.Linear(4, 4, bias=bias).double() for bias in (True, False, True)]
    x, turn = torch.randn(5, 4).double(), torch.randn(4, 4).double()
    moves = nn.Parameter(torch.randn(4, 4).double())

    def along(t: Tensor) -> Tensor:
        h = F.linear(x, moves + t * turn)
        for one in [*maps, *maps]:
            h = torch.tanh(one(h))
        return F.linear(h, maps[1].weight)

    def several(count: int, fixed: Sequence[Tensor]) -> list[Tensor]:
        def derivative(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda t: jvp(f, (t,), (torch.ones_like(t),))[1]

        found: list[Tensor] = []
        below: Callable[[Tensor], Tensor] = along
        zero = torch.zeros((), dtype=torch.float64)
        with FixedMaps(fixed):
            for _ in range(count):
                below = derivative(below)
                found.append(below(zero))
        return found

    fixed = [parameter for one in maps for parameter in one.parameters()]
    for plain, spared in zip(several(3, []), several(3, fixed), strict=True):
        assert torch.equal(plain, spared)
        assert plain.abs().min() > 0
    with profile(activities=[ProfilerActivity.CPU]) as plain_run:
        several(2, [])
    with profile(activities=[ProfilerActivity.CPU]) as spared_run:
        several(2, fixed)
    products = [
        sum(one.count for one in run.key_averages() if one.key in ("aten::mm", "aten::addmm"))
        for run in (plain_run, spared_run)
    ]
    assert products[1] <= 0.7 * products[0], "torch alone takes 3 and 9 instead of 2 and 4 of each fixed map"
