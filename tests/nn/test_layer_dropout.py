"""Layers are left out as often as they should be, for each row by itself, and only inside the block."""

import pytest
import torch

from raising import refused
from topograd.errors import StackError
from topograd.nn.layer_dropout import dropout_rates, dropped_layers


def test_rates_rise_with_depth() -> None:
    rates = dropout_rates(30, 0.2)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    assert rates == sorted(rates)
    assert dropout_rates(1, 0.5) == [0.0]


def test_rows_keep_their_state_where_a_layer_is_left_out() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(4000, 1, 3)
    whole = layer(x)
    with dropped_layers([layer], [0.3]):
        y = layer(x)
    same, done = (y == x).all(-1).squeeze(), (y == whole).all(-1).squeeze()
    assert (same ^ done).all()
    assert same.float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(layer(x), whole)
    with dropped_layers([layer], []):
        assert torch.equal(layer(x), whole)


def test_no_gradient_through_a_layer_that_was_left_out() -> None:
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(2, 1, 3, requires_grad=True)
    with dropped_layers([layer], [1 - 1e-9]):
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().max() == 0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_layer_that_changes_the_shape_is_refused() -> None:
    with (
        dropped_layers([layer := torch.nn.Linear(3, 2)], [0.5]),
        refused(StackError, setting="layer_dropout", given=0.5),
    ):
        layer(torch.randn(2, 1, 3))
