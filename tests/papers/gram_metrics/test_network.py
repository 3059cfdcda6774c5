"""Which networks are read, and one clear line for each that is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.network import FieldError, weights_of
from raising import refused
from tests.oracles.ntk import output


def linear(n: int, m: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(n, m, bias=bias, dtype=torch.float64)


class Written(nn.Module):
    """A network with its ReLUs in the forward; `twist` makes it another function."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        self.first, self.second, self.twist = linear(4, 6), linear(6, 6), twist
        if twist == "scale":
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        u = F.relu(self.first(x))
        v = self.second(u)
        if self.twist == "twice":
            v = self.second(F.relu(v))
        u = F.tanh(v) if self.twist == "tanh" else u + F.relu(v) if self.twist == "skip" else F.relu(v)
        return u.mean(-1, keepdim=True) if self.twist == "mean" else u


def test_a_sequence_and_its_weights_are_one_network() -> None:
    network = nn.Sequential(linear(3, 5), nn.ReLU(), nn.Sequential(linear(5, 2), nn.ReLU()))
    x = torch.randn(4, 3, dtype=torch.float64)
    weights = weights_of(network)
    assert [tuple(W.shape) for W in weights] == [(5, 3), (2, 5)]
    assert not any(W.requires_grad for W in weights)
    assert torch.equal(kernel(network, x).total, kernel(weights, x).total)
    assert torch.allclose(network(x).mean(-1), output(weights, x))


@pytest.mark.parametrize("twist", ["", "mean"])
def test_a_module_that_is_such_a_chain(twist: str) -> None:
    module = Written(twist)
    assert [tuple(W.shape) for W in weights_of(module)] == [(6, 4), (6, 6)]


@pytest.mark.parametrize("twist", ["tanh", "skip", "twice"])
def test_a_module_that_is_another_function(twist: str) -> None:
    with refused(FieldError, setting="network", given="output"):
        weights_of(Written(twist))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_part_that_is_not_what_its_type_says() -> None:
    with refused(FieldError, setting="network", given="output"):
        weights_of(nn.Sequential(Doubled(3, 4, bias=False), nn.ReLU()))


def test_parameters_outside() -> None:
    with refused(FieldError, setting="network", given="parameters"):
        weights_of(Written("scale"))


SHARED = linear(3, 3)


@pytest.mark.parametrize(
    ("network", "setting", "given"),
    [
        (nn.Sequential(linear(3, 2, bias=True), nn.ReLU()), "network", "bias"),
        (nn.Sequential(linear(3, 2), nn.GELU()), "network", "GELU"),
        (nn.Sequential(linear(3, 2), nn.ReLU(), nn.Dropout()), "network", "Dropout"),
        (
            nn.Sequential(linear(3, 2), nn.ReLU(), linear(2, 1)),
            "network",
            "Linear",
        ),
        (nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.ReLU()), "network", None),
        (
            nn.Sequential(linear(3, 2), nn.ReLU(), linear(4, 2), nn.ReLU()),
            "W_2",
            4,
        ),
        (nn.LSTM(3, 2), "network", "LSTM"),
        (nn.Sequential(), "network", None),
        ([], "network", None),
        ([torch.zeros(3)], "W_1", (3,)),
        ([torch.zeros(0, 3)], "W_1", (0, 3)),
        ([torch.zeros(2, 3, dtype=torch.int64)], "W_1", torch.int64),
        ([torch.zeros(2, 3), torch.zeros(2, 3)], "W_2", 3),
        ([torch.zeros(2, 3), torch.zeros(2, 2).double()], "W_2", torch.float64),
    ],
)
def test_refusals(network: nn.Module | list[Tensor], setting: str, given: object) -> None:
    with refused(FieldError, setting=setting, given=given) as caught:
        weights_of(network)
    assert isinstance(caught.value, ValueError)
