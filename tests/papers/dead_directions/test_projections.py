"""Numbers that a matrix has lost and a projection has not; Schur complements; bottom directions."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from papers.dead_directions.projections import (
    Direction,
    bottom_direction,
    project_gradients,
    projected_second_moment,
    schur_complement,
)
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.factors import kfac_factors
from topograd.geometry.rates import fit_rate, log_grid

WIDTH = 8


def chain(
    t: float, depth: int, turn: Tensor | None = None, activation: nn.Module | None = None
) -> nn.Sequential:
    """W = Q diag(1, ..., 1, t) Qᵀ in every layer, the last one linear."""
    diagonal = torch.ones(WIDTH, dtype=torch.float64)
    diagonal[-1] = t
    W = torch.diag(diagonal) if turn is None else turn @ torch.diag(diagonal) @ turn.T
    layers: list[nn.Module] = []
    for i in range(depth):
        layer = nn.Linear(WIDTH, WIDTH, bias=False).double()
        layer.weight.data = W.clone()
        layers += [layer, activation] if activation is not None and i < depth - 1 else [layer]
    return nn.Sequential(*layers)


def gaussian(rows: int, columns: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def turn() -> Tensor:
    return torch.linalg.qr(gaussian(WIDTH, WIDTH, 5)).Q


def test_a_rotated_chain_is_read_by_projection_and_not_from_the_matrix(turn: Tensor) -> None:
    depth, grid, x = 6, log_grid(3e-3, 0.1), gaussian(500)
    v = turn[:, -1]
    directions = {str(i): Direction(v, v) for i in range(depth)}
    projected: dict[str, list[float]] = {name: [] for name in directions}
    inputs: dict[str, list[float]] = {name: [] for name in directions}
    from_matrix = []
    for t in grid.tolist():
        model = chain(t, depth, turn)
        for name, found in project_gradients(
            model, (x, None), directions, "squared-error", "expected"
        ).items():
            projected[name].append(found.G.item())
            inputs[name].append(found.A.item())
        G = kfac_factors(model, (x, None), "squared-error", "expected")["0"].G
        from_matrix.append(abs((v @ G @ v).item()))
    slopes = [fit_rate(grid, projected[name]).slope for name in directions]
    assert slopes == pytest.approx([10, 8, 6, 4, 2, 0], abs=1e-3)
    assert [fit_rate(grid, inputs[name]).slope for name in directions] == pytest.approx(
        [0, 2, 4, 6, 8, 10], abs=1e-3
    )
    assert fit_rate(grid, from_matrix).slope is None, "the matrix has only rounding at small t"
    assert from_matrix[0] > 1e6 * projected["0"][0]
    assert from_matrix[-1] == pytest.approx(projected["0"][-1], rel=1e-3)


def test_projections_are_the_forms_of_the_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4)).double()
    x, y = gaussian(6, 8).view(6, 2, 4), torch.randint(4, (6,))
    directions = {
        "0": Direction(gaussian(3, 1)[:, 0], gaussian(4, 1)[:, 0]),
        "3": Direction(gaussian(4, 2), gaussian(9, 3)),
    }
    batches = list(zip(x.split(2), y.split(2), strict=True))
    for fisher in ("empirical", "expected"):
        factors = kfac_factors(model, (x, y), fisher=fisher)
        found = project_gradients(model, batches, directions, fisher=fisher)
        assert list(found) == ["0", "3"]
        for name, at in directions.items():
            A, G = factors[name].A, factors[name].G
            torch.testing.assert_close(found[name].G, form(G, at.v))
            torch.testing.assert_close(found[name].A, form(A, at.u))
    assert found["3"].G.shape == (2,)
    assert found["3"].A.shape == (3,)
    assert found["0"].G.shape == ()
    assert list(project_gradients(model, (x, y), {"3": directions["3"]})) == ["3"]


def form(matrix: Tensor, v: Tensor) -> Tensor:
    return (v * (matrix @ v)).sum(0)


def test_a_stream_of_rows() -> None:
    rows, v = gaussian(7, 3), gaussian(3, 2)
    expected = (rows @ v).square().mean(0)
    torch.testing.assert_close(projected_second_moment(rows, v), expected)
    torch.testing.assert_close(projected_second_moment(iter(rows.split(3)), v), expected)
    assert projected_second_moment(rows.float(), v.float()).dtype == torch.float64
    with refused(GeometryError, setting="rows", given=0):
        projected_second_moment([], v)


def test_schur_complements() -> None:
    rows = gaussian(20, 5)
    G = rows.T @ rows
    inverse = torch.linalg.inv(G)
    for d in (0, 3, -1):
        assert schur_complement(G, d).item() == pytest.approx(1 / inverse[d, d].item())
    v = torch.nn.functional.normalize(gaussian(5, 1)[:, 0], dim=0)
    for unit in (v, -v, torch.eye(5, dtype=torch.float64)[2]):
        assert schur_complement(G, unit).item() == pytest.approx(1 / (unit @ inverse @ unit).item())
    tiny = torch.diag(torch.tensor([1.0, 1e-40, 2.0], dtype=torch.float64))
    assert schur_complement(tiny, 1).item() == 1e-40


@pytest.mark.parametrize("width", [3, 8])
def test_what_the_others_explain_of_a_dead_relu(width: int) -> None:
    """bᵀ C⁻¹ b / A_dd = (d - 1) / (π (d + π - 2)), Lemma 18, within 2% for n ≥ 50 d²."""
    t, n = 1e-3, 400_000
    h = gaussian(n, width).relu()
    h[:, -1] *= t
    A = h.T @ h / n
    left = schur_complement(A, width - 1)
    predicted = (width - 1) / (math.pi * (width + math.pi - 2))
    assert 1 - (left / A[-1, -1]).item() == pytest.approx(predicted, rel=0.02)


def test_the_bottom_direction_of_a_rotated_chain(turn: Tensor) -> None:
    v, model, data = turn[:, -1], chain(1e-2, 3, turn), (gaussian(20_000), None)
    factors = kfac_factors(model, data, "squared-error", "expected")["1"]
    found = bottom_direction(factors)
    assert abs((found.increment * torch.outer(v, v)).sum()).item() == pytest.approx(1, abs=1e-7)
    at = project_gradients(model, data, {"1": found}, "squared-error", "expected")["1"]
    lowest_A, lowest_G = (values[0].item() for values in factors.eigenvalues())
    assert (at.A.item(), at.G.item()) == pytest.approx((lowest_A, lowest_G), rel=1e-6)


def test_what_is_refused() -> None:
    model, data, G = chain(0.1, 2), (gaussian(4), None), torch.eye(3, dtype=torch.float64)
    unit = torch.eye(WIDTH, dtype=torch.float64)[0]

    def project(**directions: Direction) -> object:
        named = {name.removeprefix("layer_"): at for name, at in directions.items()}
        return project_gradients(model, data, named, "squared-error", "expected")

    at, short = Direction(unit, unit), Direction(unit, unit[:3])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("directions", lambda: project(layer_0=at, head=at)),
        ("directions", lambda: project(layer_0=short)),
        ("matrix", lambda: schur_complement(G[:2], 0)),
        ("direction", lambda: schur_complement(G, 3)),
        ("direction", lambda: schur_complement(G, 2 * G[0])),
        ("matrix", lambda: schur_complement(torch.diag(G[0]), 1)),
    ]
    for setting, call in cases:
        with refused(GeometryError, setting=setting):
            call()
