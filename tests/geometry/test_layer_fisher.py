"""The Fisher from scores against forward mode and against a scan, and shares against quadrature."""

import math

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn
from torch.func import functional_call

from topograd.geometry.checkpoint import SEVERAL, read_checkpoint
from topograd.geometry.layer_fisher import parabola_share, read_layers
from topograd.geometry.losses import CrossEntropy


class Positions(nn.Module):
    """A map used twice, whose positions see each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        return self.head(h + h.mean(1, keepdim=True))


def exact(model: nn.Module, x: Tensor, name: str, direction: Tensor) -> float:
    """Mean over samples and positions of Σ_c p_c (d log p_c)² along a direction, by forward mode."""
    moved = {name: model.get_parameter(name).detach()}

    def logs(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(model, weights, (x,)).log_softmax(-1)

    values, change = torch.func.jvp(logs, (moved,), ({name: direction},))[:2]
    return float((values.exp() * change.square()).sum(-1).mean().detach())


@pytest.mark.parametrize("layer", ["shared", "head"])
def test_scores_have_the_fisher_of_positions_that_see_each_other(layer: str) -> None:
    model = Positions().double()
    torch.manual_seed(1)
    x = torch.randn(1500, 5, 4).double()
    weight = model.get_parameter(f"{layer}.weight")
    U = torch.linalg.qr(torch.randn(weight.shape[1], 2).double()).Q
    V = torch.linalg.qr(torch.randn(weight.shape[0], 2).double()).Q
    samples = [(one[None], None) for one in x]
    generator = torch.Generator().manual_seed(0)
    found = read_layers(model, samples, CrossEntropy(), {layer: (U, V, 0.7)}, 10.0, generator=generator)
    for i, reading in enumerate(found[layer]):
        direction = 0.7 * torch.outer(V[:, i], U[:, i])
        assert reading.fisher == pytest.approx(exact(model, x, f"{layer}.weight", direction), rel=0.15)
        assert reading.interval[0] < reading.fisher < reading.interval[1]


def test_a_layer_that_some_samples_do_not_reach_counts_as_zero_there() -> None:
    """As an expert that no token of a sample is sent to."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base, self.expert = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x)
            return y + self.expert(x) if x[0, 0] > 0 else y

    model = Routed().double()
    torch.manual_seed(1)
    x = torch.randn(800, 3).double()
    ends = torch.eye(3).double()[:, :1], torch.eye(2).double()[:, :1]
    samples = [(one[None], None) for one in x]
    generator = torch.Generator().manual_seed(0)
    directions = dict.fromkeys(("base", "expert"), (*ends, 1.0))
    found = read_layers(model, samples, CrossEntropy(), directions, 10.0, generator=generator)
    p = (model.base(x) + model.expert(x)).softmax(-1)[:, 0].detach()
    exactly = float((p * (1 - p) * x[:, 0].square() * (x[:, 0] > 0)).mean())
    assert found["expert"][0].fisher == pytest.approx(exactly, rel=0.15)


@pytest.mark.parametrize("fisher", [1e-6, 0.01, 0.3, 2.0, 50.0])
def test_the_share_of_a_parabola(fisher: float) -> None:
    a = 100 * fisher / 2
    top = quad(lambda t: a * t * t * math.exp(-a * t * t), -1, 1, limit=200)[0]
    bottom = quad(lambda t: math.exp(-a * t * t), -1, 1, limit=200)[0]
    assert parabola_share(fisher, 100.0) == pytest.approx(top / bottom, rel=1e-3)


def test_every_layer_has_several_and_they_are_those_of_the_scan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    batch = (torch.randn(400, 6).double(), torch.randint(5, (400,)))
    found = read_checkpoint(model, batch, generator=torch.Generator().manual_seed(0)).as_dict()
    assert {name: len(layer["flattest"]) for name, layer in found["layers"].items()} == {
        "0": SEVERAL,
        "2": SEVERAL,
    }
    scanned = {one["layer"]: one for one in found["directions"] if one["group"] is None}
    low, high = found["layers"]["0"]["flattest"][0]["interval"]
    assert low / 2 < scanned["0"]["fisher"] < 2 * high
