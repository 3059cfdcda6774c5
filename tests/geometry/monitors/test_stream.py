"""σ_r by depth: against whole matrices' singular values, on nets with and without skips, in training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile, find_layers
from topograd.nn.gpt import GPT


class Block(nn.Module):
    """x + scale tanh(Wx), or tanh(Wx) for a scale of None."""

    def __init__(self, width: int, scale: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / width**0.5)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight.T)
        return y if self.scale is None else x + self.scale * y


class Net(nn.Module):
    def __init__(self, depth: int, width: int, scale: float | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, scale) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def profile(seed: int, scale: float | None) -> StreamProfile:
    torch.manual_seed(seed)
    net = Net(12, 16, scale)
    with StreamMonitor(net) as monitor, torch.no_grad():
        net(torch.randn(2000, 16, dtype=torch.float64))
    return monitor.profile()


def test_the_ratios_are_those_of_singular_values() -> None:
    torch.manual_seed(0)
    net = Net(3, 6, 0.4)
    x = torch.randn(50, 6, dtype=torch.float64)
    with StreamMonitor(net, "blocks") as monitor, torch.no_grad():
        for piece in x.split(20):
            net(piece)
    found = monitor.profile()
    h, bottoms = x, [torch.linalg.svdvals(x)[-1].item()]
    for block in net.blocks:
        h = block(h)
        bottoms.append(torch.linalg.svdvals(h)[-1].item())
    assert (found.rank, found.width, found.samples) == (6, 6, 50)
    assert found.names == ("blocks.0", "blocks.1", "blocks.2")
    assert found.ratios == pytest.approx([b / bottoms[0] for b in bottoms[1:]], rel=1e-9)
    assert found.sigma[0] == pytest.approx(bottoms[0] / 50**0.5, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_skips_preserve_the_stream_and_chains_lose_it(seed: int) -> None:
    weak, strong, chain = (profile(seed, scale) for scale in (0.1, 0.3, None))
    assert 0.7 < weak.ratios[-1] < 1
    assert 0.25 < strong.ratios[-1] < weak.ratios[-1]
    assert chain.ratios[-1] < 5e-3
    assert [p.verdict for p in (weak, strong, chain)] == ["preserved", "preserved", "falling with depth"]
    assert chain.trend < -0.35 < strong.trend < weak.trend < 0


def test_a_branch_that_cancels_the_skip_is_a_dip() -> None:
    rho = (1.0, 0.9, 0.2, 0.8, 0.9)
    found = StreamProfile(("a", "b", "c", "d"), 4, 4, 9, rho, rho)
    assert found.dips == ("b",)
    assert found.verdict == "dips at b"
    steady = StreamProfile(("a", "b"), 4, 4, 9, (1.0, 0.9, 0.2), (1.0, 1.0, 1.0))
    assert steady.dips == ()


def test_the_rank_is_that_of_the_input() -> None:
    torch.manual_seed(0)
    net = Net(2, 6, 0.2)
    plane = torch.randn(80, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
    with StreamMonitor(net) as monitor, torch.no_grad():
        net(plane)
    assert monitor.profile().rank == 3
    with StreamMonitor(net, rank=4) as asked, torch.no_grad():
        net(plane)
    with refused(GeometryError, setting="rank", given=4):
        asked.profile()


def test_a_collapsed_layer_falls_without_bound() -> None:
    dead = nn.Linear(4, 4)
    nn.init.zeros_(dead.weight)
    net = nn.Sequential(nn.Linear(4, 4), dead).double()
    with StreamMonitor(net, list(net)) as monitor, torch.no_grad():
        net(torch.randn(20, 4, dtype=torch.float64))
    assert monitor.profile().ratios[-1] == 0
    assert monitor.profile().trend == float("-inf")
    assert monitor.profile().verdict == "below resolution after 1"


def test_hooks_are_gone_afterwards_whatever_happens() -> None:
    net = Net(2, 4, 0.1)

    def fail() -> None:
        with StreamMonitor(net):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_our_gpt_is_watched_and_not_changed() -> None:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=20, context=8)
    tokens = torch.randint(20, (4, 8))
    before = stack(tokens)
    with StreamMonitor(stack) as monitor:
        assert torch.equal(stack(tokens), before)
    found = monitor.profile()
    assert found.names == ("layers.0", "layers.1")
    assert found.samples == 32
    assert len(found.effective_ranks) == 3


@pytest.mark.parametrize(
    ("model", "settings", "setting"),
    [
        (nn.Linear(2, 2), {}, "layers"),
        (Net(2, 4, 0.1), {"layers": "h"}, "layers"),
        (Net(2, 4, 0.1), {"layers": []}, "layers"),
        (Net(2, 4, 0.1), {"rank": 0}, "rank"),
    ],
)
def test_what_cannot_be_watched_is_named(model: nn.Module, settings: dict[str, Any], setting: str) -> None:
    with refused(GeometryError, setting=setting):
        StreamMonitor(model, **settings)


def test_a_layer_given_twice_no_samples_and_other_widths() -> None:
    net = Net(1, 4, 0.1)
    with refused(GeometryError, setting="layers"):
        find_layers(net, [net.blocks[0], net.blocks[0]])
    with refused(GeometryError, setting="count", given=0):
        StreamMonitor(net).profile()
    narrowing = nn.Sequential(nn.Linear(4, 3))
    with StreamMonitor(narrowing, list(narrowing)) as monitor, torch.no_grad():
        narrowing(torch.randn(9, 4))
    with refused(GeometryError, setting="layers"):
        monitor.profile()


def test_layers_that_do_not_run_are_left_out() -> None:
    """As private decoders of exits that are not read."""
    net = Net(3, 4, 0.1)
    with StreamMonitor(net) as monitor, torch.no_grad():
        hidden = net.blocks[1](net.blocks[0](torch.randn(9, 4, dtype=torch.float64)))
    profile = monitor.profile()
    assert profile.names == ("blocks.0", "blocks.1")
    assert len(profile.ratios) == 2
    assert torch.allclose(monitor.second_moment(), hidden.T @ hidden / 9)
