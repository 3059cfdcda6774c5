"""The kernel of LayerNorm from its gain, on data; and RMSNorm, which must fail."""

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.layernorm import (
    KernelMonitor,
    find_norms,
    inverse_gain,
    kernel_cosine,
    layernorm_kernel,
    other_norms,
)


def sample(width: int, rows: int = 4000, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, width, dtype=torch.float64) * torch.rand(width, dtype=torch.float64) + 0.3


def gained(kind: type[nn.LayerNorm] | type[nn.RMSNorm], width: int) -> nn.LayerNorm | nn.RMSNorm:
    norm = kind(width).double()
    assert norm.weight is not None
    nn.init.uniform_(norm.weight, 0.5, 2)
    return norm


@pytest.mark.parametrize("width", [8, 32])
def test_a_layernorm_passes_and_an_rmsnorm_fails(width: int) -> None:
    x = sample(width)
    layer, rms = gained(nn.LayerNorm, width), gained(nn.RMSNorm, width)
    found = kernel_cosine(layer, layer(x))
    assert found.found
    assert found.exact
    assert found.cosine > 1 - 1e-12
    assert found.share < 1e-28
    compared = kernel_cosine(rms, rms(x))
    assert not compared.found
    assert not compared.exact
    assert compared.cosine < 0.9
    assert compared.share > 1e-3


def test_the_kernel_kills_the_covariance_whatever_the_bias() -> None:
    norm = gained(nn.LayerNorm, 6)
    nn.init.normal_(norm.bias)  # type: ignore[arg-type]
    v = layernorm_kernel(norm)
    y = norm(sample(6)).detach()
    assert v.shape == (6,)
    assert v.norm().item() == pytest.approx(1)
    assert (torch.cov(y.T) @ v).abs().max() < 1e-14


def test_without_a_gain_it_is_uniform() -> None:
    v = layernorm_kernel(nn.LayerNorm(5, elementwise_affine=False))
    assert v.tolist() == pytest.approx([5**-0.5] * 5)


def test_in_float32_the_share_ends_at_rounding() -> None:
    norm = gained(nn.LayerNorm, 32).float()
    found = kernel_cosine(norm, norm(sample(32).float()))
    assert found.cosine > 1 - 1e-9
    assert 1e-20 < found.share < 1e-13


@pytest.mark.parametrize("zeros", [1, 3])
def test_gains_of_zero_are_the_kernel(zeros: int) -> None:
    norm = gained(nn.LayerNorm, 6)
    with torch.no_grad():
        norm.weight[:zeros] = 0
    kernel = layernorm_kernel(norm)
    expected = torch.eye(6, dtype=torch.float64)[:, :zeros]
    assert torch.equal(kernel, expected.squeeze(1) if zeros == 1 else expected)
    found = kernel_cosine(norm, norm(sample(6)))
    assert (found.dimensions, found.cosine, found.share) == (zeros, pytest.approx(1), 0)


def test_gains_that_decayed_to_almost_zero_are_dead_too() -> None:
    """As in the last LayerNorm of MiniLM: three of them are three flat directions."""
    norm = gained(nn.LayerNorm, 8)
    with torch.no_grad():
        norm.weight[:3] = torch.tensor([5e-33, -6e-33, 1.5e-9])
    found = kernel_cosine(norm, norm(sample(8)))
    assert (found.dimensions, found.found) == (3, True)
    assert 0 < found.share < 1e-17


def test_gains_of_any_scale_do_not_overflow() -> None:
    v = inverse_gain(torch.tensor([2e-310, -1e-310], dtype=torch.float64))
    assert v.tolist() == pytest.approx([0.2**0.5, -(0.8**0.5)])
    assert inverse_gain(torch.tensor([1e-310, 1.0], dtype=torch.float64)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("module", "setting"),
    [
        (nn.RMSNorm(4), "module"),
        (nn.Linear(4, 4), "module"),
        (nn.LayerNorm((2, 4)), "normalized_shape"),
    ],
)
def test_only_a_layernorm_over_one_dimension_has_one(module: nn.Module, setting: str) -> None:
    with refused(GeometryError, setting=setting):
        layernorm_kernel(module)


def test_damaged_gains_and_foreign_outputs_are_named() -> None:
    norm = nn.LayerNorm(4)
    with refused(GeometryError, setting="outputs", given=5):
        kernel_cosine(norm, torch.randn(3, 5))
    with refused(GeometryError, setting="outputs"):
        kernel_cosine(norm, torch.ones(3, 4))
    with torch.no_grad():
        norm.weight[2] = float("nan")
    with refused(GeometryError, setting="gain"):
        layernorm_kernel(norm)
    with refused(GeometryError, setting="gain"):
        KernelMonitor(nn.Sequential(norm))


class TinyRMSNorm(nn.Module):
    """As a foreign library has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_a_model_is_watched_norm_by_norm() -> None:
    parts = [nn.LayerNorm(8), nn.Linear(8, 8), TinyRMSNorm(8), nn.RMSNorm(8, elementwise_affine=False)]
    model = nn.Sequential(*parts, nn.BatchNorm1d(8), nn.LayerNorm(8)).double()
    unused = nn.LayerNorm(3)
    model[1].register_module("spare", unused)
    assert list(find_norms(model)) == ["0", "1.spare", "2", "3", "5"]
    with KernelMonitor(model) as monitor, torch.no_grad():
        for piece in sample(8).split(1000):
            model(piece)
    readings = monitor.readings()
    assert {name: (r.exact, r.found) for name, r in readings.items()} == {
        "0": (True, True),
        "2": (False, False),
        "3": (False, False),
        "5": (True, True),
    }
    assert readings["0"].samples == 4000
    assert monitor.unused() == ("1.spare",)
    assert not any(module._forward_hooks for module in model.modules())


def test_other_normalisations_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.LayerNorm((2, 4)), nn.GroupNorm(2, 4))
    assert list(find_norms(model)) == ["1"]
    assert other_norms(model) == {"0": "BatchNorm1d", "2": "LayerNorm", "3": "GroupNorm"}
