"""Units against the slow, obvious: one sample and one unit at a time; and models without some of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.beyond.units import SCORES, HiddenLayer, hidden_layers, read_units, without_units
from raising import refused
from topograd.errors import GeometryError


class Gated(nn.Module):
    """A gated MLP with the names of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), Gated(), nn.Linear(4, 6)).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(6, (40,), generator=generator)


LAYER = HiddenLayer("1.down", ("1.gate", "1.up"))


def test_the_readings_are_means_over_samples(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    assert hidden_layers(model) == [LAYER]
    found = read_units(model, [LAYER], batch, "empirical")["1.down"]
    inner, W = model.get_submodule("1"), model.get_parameter("1.down.weight").detach()
    A, G = torch.zeros(5, 5).double(), torch.zeros(4, 4).double()
    fisher, mean = torch.zeros(5).double(), torch.zeros(5).double()
    for x, label in zip(*batch, strict=True):
        h = model.get_submodule("0")(x)
        assert isinstance(inner, Gated)
        a = (F.silu(inner.gate(h)) * inner.up(h)).detach()
        z = inner.down(a).detach().requires_grad_()
        (delta,) = torch.autograd.grad(F.cross_entropy(model.get_submodule("2")(z), label), z)
        A, G, mean = A + torch.outer(a, a) / 40, G + torch.outer(delta, delta) / 40, mean + a / 40
        for j in range(5):
            fisher[j] += (a[j] * (W[:, j] @ delta)) ** 2 / 40
    for ours, slow in ((found.A, A), (found.G, G), (found.mean, mean), (found.fisher, fisher)):
        torch.testing.assert_close(ours, slow, rtol=1e-10, atol=1e-14)


def test_scores_are_what_they_say(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    found = read_units(model, [LAYER], batch, "empirical")["1.down"]
    W = model.get_parameter("1.down.weight").detach()
    scores = {name: score(model, LAYER, found) for name, score in SCORES.items()}
    others = [0, 1, 3, 4]
    A = found.A + 1e-3 * found.A.diagonal().mean() * torch.eye(5).double()
    explained = A[2, others] @ torch.linalg.solve(A[others][:, others], A[others, 2])
    apart = (A[2, 2] - explained) * (W[:, 2] @ found.G @ W[:, 2])
    assert scores["unexplained"][2].item() == pytest.approx(apart.item())
    assert scores["kfac"][2].item() == pytest.approx((found.A[2, 2] * (W[:, 2] @ found.G @ W[:, 2])).item())
    assert (scores["unexplained"] <= scores["kfac"] * 1.01).all(), "what is explained does not count"
    with torch.no_grad():
        model.get_parameter("1.up.weight").mul_(4)
        model.get_parameter("1.up.bias").mul_(4)
        model.get_parameter("1.down.weight").div_(4)
    again = read_units(model, [LAYER], batch, "empirical")["1.down"]
    same = {name: torch.allclose(score(model, LAYER, again), scores[name]) for name, score in SCORES.items()}
    assert [name for name in same if not same[name]] == ["magnitude", "variance"], "what a rescaling changes"


def test_a_model_without_units_is_the_model_with_their_columns_zero(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    whole = model(batch[0])
    with without_units(model, {LAYER: torch.tensor([1, 3])}):
        less = model(batch[0])
        assert model.get_parameter("1.up.weight").shape == (3, 3)
        assert model.get_submodule("1.down").in_features == 3
    assert torch.equal(model(batch[0]), whole), "it is as before"
    with torch.no_grad():
        model.get_parameter("1.down.weight")[:, [1, 3]] = 0
    torch.testing.assert_close(less, model(batch[0]))


def test_a_repair_puts_back_what_other_units_know(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Unit 4 is made twice unit 0: without it and repaired the model is the same."""
    with torch.no_grad():
        for name in ("gate", "up"):
            linear = model.get_submodule(f"1.{name}")
            assert isinstance(linear, nn.Linear)
            linear.weight[4], linear.bias[4] = linear.weight[0], linear.bias[0]
        model.get_parameter("1.up.weight")[4] *= 2
        model.get_parameter("1.up.bias")[4] *= 2
    read = read_units(model, [LAYER], batch)
    whole, errors = model(batch[0]), []
    for repair in (None, read):
        with without_units(model, {LAYER: torch.tensor([4])}, repair):
            errors.append((model(batch[0]) - whole).abs().max().item())
    assert errors[1] < 0.02 * errors[0], "the ridge leaves a little"
    scores = SCORES["unexplained"](model, LAYER, read["1.down"]), SCORES["kfac"](model, LAYER, read["1.down"])
    assert (scores[0] / scores[1]).argmin().item() in (0, 4), "one of the two is known from the other"


def test_bad_input_is_one_line(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with refused(GeometryError, setting="model"):
        hidden_layers(nn.Linear(2, 2))
    with refused(GeometryError, setting="fisher", given="expected"):
        read_units(model, [LAYER], batch, "expected")
    with (
        refused(GeometryError, setting="mask", given="1.down"),
        without_units(model, {LAYER: torch.arange(5)}),
    ):
        pass
    assert model(batch[0]).shape == (40, 6), "nothing was left half done"
