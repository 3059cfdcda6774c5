"""The probe: its floor, its sketches, and which samples it takes."""

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.line_scan import BUCKETS, Probe, short_example
from topograd.geometry.paths import Path, directional_fisher, divergences
from topograd.geometry.rates import log_grid


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def test_a_scan_is_the_divergence_along_a_path_and_its_sketch_the_fisher() -> None:
    model, x, grid = net(), torch.randn(20, 3).double(), log_grid(1e-3, 1e-1, 4)
    part = torch.randn(5, 3).double()
    unit = {"0.weight": part / part.norm()}
    probe = Probe(model, x, "cross-entropy", None, None)
    values, sketch = probe.scan(unit, grid)
    path = Path.of(model, unit)
    assert values == pytest.approx(divergences(model, path, grid, x, "cross-entropy"), rel=1e-9)
    assert sketch.shape == (BUCKETS,)
    fisher = directional_fisher(model, path, 0.0, x, "cross-entropy")
    assert float(sketch.square().sum()) == pytest.approx(fisher, rel=0.15)
    held, _ = probe.scan(unit, grid, {"2.bias": torch.ones(4).double()})
    assert held == pytest.approx(values, rel=0.5)
    assert held != values


def test_the_floor_is_rounding_and_larger_where_a_model_rounds() -> None:
    class Coarse(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).round(decimals=7)

    x = torch.randn(20, 3).double()
    fine = Probe(net(), x, "squared-error", None, None).floor
    coarse = Probe(Coarse(*net()), x, "squared-error", None, None).floor
    assert fine < 1e-18
    assert 1e-16 < coarse < 1e-10


def test_what_a_model_casts_to_float32_stays_in_float64() -> None:
    """As norms, softmaxes and rotations of transformers do."""

    class Casts(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(4, dtype=torch.float32, device=x.device)
            y = super().forward(x).to(torch.float32) @ torch.diag(1 + places.float())
            return y.type(torch.float32).softmax(-1, dtype=torch.float32).to(x.dtype)

    x = torch.randn(20, 3).double()
    probe = Probe(Casts(*net()), x, "squared-error", None, None)
    assert probe.floor < 1e-18
    grid = torch.tensor([1e-6, 2e-6], dtype=torch.float64)
    small, large = probe.curve({"0.bias": torch.ones(5).double()}, grid).mean(1).tolist()
    assert large / small == pytest.approx(4, rel=1e-4), "K is a square far below the rounding of float32"


class Layered(nn.Module):
    """Two residual layers, called in the order that is given."""

    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(2))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = x + torch.tanh(self.layers[i](x))
        return x


def test_a_patched_forward_survives_a_scan() -> None:
    torch.manual_seed(0)
    model, x = Layered((0, 1)), torch.randn(4, 3).double()
    own = nn.Linear.forward.__get__(model.layers[0])
    model.layers[0].forward = own
    Probe(model, x, "squared-error", None, None).scan(
        {"layers.1.weight": torch.ones(3, 3)}, log_grid(1e-3, 1e-1, 2)
    )
    assert model.layers[0].forward is own
    assert "forward" not in vars(model.layers[1])


def test_layers_that_are_called_in_another_order_are_not_replayed() -> None:
    torch.manual_seed(0)
    model, x, grid = Layered((1, 0)), torch.randn(4, 3).double(), log_grid(1e-3, 1e-1, 2)
    part = {"layers.1.weight": torch.ones(3, 3).double() / 3}
    values, _ = Probe(model, x, "squared-error", None, None).scan(part, grid)
    assert values == pytest.approx(divergences(model, Path.of(model, part), grid, x), rel=1e-9)


def test_a_probe_is_short() -> None:
    tokens = torch.zeros(8, 100, dtype=torch.long)
    assert short_example(tokens, 10).shape == (2, 100)
    assert short_example(tokens, 10**9).shape == (1, 16)
    assert short_example({"x": torch.zeros(900, 3)}, 10)["x"].shape == (64, 3)
    assert short_example((torch.zeros(70, 3), 5), 10)[1] == 5
    with refused(GeometryError, setting="batches"):
        short_example(torch.zeros(0, 3), 10)


def test_weights_and_outputs_that_are_not_finite_are_named() -> None:
    model = net()
    grid = log_grid(1e-3, 1e-1, 2)
    probe = Probe(model, torch.ones(2, 3).double(), "squared-error", None, None)
    with refused(GeometryError, setting="model"):
        probe.scan({"2.bias": torch.full((4,), float("inf"), dtype=torch.float64)}, grid)
    nn.init.constant_(model[0].weight, float("nan"))  # type: ignore[arg-type]
    with refused(GeometryError, setting="model", given="0.weight"):
        Probe(model, torch.ones(2, 3).double(), "squared-error", None, None)
