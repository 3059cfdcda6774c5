"""Moments against what numpy says of all rows at once."""

import numpy as np
import pytest
import torch

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.moments import Moments, hidden_of


def test_pieces_give_what_all_rows_give() -> None:
    torch.manual_seed(0)
    rows = torch.randn(60, 5, dtype=torch.float64) + 1e3
    moments = Moments()
    for piece in rows.view(4, 3, 5, 5).unbind():
        moments.add(piece)
    assert moments.count == 60
    assert np.allclose(moments.covariance, np.cov(rows.numpy().T, bias=True), rtol=1e-10)
    assert np.allclose(moments.second_moment, rows.T @ rows / 60, rtol=1e-12)
    singular = np.linalg.svd(rows.numpy(), compute_uv=False)
    assert np.allclose(moments.singular_values(), singular / 60**0.5, rtol=1e-6)


def test_a_large_mean_does_not_drown_a_small_variance() -> None:
    """E[x²] - E[x]² would lose all of it: 1e-8 beside 1e12."""
    rows = torch.tensor([[1e6], [1e6 + 1e-4]], dtype=torch.float64)
    moments = Moments()
    moments.add(rows[:1])
    moments.add(rows[1:])
    assert moments.covariance.item() == pytest.approx(2.5e-9, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_type_cannot_tell_from_zero_is_zero(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plane = torch.randn(500, 2, dtype=torch.float64) @ torch.randn(2, 6, dtype=torch.float64)
    moments = Moments()
    moments.add(plane.to(dtype))
    assert int((moments.singular_values() > 0).sum()) == 2


def test_what_cannot_be_added_is_named() -> None:
    moments = Moments("block 3")
    with refused(GeometryError, setting="count", given=0):
        _ = moments.covariance
    moments.add(torch.zeros(0, 4))
    assert moments.count == 0
    moments.add(torch.zeros(2, 4))
    with refused(GeometryError, setting="values", given=5):
        moments.add(torch.zeros(2, 5))
    with refused(GeometryError, setting="values", given="block 3"):
        moments.add(torch.full((2, 4), float("nan")))


def test_the_tensor_among_an_output() -> None:
    rows = torch.ones(2, 3)
    for output in (rows, (rows, None), [rows], {"logits": None, "last_hidden_state": rows}):
        assert hidden_of(output, "x") is rows
    for bad in (None, (), torch.ones(3), torch.ones(2, 3, dtype=torch.long)):
        with refused(GeometryError, setting="layers"):
            hidden_of(bad, "x")
