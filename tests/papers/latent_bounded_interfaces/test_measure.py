"""Units are medians of what a clock shows, cost no gradient and lead to the plan. No time is asserted."""

import itertools
from typing import Any

import pytest
import torch

from papers.latent_bounded_interfaces import measure
from papers.latent_bounded_interfaces.measure import build_model, choose, measure_units, random_tokens
from papers.latent_bounded_interfaces.planner import choose_engine
from papers.latent_bounded_interfaces.shape import Shape
from papers.latent_bounded_interfaces.timeline import Units
from raising import refused
from topograd.errors import ConfigError, StackError, TopologyError
from topograd.exec.gradient import Autograd
from topograd.exec.train_step import train_step
from topograd.interfaces import Hybrid, SegmentInterface, region_times
from topograd.interfaces.region_times import timed
from topograd.nn.config import ARCHITECTURES, Architecture
from topograd.nn.gpt import GPT
from topograd.runs.topology_config import Jacobian
from topograd.topology.dag import Topology

SHAPE = Shape(regions=4, region_layers=1, width=16, heads=2, vocab=11, context=12, batch=2)
INTERFACE = SegmentInterface(segments=3, rank=5)


@pytest.fixture(scope="module")
def stack() -> GPT:
    return build_model(SHAPE, INTERFACE)


def test_a_model_without_zeros_that_is_always_the_same() -> None:
    state = torch.get_rng_state()
    one, two = build_model(SHAPE, INTERFACE), build_model(SHAPE, INTERFACE)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert p.detach().any(), name
    assert [t.shape for t in random_tokens(SHAPE)] == [(2, 12), (2, 12)]
    assert len(one.layers) == 4
    assert not any("interface" in name for name, _ in build_model(SHAPE).named_parameters())


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second on whenever it is read, so that all that is timed takes one."""
    shown = itertools.count()
    monkeypatch.setattr(region_times, "perf_counter", lambda: float(next(shown)))


@pytest.mark.parametrize("jacobian", ["loop", "batched", "forward", "pullback"])
def test_units_leave_no_gradient(stack: GPT, jacobian: Jacobian, ticking: None) -> None:
    state = torch.get_rng_state()
    units = measure_units(stack, SHAPE.topology, random_tokens(SHAPE)[0], jacobian, repeats=1)
    assert units == Units(forward=1, vjp=1, jacobian=1, local=1)
    assert all(p.grad is None for p in stack.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_measured(architecture: Architecture, ticking: None) -> None:
    stack = build_model(SHAPE, INTERFACE, architecture)
    units = measure_units(stack, SHAPE.topology, random_tokens(SHAPE)[0], repeats=1)
    assert units == Units(forward=1, vjp=1, jacobian=1, local=1)


def test_medians_of_all_rounds_but_the_first(stack: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, VJP, Jacobian and local backward last 1, 10, 100 and 1000 times the factor of their round."""
    factors = (50, 1, 3, 2)  # of the rounds; the first must not count
    laps = [seconds * factor for factor in factors for seconds in (1.0, 10.0, 100.0, 1000.0)]
    shown = itertools.accumulate(itertools.chain.from_iterable((0.0, lap) for lap in laps))
    monkeypatch.setattr(region_times, "perf_counter", lambda: next(shown))
    units = measure_units(stack, SHAPE.topology, random_tokens(SHAPE)[0], repeats=3)
    assert units == Units(forward=2, vjp=20, jacobian=200, local=2000)
    assert next(shown, None) is None, "everything was timed once in each round"


def test_the_middle_region_is_the_one(stack: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = region_times.visit, []

    def spy(regions: Any, region: int, *rest: Any) -> Any:
        asked.append(region)
        return real(regions, region, *rest)

    monkeypatch.setattr(region_times, "visit", spy)
    measure_units(stack, SHAPE.topology, random_tokens(SHAPE)[0], repeats=1)
    assert asked == [2, 2]


def test_timed_gives_the_result(ticking: None) -> None:
    assert timed(lambda: 3, torch.device("cpu")) == (1.0, 3)


def test_choosing_is_measuring_and_planning(stack: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    units = Units(forward=1e-3, local=2e-3, vjp=1e-3, jacobian=1e-2)
    asked: list[tuple[Any, ...]] = []

    def measured(*given: Any) -> Units:
        asked.append(given)
        return units

    monkeypatch.setattr(measure, "measure_units", measured)
    inputs = random_tokens(SHAPE)[0]
    for workers in (1, 4):
        assert choose(stack, SHAPE.topology, inputs, workers, "batched") == choose_engine(units, 4, workers)
    assert asked == [(stack, SHAPE.topology, inputs, "batched")] * 2


def test_one_device_runs_autograd_and_says_why(stack: GPT) -> None:
    chosen = choose(stack, SHAPE.topology, random_tokens(SHAPE)[0], workers=1)
    assert chosen.engine == "autograd"
    assert "on one worker the span is the whole work, and the scan would take" in chosen.reason


def test_bad_input_is_refused(stack: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_tokens(SHAPE)[0]
    with refused(TopologyError, setting="regions", given=2):
        measure_units(stack, Topology.regions("2,2"), inputs)
    with refused(ConfigError, setting="repeats", given=0):
        measure_units(stack, SHAPE.topology, inputs, repeats=0)
    with pytest.raises(StackError, match="has no hand-written pullback"):
        measure_units(build_model(SHAPE, INTERFACE, "mamba2"), SHAPE.topology, inputs, "pullback")
    monkeypatch.setattr(measure, "measure_units", lambda *_: pytest.fail("measured before the refusal"))
    for workers in (0, 3):
        with refused(ConfigError, setting="workers"):
            choose(stack, SHAPE.topology, inputs, workers)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"regions": 2}, "regions is 2; it must be at least 3"),
        ({"region_layers": 0}, "region_layers is 0; it must be at least 1"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"width": 30}, "width is 30; it must be a multiple of twice the 4 heads"),
        ({"heads": 0}, "heads is 0; it must"),
        ({"vocab": 0}, "vocab is 0; it must"),
    ],
)
def test_a_shape_that_does_not_exist(settings: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Shape(**settings)


@pytest.mark.parametrize(
    ("units", "workers", "engine"),
    [
        (Units(jacobian=5), 1, "autograd"),
        (Units(jacobian=3), 4, "hybrid"),
        (Units(jacobian=100), 4, "hybrid"),
    ],
)
def test_a_plan_is_what_the_backward_takes(stack: GPT, units: Units, workers: int, engine: str) -> None:
    chosen = choose_engine(units, SHAPE.regions, workers)
    assert chosen.engine == engine
    inputs, targets = random_tokens(SHAPE)
    taken = Hybrid(carried=chosen.carried)
    how = Autograd() if engine == "autograd" else taken
    losses = train_step(stack, SHAPE.topology, inputs, targets, gradient=how)
    stack.zero_grad(set_to_none=True)
    assert losses[-1].isfinite()
    if units.jacobian == 100:
        assert chosen.carried == 2
        assert taken.jacobians is None, "backwards go all the way"
        assert taken.adjoints is not None
