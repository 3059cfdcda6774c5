"""Powers of t through operators: against closed rules, and in place."""

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.paths import in_double
from topograd.geometry.powers import powered, powers_of


def some(*powers: float) -> Tensor:
    return powered(torch.full((len(powers),), 0.5, dtype=torch.float64), torch.tensor(powers))


def test_sums_take_the_least_and_products_add() -> None:
    x, y = some(0, 1, 3), some(2, 2, 2)
    assert powers_of(x + y).tolist() == [0, 1, 2]
    assert powers_of(x - 1.0).tolist() == [0, 0, 0]
    assert powers_of(x * y).tolist() == [2, 3, 5]
    assert powers_of(x / y).tolist() == [-2, -1, 1]
    assert powers_of(x**2).tolist() == [0, 2, 6]
    assert powers_of((y * y).sqrt()).tolist() == [2, 2, 2]
    assert powers_of(x.sum()).item() == 0
    assert powers_of(x[1:].sum()).item() == 1


def test_functions_that_vanish_at_zero_keep_the_power() -> None:
    x = some(0, 1, 3)
    for function in (torch.tanh, torch.nn.functional.gelu, torch.nn.functional.silu, torch.relu):
        assert powers_of(function(x)).tolist() == [0, 1, 3]
    for function in (torch.exp, torch.sigmoid, torch.cos):
        assert powers_of(function(x)).tolist() == [0, 0, 0]


def test_what_is_zero_is_exactly_so() -> None:
    x = powered(torch.tensor([-1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert powers_of(torch.relu(x)).tolist() == [float("inf"), 1, float("inf")]
    assert powers_of(x @ torch.tensor([0.0, 0.0, 5.0])).item() == float("inf")


def test_writing_into_a_view_is_seen() -> None:
    x = some(0, 1, 3)
    x[1:] += some(2, 2)
    x[:1].copy_(some(4))
    x[2:].mul_(2.0)
    assert powers_of(x).tolist() == [4, 1, 2]


def test_norms_have_the_known_rules_forward_and_backward() -> None:
    """LayerNorm lifts a dead unit to 0, RMSNorm leaves it; backward 0, and the power of the unit."""
    powers = torch.zeros(3, 4)
    powers[:, 3] = 2
    numbers = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    cotangent = torch.where(powers > 0, 1e-4, 1.0) * numbers.flip(0)
    for norm, forward in ((nn.LayerNorm(4), 0), (nn.RMSNorm(4), 2)):
        x = powered(numbers * 1e-2**powers, powers).requires_grad_()
        y = norm.double()(x)
        (gradient,) = torch.autograd.grad(y, x, powered(cotangent, 2 * powers))
        assert powers_of(y)[:, 3].tolist() == [forward] * 3
        assert powers_of(gradient)[:, 3].tolist() == [forward] * 3
        assert powers_of(gradient)[:, 0].tolist() == [0] * 3


def test_attention_is_made_of_in_double() -> None:
    x = powered(torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(1, 2, 4, 6))
    with in_double():
        made = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert powers_of(made).eq(1).all()


def test_an_operator_without_a_rule_is_named() -> None:
    with refused(GeometryError, setting="model", given="aten.linalg_inv_ex"):
        torch.linalg.inv(powered(torch.eye(2)))


@pytest.mark.parametrize("shape", [(5, 3), (64, 2048)])
def test_long_sums_stay_whole_powers(shape: tuple[int, int]) -> None:
    x = powered(torch.ones(shape), torch.full(shape, 2.0))
    assert powers_of(x @ x.mT).eq(4).all()
