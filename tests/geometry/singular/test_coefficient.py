"""The learning coefficient of any model: known values, its refusals, and what it counts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import DivergenceError, GeometryError
from topograd.geometry import learning_coefficient
from topograd.geometry.singular.langevin import Langevin, Noise
from topograd.nn.gpt import GPT

FEW = Langevin(burn_in=60, draws=40, thin=4, chains=3)


def regular(size: int = 3, n: int = 120) -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(size, 1, bias=False).double()
    x = torch.randn(n, size).double()
    return model, (x, model(x).detach())


def test_regular_weights_count_one_half_each() -> None:
    model, data = regular()
    before = model.weight.detach().clone()
    found = learning_coefficient(model, "squared-error", data, FEW)
    assert found.calibrated, found.reason
    assert found.value == pytest.approx(1.5, abs=0.35)
    assert found.interval[0] < found.value < found.interval[1]
    assert found.traces.shape == (3, 40)
    assert found.value == pytest.approx(float(found.traces.mean()))
    assert (found.terms, found.weights) == (120, 3)
    assert found.n_beta == pytest.approx(120 / torch.log(torch.tensor(120.0)).item())
    assert found.gradients == 3 * (60 + 40 * 4)
    assert found.evaluations == 3 * 40 + 1
    assert torch.equal(model.weight, before)
    again = learning_coefficient(model, "squared-error", data, FEW)
    assert again.value == found.value, "the same seed gives the same"


@pytest.mark.parametrize("sizes", [(40, 40, 40), (60, 40, 20)])
def test_control_variates_give_the_same_without_evaluations(sizes: tuple[int, ...]) -> None:
    model, (x, y) = regular()
    torch.manual_seed(3)
    y = y + torch.randn_like(y)  # batches differ in their losses by far more than a chain moves them
    model.weight.data = torch.linalg.lstsq(x, y).solution.mT
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    plain = learning_coefficient(model, "squared-error", batches, FEW)
    control = learning_coefficient(model, "squared-error", batches, replace(FEW, control=True))
    assert control.value == pytest.approx(plain.value, abs=0.5)
    assert control.evaluations == 3
    assert (control.waic, control.losses) == (None, None)
    assert control.wbic is not None
    assert plain.wbic is not None
    assert control.wbic == pytest.approx(plain.wbic, rel=0.02)
    warm = learning_coefficient(model, "squared-error", batches, replace(FEW, control=True), n_beta=9.0)
    assert warm.wbic is None, "at its own temperature alone"


class Power(nn.Module):
    """N(w², 1) at w = 0: λ = ¼."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w**2).expand(len(x), 1)


def test_a_singular_weight_counts_less_and_weights_can_be_chosen() -> None:
    data = torch.ones(400, 1).double(), torch.zeros(400, 1).double()
    settings = Langevin(step=0.01, burn_in=100, draws=80, thin=5, chains=3)
    found = learning_coefficient(Power(), "squared-error", data, settings, weights="w")
    assert found.weights == 1
    assert found.value == pytest.approx(0.25, abs=0.12)
    assert found.value < 0.4
    with refused(GeometryError, setting="weights"):
        learning_coefficient(Power(), "squared-error", data, settings, weights="nowhere")


def test_a_step_is_found_where_the_curvature_is_zero_at_the_weights() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3))).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    torch.manual_seed(0)
    data = torch.randn(400, 2).double(), torch.zeros(400, 2).double()
    found = learning_coefficient(model, "squared-error", data, FEW)
    assert found.step < 0.05, "with the curvature at the weights alone it is 0.2, and the chains diverge"
    assert 0 < found.value < 6, "twelve regular weights would have six"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Langevin(step=2e-5, burn_in=0, draws=20, thin=1, chains=2), "have not arrived"),
        (Langevin(step=0.065, burn_in=40, draws=40, thin=1, chains=2), "the step is too large"),
    ],
)
def test_a_step_that_is_too_small_or_too_large_is_refused(settings: Langevin, why: str) -> None:
    model, data = regular()
    found = learning_coefficient(model, "squared-error", data, settings)
    assert not found.calibrated
    assert why in (found.reason or "")
    assert abs(found.virial - 1) > 0.15


def test_weights_that_are_no_minimum_are_refused() -> None:
    model, (x, y) = regular()
    found = learning_coefficient(model, "squared-error", (x, y + 3 * x[:, :1]), FEW, n_beta=60.0)
    assert not found.calibrated
    assert found.value < 0
    assert found.n_beta == 60.0


def test_tokens_are_counted_one_by_one_and_ignored_ones_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tokens = torch.randint(5, (6, 7))
    targets = tokens.clone()
    targets[:, 0] = -100
    batches = [(tokens[:4], targets[:4]), (tokens[4:], targets[4:])]
    settings = Langevin(step=1e-4, burn_in=4, draws=8, thin=1, chains=2, precondition="rmsprop")
    found = learning_coefficient(model, "cross-entropy", batches, settings)
    assert found.terms == 36
    assert found.waic is not None
    assert found.fluctuation == found.waic.fluctuation
    assert found.evaluations == (2 * 8 + 1) * 2
    assert found.wbic == pytest.approx(36 * float(found.waic.training), rel=0.2)
    assert learning_coefficient(model, "cross-entropy", batches, settings, n_beta=3.0).wbic is None
    one = learning_coefficient(
        model, lambda f, y: nn.functional.cross_entropy(f.flatten(0, 1), y.flatten()), batches, settings
    )
    assert one.waic is None
    assert one.terms == 6, "a loss of one number a batch counts rows"


def test_bad_requests() -> None:
    model, data = regular()
    with refused(GeometryError, setting="model", given="bfloat16"):
        learning_coefficient(nn.Linear(3, 1).bfloat16(), "squared-error", data)
    with refused(GeometryError, setting="model", given="1"):
        learning_coefficient(nn.Sequential(model, nn.Dropout(0.5)), "squared-error", data)
    with refused(GeometryError, setting="batches"):
        learning_coefficient(model, "squared-error", [])
    with refused(GeometryError, setting="batches"):
        learning_coefficient(model, "squared-error", (data[0], None))
    with refused(GeometryError, setting="loss", given="hinge"):
        learning_coefficient(model, "hinge", data)
    with refused(GeometryError, setting="n_beta", given=-1):
        learning_coefficient(model, "squared-error", data, FEW, n_beta=-1)
    with refused(GeometryError, setting="draws", given=2):
        Langevin(draws=2)
    with refused(GeometryError, setting="precondition", given="adam"):
        Langevin(precondition="adam")  # type: ignore[arg-type]
    with refused(GeometryError, setting="step", given=-1.0):
        Langevin(step=-1.0)
    with refused(DivergenceError, setting="step", given=1000.0):
        learning_coefficient(model, "squared-error", data, Langevin(step=1e3, burn_in=400, draws=8))


class Masked(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 1)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.dim() == 0:
            raise TypeError("of the model's own")
        found: torch.Tensor = self.map(values * mask)
        return found


def test_inputs_that_the_model_does_not_take_are_one_line() -> None:
    x, y = torch.ones(4, 3), torch.ones(4, 1)
    good = ({"values": x, "mask": x}, y)
    for bad, given in (
        ({"values": x}, "values"),
        ({"values": x, "attention": x}, "values, attention"),
        ((x,), "1 by position"),
    ):
        with refused(GeometryError, setting="batches", given=given, allowed="(values, mask)"):
            learning_coefficient(Masked(), "squared-error", [good, (bad, y)])
    with pytest.raises(TypeError, match="of the model's own"):
        learning_coefficient(Masked(), "squared-error", ({"values": x, "mask": torch.ones(())}, y))
    few = Langevin(step=1e-3, burn_in=0, draws=8, thin=1, chains=1)
    assert learning_coefficient(Masked(), "squared-error", [good, good], few).terms == 8


def test_tied_frozen_and_quantised_models() -> None:
    tied = GPT(layers=1, width=8, heads=2, vocab=16, context=8, tied=True).double()
    tokens = torch.randint(16, (3, 8), generator=torch.Generator().manual_seed(0))
    settings = Langevin(burn_in=2, draws=8, thin=1, chains=1)
    found = learning_coefficient(tied, "cross-entropy", (tokens, tokens), settings)
    assert found.weights == sum(parameter.numel() for parameter in tied.parameters()), (
        "a tied weight counts once"
    )
    with refused(GeometryError, setting="weights"):
        learning_coefficient(tied.requires_grad_(False), "cross-entropy", (tokens, tokens))
    packed: Any = nn.Sequential(nn.ReLU())
    packed[0]._packed_params = object()
    with refused(GeometryError, setting="model", given="0"):
        learning_coefficient(packed, "squared-error", (torch.ones(4, 3), torch.ones(4, 3)))


def test_noise_is_made_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    drawn: list[torch.device] = []
    generator, randn = torch.Generator, torch.randn

    def make(device: torch.device) -> torch.Generator:
        made.append(device)
        return generator()

    def draw(shape: Any, *, device: torch.device, **more: Any) -> Tensor:
        drawn.append(device)
        return randn(shape, **more)

    monkeypatch.setattr(torch, "Generator", make)
    monkeypatch.setattr(torch, "randn", draw)
    noise, there = Noise(0), torch.empty(3, device="meta", dtype=torch.float64)
    assert not torch.equal(noise.like(there), noise.like(there))
    assert drawn == [there.device] * 2
    assert made == [there.device], "one generator a device, and no other"


def test_a_step_is_found_for_the_preconditioner_that_takes_it() -> None:
    """One weight is 64 times sharper: RMSprop evens it out, and bears a larger step for the other."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.randn(200, 2).double() * torch.tensor([8.0, 1.0]).double()
    y = model(x).detach() + torch.randn(200, 1).double()
    batches = list(zip(x.split(50), y.split(50), strict=True))
    results = {
        kind: learning_coefficient(
            model,
            "squared-error",
            batches,
            Langevin(burn_in=200, draws=100, precondition=kind, localization=0.0),
        )
        for kind in ("none", "rmsprop")
    }
    assert results["rmsprop"].step > 2 * results["none"].step
    assert results["rmsprop"].calibrated, results["rmsprop"].reason
    assert abs(results["none"].virial - 1) > abs(results["rmsprop"].virial - 1)
    assert results["rmsprop"].value == pytest.approx(1.0, abs=0.5)
