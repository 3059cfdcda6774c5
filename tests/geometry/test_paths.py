"""Orders read along lines out of a network's weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from raising import refused
from tests.oracles.fisher import exact_fisher
from topograd.errors import GeometryError
from topograd.geometry.paths import (
    Path,
    Replaced,
    directional_fisher,
    divergences,
    each_divergence,
    read_order,
)
from topograd.geometry.rates import log_grid

WIDTH = 4
INPUTS = torch.randn(200, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chain(depth: int, activation: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    """Every weight diag(1, …, 1, 0): the last unit is dead in all layers."""
    dead = torch.diag(torch.tensor([1.0] * (WIDTH - 1) + [0.0], dtype=torch.float64))
    layers: list[nn.Module] = []
    for i in range(depth):
        linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        linear.weight.data.copy_(dead)
        layers += [linear] if i == 0 else [activation(), linear]
    return nn.Sequential(*layers)


def joint_mode(model: nn.Module) -> dict[str, Tensor]:
    """The dead entry of every layer, together."""
    parts = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for part in parts.values():
        part[-1, -1] = 1.0
    return parts


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.Tanh])
def test_the_joint_mode_of_a_chain_has_its_depth_as_order(
    depth: int, activation: Callable[[], nn.Module]
) -> None:
    model = chain(depth, activation)
    found = read_order(model, Path.of(model, joint_mode(model)), INPUTS)
    assert found.order == depth
    assert found.fisher.slope == pytest.approx(2 * depth - 2, abs=0.05)
    assert found.divergence.slope == pytest.approx(2 * depth, abs=0.05)
    assert found.leading_ratio == pytest.approx(2 * depth**2, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_with_two_names_is_put_back(tied: bool) -> None:
    """torch's `functional_call` leaves plain tensors in it."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.again, self.norm = self.first, nn.BatchNorm1d(3)
            self.other, self.norm_again = nn.Linear(3, 3), self.norm
            if tied:
                self.other.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm_again(self.other(torch.tanh(self.again(self.first(x)))))
            return y

    model, x = Shared().eval(), torch.randn(4, 3)
    before = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not Replaced(model)(zero, x).any(), "every use has the new values"
    after = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    assert [{name: id(p) for name, p in one.items()} for one in before] == [
        {name: id(p) for name, p in one.items()} for one in after
    ]


def test_cross_entropy_has_the_same_order() -> None:
    model = chain(3, nn.Tanh)
    found = read_order(model, Path.of(model, joint_mode(model)), INPUTS, "cross-entropy")
    assert (found.order, round(found.leading_ratio, 1)) == (3, 18.0)


@pytest.mark.parametrize("likelihood", ["squared-error", "cross-entropy"])
def test_the_directional_fisher_is_that_of_the_whole_matrix(likelihood: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs = torch.randn(11, 3, dtype=torch.float64)
    direction = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    path = Path.of(model, direction)
    moved = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    moved.load_state_dict(path.at(0.3))
    v = torch.cat([part.flatten() for part in path.direction.values()])
    assert v.norm().item() == pytest.approx(1.0)
    dense = exact_fisher(moved, list(moved.parameters()), inputs, likelihood)
    found = directional_fisher(model, path, 0.3, inputs, likelihood)  # type: ignore[arg-type]
    assert found == pytest.approx((v @ dense @ v).item(), rel=1e-12)


def test_the_divergence_is_the_plain_sum_where_that_does_not_cancel() -> None:
    torch.manual_seed(2)
    model = nn.Linear(3, 5).double()
    path = Path.of(model, {"weight": torch.randn(5, 3)})
    inputs = torch.randn(7, 3, dtype=torch.float64)
    before, after = (functional_call(model, path.at(t), (inputs,)).log_softmax(-1) for t in (0.0, 0.7))
    plain = (before.exp() * (before - after)).sum(-1).mean().item()
    grid = torch.tensor([0.7, 1e-7], dtype=torch.float64)
    large, tiny = divergences(model, path, grid, inputs, "cross-entropy")
    assert large == pytest.approx(plain, rel=1e-12)
    assert tiny / 1e-14 == pytest.approx(
        directional_fisher(model, path, 0.0, inputs, "cross-entropy") / 2, rel=1e-5
    )


def test_a_path_that_does_not_approach_a_singularity_is_named() -> None:
    model = chain(2)
    live = {"0.weight": torch.ones(WIDTH, WIDTH)}
    with refused(GeometryError, setting="path"):
        read_order(model, Path.of(model, live), INPUTS)


def test_a_symmetry_is_told_from_a_singularity() -> None:
    """One layer's dead entry alone moves nothing: the next layer does not hear it."""
    model = chain(2)
    alone = {"0.weight": joint_mode(model)["0.weight"]}
    with refused(GeometryError, setting="path"):
        read_order(model, Path.of(model, alone), INPUTS)


def test_a_window_outside_the_asymptote_gives_no_order() -> None:
    model = chain(3, nn.Tanh)
    with refused(GeometryError, setting="grid"):
        read_order(model, Path.of(model, joint_mode(model)), INPUTS, grid=log_grid(0.5, 20.0))


def test_the_model_is_left_alone_and_may_be_float32() -> None:
    model = chain(2).float()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert read_order(model, Path.of(model, joint_mode(model)), INPUTS.float()).order == 2
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_attention_has_a_directional_fisher() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    path = Path.of(model, {"linear1.weight": torch.ones(16, 8)})
    found = directional_fisher(model, path, 0.0, torch.randn(3, 5, 8))
    assert math.isfinite(found)
    assert found > 0


@pytest.mark.parametrize(
    ("direction", "given"),
    [
        ({"nothing": torch.ones(1)}, "nothing"),
        ({"0.weight": torch.ones(2, 2)}, (2, 2)),
        ({"0.weight": torch.zeros(4, 4)}, None),
        ({}, None),
    ],
)
def test_bad_directions_are_named(direction: dict[str, Tensor], given: object) -> None:
    with refused(GeometryError, setting="direction", given=given):
        Path.of(chain(2), direction)


def test_bad_models_and_inputs_are_named() -> None:
    model = chain(2)
    path = Path.of(model, joint_mode(model))
    flat = nn.Sequential(nn.Linear(WIDTH, 2), nn.Flatten(0))
    with refused(GeometryError, setting="inputs"):
        directional_fisher(model, path, 0.1, INPUTS[:0])
    with refused(GeometryError, setting="outputs", given="Tensor"):
        directional_fisher(flat, Path.of(flat, {"0.weight": torch.ones(2, WIDTH)}), 0.1, INPUTS)
    next(model.parameters()).data[0, 0] = math.nan
    with refused(GeometryError, setting="model", given="0.weight"):
        Path.of(model, joint_mode(model))


def test_models_that_answer_with_an_object() -> None:
    class Answers(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.inner(x), other=x)

    plain, wrapped = chain(2), Answers(chain(2))
    dead = torch.zeros(WIDTH, WIDTH)
    dead[-1, -1] = 1.0
    parts = {f"{i}.weight": dead for i in (0, 2)}
    found = read_order(plain, Path.of(plain, parts), INPUTS)
    inner = Path.of(wrapped, {f"inner.{name}": part for name, part in parts.items()})
    assert read_order(wrapped, inner, INPUTS) == found, "logits are taken by themselves"
    assert read_order(wrapped, inner, INPUTS, outputs=lambda m, x: m(x).logits) == found
    with refused(GeometryError, setting="outputs", given="SimpleNamespace"):
        read_order(wrapped, inner, INPUTS, outputs=lambda m, x: m(x))


def in_digits(before: Tensor, after: Tensor) -> float:
    """KL(before ‖ after) of two rows of logits, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        p, q = ([Decimal(x).exp() for x in row.tolist()] for row in (before, after))
        log_p, log_q = ([(x / sum(row)).ln() for x in row] for row in (p, q))
        return float(sum(a.exp() * (a - b) for a, b in zip(log_p, log_q, strict=True)))


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3, 3.0])
def test_a_divergence_is_exact_at_every_size_and_in_every_chunk(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(7, 9, dtype=torch.float64, generator=generator)
    after = before + size * torch.randn(7, 9, dtype=torch.float64, generator=generator)
    whole = each_divergence(before, after, "cross-entropy")
    exact = [in_digits(*rows) for rows in zip(before, after, strict=True)]
    # a change of the log-probabilities is rounded to 1e-16, and the divergence is its square
    assert whole.tolist() == pytest.approx(exact, rel=1e-14 / size)
    monkeypatch.setattr("topograd.geometry.paths.CHUNK", 20)
    chunked = each_divergence(before, after, "cross-entropy")
    assert chunked.tolist() == pytest.approx(whole.tolist(), rel=1e-15)
