"""Shares at a finite scale: closed forms, quadrature, and λ̂ of the same line by sampling."""

import math
from collections.abc import Callable

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry import learning_coefficient
from topograd.geometry.finite_share import read_share, share_along
from topograd.geometry.singular.langevin import Langevin


def curve(K: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda t: K(t)[:, None]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_a_power_has_its_limit_exactly(k: int, scale: float) -> None:
    n_beta = 1e3 * max(scale, 1 / scale)  # the line is long enough
    found = share_along(curve(lambda t: scale * t ** (2 * k)), n_beta)
    assert found.value == pytest.approx(1 / (2 * k), abs=1e-12)
    assert found.interval is None, "one sample says nothing of its spread"


@pytest.mark.parametrize("c", [1e-2, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("n_beta", [3.0, 500.0, 1e5])
@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_mixtures_against_quadrature(c: float, n_beta: float, skew: float) -> None:
    """Between one half and one quarter, also where the line ends before the data fix it."""

    def K(t: float) -> float:
        return t * t * (1 + skew * math.tanh(t)) + c * t**4

    found = share_along(curve(lambda t: torch.tensor([K(x) for x in t.tolist()]).double()), n_beta)
    bends = [0.0, *(sign * x for sign in (1, -1) for x in (1e-3, 1e-2, 0.1))]
    top = quad(lambda t: n_beta * K(t) * math.exp(-n_beta * K(t)), -1, 1, points=bends, limit=400)[0]
    bottom = quad(lambda t: math.exp(-n_beta * K(t)), -1, 1, points=bends, limit=400)[0]
    assert found.value == pytest.approx(top / bottom, abs=2e-3)


def test_a_flat_line_counts_nothing_and_a_cliff_is_found() -> None:
    assert share_along(curve(torch.zeros_like), 100.0).value == 0.0
    flat_then_steep = share_along(curve(lambda t: 1e-30 * t**2), 100.0, floor=1e-28)
    assert flat_then_steep.value == 0.0, "what is below the rounding is none"
    sharp = share_along(curve(lambda t: 1e12 * t**2), 1e6)
    assert sharp.value == pytest.approx(0.5, abs=1e-9)


def test_the_interval_is_over_samples_and_narrows_with_them() -> None:
    def read(samples: int) -> float:
        sizes = torch.rand(samples, generator=torch.Generator().manual_seed(0)).double() + 0.05
        found = share_along(lambda t: sizes * (t[:, None] ** 2 + 3 * t[:, None] ** 4), 20.0)
        assert found.interval is not None
        assert found.interval[0] <= found.value <= found.interval[1]
        return found.interval[1] - found.interval[0]

    assert read(400) < read(16) / 2
    assert read(400) > 0


class Line(nn.Module):
    """A network along one direction: its only weight is t."""

    def __init__(self, model: nn.Module, direction: dict[str, Tensor]) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self._call = lambda x, moved: torch.func.functional_call(model, moved, (x,))
        self._start = {name: value.detach() for name, value in model.named_parameters()}
        self._direction = direction

    def forward(self, x: Tensor) -> Tensor:
        moved = {name: self._start[name] + self.t * part for name, part in self._direction.items()}
        return self._call(x, moved)


@pytest.mark.parametrize(("size", "expected"), [(1.0, 0.5), (0.0, 0.25)])
def test_it_is_the_sampled_coefficient_of_the_same_line(size: float, expected: float) -> None:
    """A unit that is alive, and one whose input and output weights are both zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model.get_parameter("0.weight")[0] *= size
        model.get_parameter("0.bias")[0] *= size
        model.get_parameter("2.weight")[:, 0] *= size
    direction = {name: torch.zeros_like(p.detach()) for name, p in model.named_parameters()}
    direction["0.weight"][0], direction["2.weight"][:, 0] = 1.0, 1.0
    direction = {name: direction[name] for name in ("0.weight", "2.weight")}
    x = torch.randn(500, 3).double()
    n_beta = 500 / math.log(500)
    found = read_share(model, direction, x, n_beta)
    settings = Langevin(step=2e-3, chains=4, burn_in=100, draws=150, thin=10, localization=0.0)
    with torch.no_grad():
        y = model(x)
    sampled = learning_coefficient(Line(model, direction), "squared-error", (x, y), settings)
    assert sampled.weights == 1
    assert found.value == pytest.approx(expected, abs=0.05)
    assert found.value == pytest.approx(sampled.value, abs=0.1)


def test_bad_requests() -> None:
    with refused(GeometryError, setting="n_beta"):
        share_along(curve(torch.square), 0.0)
    with refused(GeometryError, setting="direction"):
        read_share(nn.Linear(2, 1), {"wrong": torch.ones(1, 2)}, torch.ones(3, 2), 5.0)
