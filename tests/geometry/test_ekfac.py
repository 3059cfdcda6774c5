"""EK-FAC: scales against a loop over rows, products against the dense matrix, shared maps, refusals."""

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.ekfac import Eigenbasis, eigenbases
from topograd.geometry.factors import kfac_factors
from topograd.geometry.layers import Call, CallTracer


class Rows:
    """Keeps the rows of every call."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None

    def see_inputs(self, layer: str, call: Call) -> None:
        self.inputs.append(call.inputs(call.source.detach()))

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self.gradients.append(rows)


def batch(rows: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def test_scales_are_second_moments_in_the_basis_of_maps_used_twice() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(3, 3, bias=False).double()
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x, y = batch()
    factors = kfac_factors(model, (x, y), "squared-error")
    basis = eigenbases(model, (x, y), factors, "squared-error")["0"]
    for p in model.parameters():
        p.requires_grad_(False)
    rows = Rows()
    with CallTracer(model, rows) as tracer:
        out = model(x)
    torch.autograd.grad(out, tracer.leaves, out.detach() - y)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for h, delta in zip(rows.inputs, reversed(rows.gradients), strict=True):
        for one, other in zip(h, delta, strict=True):
            turned = basis.gradients.T @ torch.outer(other, one) @ basis.inputs
            expected += turned.square() / len(x)
    torch.testing.assert_close(basis.scales, expected)


@pytest.mark.parametrize("fisher", ["empirical", "expected"])
def test_independent_rows_have_the_eigenvalues_of_kfac(fisher: str) -> None:
    """Of a linear layer alone under expected squared error, δ is independent of h: S is the outer product."""
    model, (x, y) = nn.Sequential(nn.Linear(3, 3)).double(), batch()
    factors = kfac_factors(model, (x, y), "squared-error", fisher)  # type: ignore[arg-type]
    basis = eigenbases(model, (x, y), factors, "squared-error")["0"]
    a, g = factors["0"].eigenvalues()
    assert torch.allclose(basis.scales, torch.outer(g, a)) == (fisher == "expected")
    assert float(basis.scales.sum()) == pytest.approx(float(torch.outer(g, a).sum()), rel=0.2)


def test_products_are_those_of_the_dense_matrix() -> None:
    q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()).Q
    r = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(1)).double()).Q
    basis = Eigenbasis(q, r, torch.arange(6).double().view(2, 3))
    turn = torch.kron(r, q)
    dense = turn @ torch.diag(basis.scales.flatten()) @ turn.T + 0.3 * torch.eye(6).double()
    u, v = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2)).double()
    expected = torch.linalg.solve(dense, v.flatten())
    torch.testing.assert_close(basis.solve(v, 0.3).flatten(), expected)
    assert basis.inner(u, v, 0.3) == pytest.approx(float(u.flatten() @ expected))
    with refused(GeometryError, setting="damping"):
        basis.solve(v, 0.0)
    with refused(GeometryError, setting="direction"):
        basis.inner(u.T, v, 1.0)


def test_factors_of_another_model_are_refused() -> None:
    model, other = nn.Linear(3, 3).double(), nn.Sequential(nn.Linear(3, 3)).double()
    factors = kfac_factors(model, batch(), "squared-error")
    with refused(GeometryError):
        eigenbases(other, batch(), factors, "squared-error")
