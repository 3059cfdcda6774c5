"""What all lifted optimizers share: batches, missing gradients, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import OptimError
from topograd.optim import lifted
from topograd.optim.conditioner import DDCMomentum, DDCMuon
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import HeadShift, ReLURescale
from topograd.optim.lifted import batches


def named(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", [DDCAdam, DDCMomentum, DDCMuon])
def test_what_is_refused(kind: Any) -> None:
    parameters = named(a=(3, 2), b=(2, 3))
    optimizer = kind(parameters.items(), [ReLURescale("a", "b")])
    with refused(OptimError, setting="closure"):
        optimizer.step(lambda: 0.0)
    parameters["a"].grad = torch.zeros(3, 2, dtype=torch.float64).to_sparse()
    with refused(OptimError, setting="params"):
        optimizer.step()
    for settings, setting in (
        ({"vertical": "up"}, "vertical"),
        ({"lr": -1.0}, "lr"),
        ({"lr": torch.tensor(0.1)}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ):
        with refused(OptimError, setting=setting):
            kind(parameters.items(), **settings)
    with refused(OptimError, setting="params"):
        kind(parameters["a"])
    with refused(OptimError, setting="gauges", given="a"):
        kind(parameters.items(), ["a"])


def test_only_adam_offers_a_vertical_of_its_own() -> None:
    parameters = named(a=(3, 2))
    DDCAdam(parameters.items(), vertical="adam")
    for vertical in ("adam", ""):
        with refused(OptimError, setting="vertical"):
            DDCMomentum(parameters.items(), vertical=vertical)  # type: ignore[arg-type]
    for beta, eps, setting in ((1.0, 1e-8, "betas"), (0.9, -1.0, "eps")):
        with refused(OptimError, setting=setting):
            DDCAdam(parameters.items(), betas=(beta, 0.9), eps=eps)
    with refused(OptimError, setting="momentum", given=1):
        DDCMuon(parameters.items(), momentum=1)


def test_a_gauge_without_gradients_rests() -> None:
    parameters = named(a=(3, 2), b=(2, 3), c=(3, 2), d=(2, 3))
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    optimizer = DDCAdam(parameters.items(), [ReLURescale("a", "b"), ReLURescale("c", "d")])
    optimizer.step()
    for name in "ab":
        parameters[name].grad = torch.ones_like(parameters[name])
    optimizer.step()
    assert [name for name in before if not torch.equal(parameters[name], before[name])] == ["a", "b"]
    assert set(optimizer.state) == {parameters["a"], parameters["b"]}


def test_a_missing_gradient_of_a_moving_gauge_is_zero() -> None:
    """Stage 2 was not run: W and W_1 have gradients g, and W_2 moves only to stay on the slice."""
    ends = []
    for missing in (None, torch.zeros(3, 2, dtype=torch.float64)):
        parameters = named(w=(3, 2), one=(3, 2), two=(3, 2))
        optimizer = DDCAdam(parameters.items(), [HeadShift("w", ["one", "two"])], 0.1)
        for name in ("w", "one"):
            parameters[name].grad = torch.ones(3, 2, dtype=torch.float64)
        parameters["two"].grad = missing
        optimizer.step()
        ends.append(parameters)
    for name in ends[0]:
        assert torch.equal(ends[0][name], ends[1][name])


def test_batches_are_bounded_and_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = named(a=(3, 2), b=(2, 3), c=(3, 2), d=(2, 3), e=(9, 9), f=(9, 9), g=(3, 2), h=(2, 3))
    pairs = [ReLURescale("a", "b"), ReLURescale("c", "d"), ReLURescale("e", "f")]
    squared = ReLURescale("g", "h", degree=2)
    gauges = [pairs[0], squared, *pairs[1:]]
    monkeypatch.setitem(lifted.BATCH_ELEMENTS, "cpu", 24)
    assert list(batches(gauges, parameters)) == [(pairs[0], pairs[1]), (pairs[2],), (squared,)]
    monkeypatch.setitem(lifted.BATCH_ELEMENTS, "cpu", 1000)
    assert list(batches(gauges, parameters)) == [tuple(pairs), (squared,)]
    assert list(batches([], parameters)) == []
