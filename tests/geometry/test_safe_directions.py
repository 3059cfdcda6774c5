"""Directions by their definitions, and readings of maps against one sample at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.safe_directions import RIDGE, adapter_directions, input_moments, read_maps


def moment(seed: int, d: int = 6) -> Tensor:
    rows = torch.randn(40, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = rows * torch.linspace(0.3, 2, d)[torch.randperm(d, generator=torch.Generator().manual_seed(seed))]
    return rows.T @ rows / 40


def test_no_direction_is_safer_than_the_safe_one() -> None:
    old, new = moment(0), moment(1)
    damped = old + RIDGE * old.diagonal().mean() * torch.eye(6).double()

    def worth(rows: Tensor) -> Tensor:
        return ((rows @ new) * rows).sum(-1) / ((rows @ damped) * rows).sum(-1)

    (safe,) = adapter_directions("safe", old, new, 1)
    others = torch.randn(2000, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert worth(safe) >= worth(others).max()
    (dead,) = adapter_directions("dead", old, new, 1)
    unit = dead / dead.norm()
    assert (unit @ old @ unit).item() == pytest.approx(torch.linalg.eigvalsh(old)[0].item())


@pytest.mark.parametrize("kind", ["dead", "safe"])
def test_rows_are_as_large_on_the_new_text_as_random_ones(kind: str) -> None:
    old, new = moment(0), moment(1)
    rows = adapter_directions(kind, old, new, 3)  # type: ignore[arg-type]
    heard = ((rows @ new) * rows).sum(1)
    torch.testing.assert_close(heard, torch.full((3,), new.trace().item() / 18).double())


def test_maps_are_read_as_one_sample_at_a_time() -> None:
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.query(x)) * self.key(x))

    model = Two().double()
    x, y = torch.randn(20, 3).double(), torch.randint(5, (20,))
    found = read_maps(model, ["query", "key"], (x, y))
    torch.testing.assert_close(found["query"].A, x.T @ x / 20)
    assert found["key"].A is found["query"].A, "they read one tensor"
    total = 0.0
    for row, label in zip(x, y, strict=True):
        key = model.key(row).detach().requires_grad_()
        loss = F.cross_entropy(model.head(torch.tanh(model.query(row)) * key), label)
        total += torch.autograd.grad(loss, key)[0].square().sum().item() / 20
    assert found["key"].gradient == pytest.approx(total)
    assert found["key"].energy == pytest.approx(total * (x * x).sum().item() / 20)
    with refused(GeometryError, setting="maps", given="values"):
        read_maps(model, ["query", "values"], (x, y))
    with refused(GeometryError, setting="fisher", given="expected"):
        read_maps(model, ["query"], (x, y), "expected")


def test_as_many_directions_as_inputs_at_most() -> None:
    with refused(GeometryError, setting="count", given=7):
        adapter_directions("dead", moment(0), moment(1), 7)


@pytest.mark.parametrize("limit", [2**30, 1], ids=["one pass", "a pass for each map"])
def test_moments_are_those_of_all_inputs(limit: int) -> None:
    torch.manual_seed(0)
    inner, outer, idle = nn.Linear(3, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.idle = inner, outer, idle

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(inner(x))
            return torch.tanh(outer(h)) + outer(h)

    batches = [torch.randn(2, 5, 3).double(), torch.randn(4, 5, 3).double()]
    found = input_moments(Chain(), ["inner", "outer", "idle"], batches, limit)
    rows = torch.cat([x.flatten(0, 1) for x in batches])
    hidden = torch.tanh(inner(rows)).detach()
    torch.testing.assert_close(found["inner"], rows.T @ rows / len(rows))
    torch.testing.assert_close(found["outer"], hidden.T @ hidden / len(rows))
    assert "idle" not in found
    assert not inner._forward_pre_hooks
