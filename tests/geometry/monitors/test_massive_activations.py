"""Massive rows: found, named, set apart in the stream and behind norms; and streams outside the theory."""

import pytest
import torch
from torch import Tensor, nn

from topograd.geometry.monitors.layernorm import KernelMonitor
from topograd.geometry.monitors.massive_activations import MassiveLayer, massive_layer, massive_rows, together
from topograd.geometry.monitors.stream import StreamMonitor


class Block(nn.Module):
    """x + W norm(x), or with a norm behind the map: of the sum (post) or of the branch (peri)."""

    def __init__(self, behind: str | None = None, shout: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.behind, self.shout = nn.RMSNorm(6), nn.Linear(6, 6), behind, shout
        if behind:
            self.last = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        branch = 0.1 * self.linear(self.norm(x))
        if self.behind == "post":
            return self.last(x + branch)
        if self.behind == "peri":
            branch = self.last(branch)
        if self.shout:  # the first position says one large number in one channel
            branch = branch + 0
            branch[:, 0, 3] = 5000.0
        return x + branch


class Stack(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def watched(model: nn.Module) -> tuple[StreamMonitor, KernelMonitor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(20, 5, 6, dtype=torch.float64)
    with StreamMonitor(model) as stream, KernelMonitor(model) as kernels, torch.no_grad():
        model(x)
    return stream, kernels, x


def test_rows_and_layers_are_named() -> None:
    hidden = torch.ones(4, 3, 2)
    hidden[1, 2, 1] = -700.0
    mask = massive_rows(hidden)
    assert mask.tolist() == [i == 5 for i in range(12)]
    assert massive_layer("a", hidden, mask) == MassiveLayer("a", 1, 700.0, 1)
    assert massive_layer("a", hidden, torch.zeros(12, dtype=torch.bool)) is None
    larger = MassiveLayer("a", 2, 900.0, 0)
    assert together(MassiveLayer("a", 1, 700.0, 1), larger) == MassiveLayer("a", 3, 900.0, 0)
    assert together(None, larger) == larger


def test_a_stream_is_read_with_them_and_without() -> None:
    torch.manual_seed(0)
    model = Stack(Block(), Block(shout=True), Block()).double()
    stream, kernels, x = watched(model)
    all_rows, kept = stream.profile(), stream.profile(massive=False)
    assert [one.layer for one in all_rows.massive] == ["layers.1", "layers.2"]
    assert all_rows.massive[0].rows == 20
    assert all_rows.massive[0].channel == 3
    assert all_rows.massive[0].largest == pytest.approx(5000, rel=0.01)
    assert (all_rows.samples, kept.samples) == (100, 80)
    assert all_rows.effective_ranks[-1] < 2 < 5 < kept.effective_ranks[-1]
    hidden = model.layers[0](x)[:, 1:].reshape(-1, 6)
    sigma = torch.linalg.svdvals(hidden)[-1].item() / 80**0.5
    assert kept.sigma[1] == pytest.approx(sigma), "the same rows at every layer, also before they are massive"
    norm = kernels.readings()["layers.2.norm"]
    assert norm.without_massive is not None
    assert (norm.samples, norm.without_massive.samples) == (100, 80)
    assert kernels.readings()["layers.0.norm"].without_massive is None


def test_a_calm_stream_has_none() -> None:
    torch.manual_seed(0)
    stream, _, _ = watched(Stack(Block(), Block()).double())
    assert stream.profile().massive == ()
    assert stream.profile() == stream.profile(massive=False)


@pytest.mark.parametrize(
    ("behind", "words"), [("post", "post-norm layers"), ("peri", "norm after their last map")]
)
def test_a_norm_behind_the_last_map_is_outside_the_theory(behind: str, words: str) -> None:
    stream, _, _ = watched(Stack(Block(behind), Block(behind)).double())
    found = stream.profile()
    assert found.outside is not None
    assert words in found.outside
    assert "described, not tested" in found.verdict
    plain, _, _ = watched(Stack(Block()).double())
    assert plain.profile().outside is None
