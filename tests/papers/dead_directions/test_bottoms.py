"""Bottom rates of a linear chain with a dead unit, and every condition that forbids them."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from papers.dead_directions.bottoms import BottomMonitor, Conditions
from papers.dead_directions.selection import EXCEEDED
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.factors import kfac_factors
from topograd.geometry.rates import log_grid

DEPTH, WIDTH = 3, 5  # a decade of t⁴ is what eigenvalues of a matrix still hold
GOOD = Conditions(
    alignment_error=0.0,
    depth=DEPTH,
    noise="noisy",
    estimator="expected",
    phase="compression",
    equivariant=True,
)


@dataclass(frozen=True)
class Layer:
    G: Tensor


def chain(t: float, gauge: bool = False) -> dict[str, Layer]:
    """G_l = Πᵀ Π of the layers above, every W = diag(1, ..., 1, t): λ_min(G_l) = t^{2(L-l)} exactly.

    With `gauge`, a direction of exact zeros is added, as a symmetry of the model would.
    """
    factors = {}
    for layer in range(1, DEPTH + 1):
        weight = torch.ones(WIDTH, dtype=torch.float64)
        weight[-1] = t ** (DEPTH - layer)
        values = torch.cat((weight.square(), torch.zeros(1))) if gauge else weight.square()
        torch.manual_seed(layer)
        rotation, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
        factors[f"layer {layer}"] = Layer(rotation @ torch.diag(values) @ rotation.T)
    return factors


def recorded(gauge: bool = False) -> BottomMonitor:
    monitor = BottomMonitor()
    for t in log_grid(1e-2, 0.1).tolist():
        monitor.record(t, chain(t, gauge))
    return monitor


LADDER = {f"layer {layer}": 2.0 * (DEPTH - layer) for layer in range(1, DEPTH + 1)}


@pytest.mark.parametrize("gauge", [False, True])
def test_the_ladder_is_read_and_gauge_zeros_are_dropped(gauge: bool) -> None:
    for name, reading in recorded(gauge).read(LADDER, GOOD).items():
        assert reading.rate is not None
        assert reading.rate.slope == pytest.approx(LADDER[name], abs=1e-3)
        assert reading.selection.count("floor") == int(gauge)


def test_what_was_not_predicted_exceeds_the_theorem() -> None:
    reading = recorded().read({"layer 1": 9.0}, GOOD)["layer 1"]
    assert reading.rate is None
    assert reading.refused == f"{EXCEEDED}: 9 was predicted and the nearest rank has 4.00"


@pytest.mark.parametrize(
    ("conditions", "why"),
    [
        (replace(GOOD, phase="accumulation"), "the phase is accumulation"),
        (replace(GOOD, phase="undecided"), "the phase is undecided"),
        (replace(GOOD, estimator="empirical"), "the empirical Fisher carries"),
        (replace(GOOD, alignment_error=1e-2), "alignment error 0.01 is above 0.1 t^1 at t = 0.01"),
        (replace(GOOD, alignment_error=float("nan")), "the alignment error is nan"),
    ],
)
def test_a_condition_that_fails_takes_the_slope_away(conditions: Conditions, why: str) -> None:
    for reading in recorded().read(LADDER, conditions).values():
        assert reading.rate is None
        assert why in str(reading.refused)


def test_a_reading_prints_its_conditions() -> None:
    conditions = replace(GOOD, noise="noise-free", equivariant=False)
    words = str(recorded().read(LADDER, conditions)["layer 1"])
    for word in ("layer 1: t^4.000", "noise-free", "expected Fisher", "compression", "not equivariant"):
        assert word in words
    assert "no rate: the phase" in str(recorded().read(LADDER, replace(GOOD, phase="undecided"))["layer 2"])


def test_a_window_that_bends_has_no_rate() -> None:
    monitor = BottomMonitor()
    for t in log_grid(1e-2, 0.1).tolist():
        monitor.record(t, {"bent": Layer(torch.diag(torch.tensor([1e-3 + 300 * t**6, 1.0])))})
    reading = monitor.read({"bent": 6.0}, GOOD)["bent"]
    assert reading.rate is None


def test_a_layer_that_is_all_rounding_has_no_rank() -> None:
    monitor = BottomMonitor(ranks=1)
    for t in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        monitor.record(t, {"dead": Layer(torch.diag(torch.tensor([0.0, 1.0])))})
    reading = monitor.read({"dead": 2.0}, GOOD)["dead"]
    assert reading.rate is None
    assert reading.selection.count("floor") == 1


def test_with_the_factors_of_a_real_chain() -> None:
    """Every W = diag(1, ..., 1, t), the expected Fisher of squared error: 2(L - l) at layer l."""
    torch.manual_seed(0)
    x = torch.randn(200, WIDTH, dtype=torch.float64)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(DEPTH)]
    model, monitor = nn.Sequential(*layers), BottomMonitor()
    for t in log_grid(1e-2, 0.1).tolist():
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(torch.diag(torch.tensor([1.0] * (WIDTH - 1) + [t])))
        monitor.record(t, kfac_factors(model, (x, x), "squared-error", "expected"))
    predicted = {str(i): 2.0 * (DEPTH - 1 - i) for i in range(DEPTH)}
    for name, reading in monitor.read(predicted, GOOD).items():
        assert reading.rate is not None
        assert reading.rate.slope == pytest.approx(predicted[name], abs=0.01)


def test_bad_records_are_named() -> None:
    monitor = BottomMonitor()
    with refused(GeometryError, setting="predicted"):
        monitor.read(LADDER, GOOD)
    with refused(GeometryError, setting="t", given=0.0):
        monitor.record(0.0, chain(0.1))
    with refused(GeometryError, setting="factors", given="x"):
        BottomMonitor().record(0.1, {"x": Layer(torch.full((2, 2), float("inf")))})
    monitor.record(0.1, chain(0.1))
    with refused(GeometryError, setting="factors"):
        monitor.record(0.2, {k: v for k, v in chain(0.2).items() if k != "layer 1"})
    with refused(GeometryError, setting="ranks", given=0):
        BottomMonitor(ranks=0)
