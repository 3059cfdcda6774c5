"""`residual` tells symmetries that hold from those that do not, and leaves the model alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.dead_directions.equivariance import Case, cases
from raising import refused
from topograd.errors import OptimError
from topograd.optim.gauges import (
    CEShiftBias,
    CEShiftRowShift,
    ChainedReLURescale,
    Gauge,
    HeadShift,
    LNScale,
    ReLURescale,
)


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 4))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_gauge_holds_on_its_network(case: Case) -> None:
    torch.manual_seed(1)
    model = case.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert case.gauge.residual(model) < 1e-14
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("gauge", "activation"),
    [
        (ReLURescale("0.weight", "2.weight"), nn.ReLU),  # the bias stays behind
        (ReLURescale("0.weight", "2.weight", bias="0.bias", degree=2), nn.ReLU),
        (ReLURescale("0.weight", "2.weight", bias="0.bias"), nn.GELU),
        (CEShiftBias("0.bias"), nn.ReLU),
        (CEShiftRowShift("0.weight"), nn.ReLU),
    ],
)
def test_a_symmetry_that_does_not_hold_shows(gauge: Gauge, activation: type[nn.Module]) -> None:
    assert gauge.residual(mlp(activation)) > 1e-3


def test_zeros_do_not_hide_a_broken_symmetry() -> None:
    model = mlp()
    nn.init.zeros_(model.get_parameter("0.bias"))
    assert ReLURescale("0.weight", "2.weight").residual(model) > 1e-3


@pytest.mark.parametrize(
    "example",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3),),
        {"input": torch.ones(2, 3)},
        lambda model: SimpleNamespace(logits=model(torch.ones(2, 3, dtype=torch.float64))),
        lambda model: {"a": [model(torch.ones(2, 3, dtype=torch.float64))], "b": torch.tensor(1)},
    ],
)
def test_examples_may_be_given_in_any_form(example: Any) -> None:
    model = mlp()
    assert CEShiftBias("2.bias").residual(model, example) < 1e-14
    assert CEShiftBias("0.bias").residual(model, example) > 1e-3


def test_tokens_are_the_default_of_a_language_model() -> None:
    class Model(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    torch.manual_seed(0)
    assert CEShiftRowShift("head.weight").residual(Model(tied=False)) < 1e-14
    assert CEShiftRowShift("head.weight").residual(Model(tied=True)) > 1e-3


def test_layer_norm_with_all_its_readers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one, self.two = nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return torch.tanh(self.one(y)) * F.relu(self.two(y))

    torch.manual_seed(0)
    model, example = Model(), torch.randn(5, 4)
    both = LNScale("norm.weight", ["one.weight", "two.weight"], bias="norm.bias")
    assert both.residual(model, example) < 1e-14
    assert LNScale("norm.weight", "one.weight", bias="norm.bias").residual(model, example) > 1e-3
    assert LNScale("norm.weight", ["one.weight", "two.weight"]).residual(model, example) > 1e-3


def test_a_model_that_says_nothing_is_refused() -> None:
    with refused(OptimError, setting="example"):
        CEShiftBias("2.bias").residual(mlp(), lambda model: torch.tensor([1]))
    with refused(OptimError, setting="example"):
        CEShiftBias("bias").residual(nn.LayerNorm(3))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: ReLURescale("a", "a"), "names"),
        (lambda: ReLURescale("a", "b", degree=0), "degree"),
        (lambda: HeadShift("a", []), "names"),
        (lambda: LNScale("a", "a"), "names"),
        (lambda: LNScale("a", "b", dim=2), "dim"),
        (lambda: ChainedReLURescale(["a"]), "weights"),
        (lambda: ChainedReLURescale(["a", "b"], biases=["c", "d"]), "weights"),
    ],
)
def test_gauges_that_cannot_be(make: Callable[[], Gauge], setting: str) -> None:
    with refused(OptimError, setting=setting):
        make()


@pytest.mark.parametrize(
    ("gauge", "setting"),
    [
        (ReLURescale("0.weight", "nowhere"), "gauges"),
        (ReLURescale("2.weight", "0.weight", bias="0.bias"), "gauges"),
        (ReLURescale("0.weight", "2.weight", bias="2.bias"), "gauges"),
        (CEShiftBias("2.weight"), "gauges"),
        (CEShiftRowShift("2.bias"), "gauges"),
        (HeadShift("0.weight", ["2.weight"]), "gauges"),
        (LNScale("0.bias", "0.weight"), "gauges"),
    ],
)
def test_shapes_that_do_not_pair(gauge: Gauge, setting: str) -> None:
    with refused(OptimError, setting=setting):
        gauge.check(dict(mlp().named_parameters()))
