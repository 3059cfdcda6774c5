"""Chains: what masks leave alone, and the settings that are refused."""

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry import learning_coefficient
from topograd.geometry.singular.langevin import Langevin, Noise, Target, run_chain

FEW = Langevin(burn_in=80, draws=60, thin=3, chains=3)


def regular() -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.randn(200, 4).double()
    return model, (x, model(x).detach())


def test_a_mask_counts_its_weights_alone() -> None:
    model, data = regular()
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    found = learning_coefficient(model, "squared-error", data, FEW, masks={"weight": mask})
    assert found.weights == 2
    assert found.virial == pytest.approx(1, abs=0.3)
    assert found.value == pytest.approx(1.0, abs=0.35), "two regular weights count one half each"
    whole = learning_coefficient(model, "squared-error", data, FEW)
    assert whole.value == pytest.approx(2.0, abs=0.5)


def test_weights_outside_of_a_mask_do_not_move() -> None:
    model, (x, y) = regular()
    seen: list[Tensor] = []

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().flatten(1).sum(-1) / 2

    class Watching(Target):
        def losses(self, weights: dict[str, Tensor]) -> Tensor:
            seen.append(weights["weight"].clone())
            return super().losses(weights)

    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]]).double()
    target = Watching(model, loss, [(x, y)], None).within({"weight": mask})
    center = {"weight": model.weight.detach().clone()}
    steps: list[tuple[int, int]] = []
    settings = Langevin(step=1e-3, burn_in=2, draws=8, thin=2, chains=1)
    run_chain(target, center, 10.0, settings, Noise(0), 0, lambda *now: steps.append(now))
    moved = torch.stack([w - center["weight"] for w in seen])
    assert not moved[..., [1, 3]].any()
    assert moved[..., [0, 2]].all()
    assert steps == [(i, 18) for i in range(1, 19)]


def test_masks_that_do_not_fit() -> None:
    model, data = regular()
    for masks in ({"weight": torch.ones(2)}, {"other": torch.ones(1, 4)}, {"weight": torch.zeros(1, 4)}):
        with refused(GeometryError, setting="masks"):
            learning_coefficient(model, "squared-error", data, FEW, masks=masks)
    with refused(GeometryError, setting="precondition"):
        learning_coefficient(
            model, "squared-error", data, Langevin(precondition="rmsprop"), masks={"weight": torch.ones(1, 4)}
        )
