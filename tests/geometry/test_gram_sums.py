"""Sums by halves and by readers against the plain product."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from topograd.geometry.gram_sums import GramSums, HalfGram, Remembered, gram
from topograd.geometry.sketches import FactorSums


def same(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def call(source: Tensor, inputs: Callable[[Tensor], Tensor] = same) -> Any:
    return SimpleNamespace(source=source, inputs=inputs)


@pytest.mark.parametrize("size", [1, 5, 128, 129, 300])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_halves_are_the_whole(size: int, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, size, dtype=torch.float64).to(kind)
    wide = rows.double()
    rtol, atol = (1e-12, 1e-12) if kind == torch.float64 else (1e-6, 1e-5)
    torch.testing.assert_close(gram(rows), wide.T @ wide, rtol=rtol, atol=atol)
    total = HalfGram(size, rows.device, torch.float64)
    for part in rows.split(3):
        total.add(part)
    torch.testing.assert_close(total.mean(7), wide.T @ wide / 7, rtol=1e-12, atol=1e-12)


def test_a_half_takes_less_than_two_thirds() -> None:
    assert sum(panel.numel() for panel in HalfGram(576, torch.device("cpu"))._panels) <= 0.57 * 576**2


@pytest.mark.parametrize("make", [GramSums, FactorSums])
def test_readers_share_until_one_reads_alone(make: type[GramSums]) -> None:
    """Queries and keys read x and y, values x alone and then z twice; the projection overwrites x."""
    torch.manual_seed(0)
    x, y, z, other = (torch.randn(n, 3, dtype=torch.float64) for n in (4, 5, 6, 2))
    sums = make()
    first = x.clone()
    for name in ("q", "k", "v"):
        sums.see_inputs(name, call(first))
    first.mul_(10)  # behind the calls: the rows were those of before
    sums.see_inputs("o", call(first))
    for name in ("q", "k"):
        sums.see_inputs(name, call(y))
    sums.see_gradients("q", y)
    for _ in range(2):
        sums.see_inputs("v", call(z))
    sums.see_inputs("v", call(other, doubled))
    q = x.T @ x + y.T @ y
    torch.testing.assert_close(sums.mean("q", "A", 1), q / 9)
    assert sums.mean("q", "A", 1) is sums.mean("k", "A", 1), "they read the same"
    v = x.T @ x + 2 * z.T @ z + 4 * other.T @ other
    torch.testing.assert_close(sums.mean("v", "A", 1), v / 18)
    torch.testing.assert_close(sums.mean("q", "A", 1), q / 9)
    torch.testing.assert_close(sums.mean("o", "A", 1), 100 * x.T @ x / 4)
    torch.testing.assert_close(sums.mean("q", "G", 5), y.T @ y / 5)
    assert sums.mean("k", "G", 5) is None
    assert sums.rows == {"q": 9, "k": 9, "v": 18, "o": 4}


def test_a_mean_is_made_again_when_rows_come() -> None:
    sums, x = GramSums(), torch.eye(2)
    sums.see_inputs("a", call(x))
    assert sums.mean("a", "A", 1).trace() == 1
    sums.see_inputs("a", call(2 * x))
    assert sums.mean("a", "A", 1).trace() == 2.5


def test_the_last_result_is_remembered() -> None:
    count = iter(range(1, 9))
    again = Remembered(lambda x: next(count))
    one, other = object(), object()
    assert [again(x) for x in (one, one, other, one)] == [1, 1, 2, 3]
