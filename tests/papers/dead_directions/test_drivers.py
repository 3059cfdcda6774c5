"""The three drivers against steps by hand, against one another, and against torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from papers.dead_directions.drivers import HomogeneityDial, MomentumSign, ParametricEpsFloor
from raising import refused
from topograd.errors import OptimError

Make = Callable[[list[nn.Parameter]], Optimizer]
GRADIENTS = [[4.0, -0.25, 0.0], [-1.0, 0.5, 0.0], [2.0, -3.0, 1e-3]]


def walk(make: Make, gradients: list[list[float]] = GRADIENTS) -> Tensor:
    """Where the gradients take a parameter, which starts at 1."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make([weight])
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return weight.detach()


def test_eps_floor_by_hand() -> None:
    beta, eps, lr = 0.9, 0.01, 0.1
    wanted = []
    for gradients in zip(*GRADIENTS, strict=True):
        at, v = 1.0, 0.0
        for g in gradients:
            v = beta * v + (1 - beta) * g * g
            at -= lr * g / (v**0.5 + eps)
        wanted.append(at)
    found = walk(lambda p: ParametricEpsFloor(p, lr, eps, beta))
    assert found.tolist() == pytest.approx(wanted, rel=1e-14)


def test_the_first_step_of_the_floor_is_not_corrected() -> None:
    found = walk(lambda p: ParametricEpsFloor(p, 0.01, eps=1e-12), [[5.0, -1e-3, 0.0]])
    assert (1 - found).tolist() == pytest.approx([0.01 * 1000**0.5, -0.01 * 1000**0.5, 0.0], rel=1e-6)


def test_a_high_floor_is_sgd() -> None:
    floor = walk(lambda p: ParametricEpsFloor(p, 1e8 * 0.1, eps=1e8))
    assert torch.allclose(floor, walk(lambda p: torch.optim.SGD(p, 0.1)), rtol=0, atol=1e-6)
    assert not torch.allclose(
        walk(lambda p: ParametricEpsFloor(p, 0.1, eps=1.0)), floor, atol=1e-3
    )  # v counts


def test_no_floor_and_no_gradient_rest() -> None:
    found = walk(lambda p: ParametricEpsFloor(p, 0.1, eps=0.0), [[0.0, 0.0, 1.0]])
    assert found[:2].tolist() == [1.0, 1.0]
    assert found.isfinite().all()


def test_dial_by_hand() -> None:
    found = walk(lambda p: HomogeneityDial(p, 0.1, h=0.5), [[4.0, -0.25, 0.0]])
    assert found.tolist() == pytest.approx([0.8, 1.05, 1.0], rel=1e-14)


def test_the_dial_at_one_is_sgd() -> None:
    assert torch.equal(
        walk(lambda p: HomogeneityDial(p, 0.1, h=1.0)), walk(lambda p: torch.optim.SGD(p, 0.1))
    )


def test_the_dial_at_zero_is_sign_descent() -> None:
    signs = torch.tensor(GRADIENTS, dtype=torch.float64).sign().sum(0)
    assert torch.allclose(walk(lambda p: HomogeneityDial(p, 0.1, h=0.0)), 1 - 0.1 * signs, atol=1e-15)


def test_momentum_sign_without_momentum_is_the_dial_at_zero() -> None:
    ours = walk(lambda p: MomentumSign(p, 0.1, beta=0.0))
    assert torch.equal(ours, walk(lambda p: HomogeneityDial(p, 0.1, h=0.0)))
    assert not torch.equal(ours, walk(lambda p: MomentumSign(p, 0.1, beta=0.9)))


def test_momentum_sign_by_hand() -> None:
    """m of the first coordinate: 0.4, 0.26, 0.434: it never turns, although a gradient does."""
    found = walk(lambda p: MomentumSign(p, 0.1, beta=0.9))
    assert found.tolist() == pytest.approx([0.7, 1.1, 0.9], rel=1e-14)  # -0.025, +0.0275, -0.275; 0, 0, 1e-4


@pytest.mark.parametrize("make", [ParametricEpsFloor, HomogeneityDial, MomentumSign])
def test_all_tensors_at_once_as_each_alone(make: Any) -> None:
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 2), (4,), ())]
    alone = copy.deepcopy(together)
    skipped = nn.Parameter(torch.ones(2))
    joint, single = make([*together, skipped], lr=0.1), [make([p], lr=0.1) for p in alone]
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        joint.step()
        for optimizer in single:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    assert skipped.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [ParametricEpsFloor, MomentumSign])
def test_a_saved_state_goes_on(make: Any) -> None:
    def continued(restart: bool) -> Tensor:
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = make([weight], lr=0.1)
        for gradient in GRADIENTS:
            if restart:
                saved, optimizer = optimizer.state_dict(), make([weight], lr=0.1)
                optimizer.load_state_dict(saved)
            weight.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
        return weight.detach()

    assert torch.equal(continued(True), continued(False))


@pytest.mark.parametrize(
    ("make", "settings", "setting"),
    [
        (ParametricEpsFloor, {"lr": -1}, "lr"),
        (ParametricEpsFloor, {"lr": 0.1, "eps": -1}, "eps"),
        (ParametricEpsFloor, {"lr": 0.1, "beta": 1}, "beta"),
        (HomogeneityDial, {"lr": 0.1, "h": 1.5}, "h"),
        (HomogeneityDial, {"lr": float("nan")}, "lr"),
        (MomentumSign, {"lr": 0.1, "beta": -0.1}, "beta"),
    ],
)
def test_bad_knobs(make: Any, settings: dict[str, float], setting: str) -> None:
    with refused(OptimError, setting=setting):
        make([nn.Parameter(torch.ones(1))], **settings)


def test_closures_and_sparse_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = HomogeneityDial([weight], lr=0.1)
    with refused(OptimError, setting="closure"):
        optimizer.step(lambda: 0.0)
    weight.grad = torch.ones(3).to_sparse()
    with refused(OptimError, setting="params"):
        optimizer.step()
