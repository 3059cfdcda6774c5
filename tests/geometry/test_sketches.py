"""Sketched factors against formed ones, and the flattest direction against all eigenvectors."""

import pytest
import torch
from torch import nn

from topograd.geometry import sketches
from topograd.geometry.factors import kfac_factors
from topograd.geometry.inspection import inspect, spectrum
from topograd.geometry.sketches import Sketch, Sketched, flattest


def rows(n: int = 400, d: int = 90) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** -torch.linspace(0, 6, d, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    return (torch.randn(n, d, generator=generator, dtype=torch.float64) * scale) @ Q


def test_a_sketch_has_the_leading_eigenpairs_and_the_trace() -> None:
    h = rows()
    M = h.T @ h / len(h)
    sketch = Sketch(90, h)
    for part in h.split(150):
        sketch.add(part)
    found = sketch.mean(len(h))
    values, vectors = torch.linalg.eigh(M)
    assert found.trace == pytest.approx(float(M.trace()))
    assert torch.allclose(found.values[:20], values.flip(0)[:20], rtol=1e-3)
    assert (found.vectors[:, 0] @ vectors[:, -1]).abs() == pytest.approx(1, abs=1e-6)
    assert (found.values <= values.flip(0)[: len(found.values)] * (1 + 1e-9)).all()
    bottom = flattest(found, 2)
    assert (bottom.T @ M @ bottom).abs().max() < 1e-9 * values[-1]
    assert torch.allclose(bottom.T @ bottom, torch.eye(2).double())
    said = spectrum(found)
    assert said.sketched
    assert said.size == 90
    assert said.trace == found.trace


def test_the_flattest_direction_is_as_flat_as_the_bottom_and_the_next_one_as_the_next() -> None:
    Q = torch.linalg.qr(rows(12, 12)).Q
    M = Q @ torch.diag(4.0 ** -torch.arange(12, dtype=torch.float64)) @ Q.T
    values = torch.linalg.eigvalsh(M)
    bottom = flattest(M, 3)
    assert (bottom.T @ M @ bottom).diagonal().tolist() == pytest.approx(values[:3].tolist(), rel=0.01)
    assert torch.allclose(bottom.T @ bottom, torch.eye(3).double(), atol=1e-9)
    dead = torch.zeros(4, 4, dtype=torch.float64)
    assert flattest(dead).norm() == pytest.approx(1)
    dead[0, 0] = 1
    assert flattest(dead, 9)[0, :3].abs().max() < 1e-9, "four columns, the last along the live one"


def test_wide_layers_are_sketched_and_the_others_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "WIDEST", 8)
    monkeypatch.setattr(sketches, "RANK", 6)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    batch = (torch.randn(40, 5).double(), torch.randint(3, (40,)))
    found = inspect(model, batch, fisher="empirical")
    exact = kfac_factors(model, batch)
    assert not found.layers["0"].A.sketched
    wide = found.layers["2"].A
    assert (wide.sketched, wide.size, wide.rank) == (True, 12, 6)
    assert wide.trace == pytest.approx(float(exact["2"].A.trace()))
    assert found.layers["0"].A.trace == pytest.approx(float(exact["0"].A.trace()))
    assert found.layers["0"].G is not None
    assert found.layers["0"].G.trace == pytest.approx(float(exact["0"].G.trace()))
    assert isinstance(Sketch(4, torch.ones(1)).mean(1), Sketched)
