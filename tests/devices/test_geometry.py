"""Geometry on the second device: every reading is the CPU's, and what belongs together is read together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topograd as tg
from devices import assert_same, on_both
from papers.dead_directions.bottoms import BottomMonitor
from papers.dead_directions.projections import bottom_direction, project_gradients
from papers.dead_directions.sgld import Sgld, sample_learning_coefficient
from tests.devices.pinned import check, pinned
from topograd import geometry
from topograd.geometry.singular.langevin import Noise

Begin = Callable[[], None]


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double().to(device)


def data(device: torch.device, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 6, generator=generator).double()
    labels = torch.randint(4, (rows,), generator=generator)
    labels[0] = -100
    return inputs.to(device), labels.to(device)


def small_gpt(device: torch.device) -> tg.GPT:
    torch.manual_seed(0)
    model = tg.GPT(layers=2, width=16, heads=2, vocab=23, context=12).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def text(device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(23, (4, 12), generator=torch.Generator().manual_seed(1)).to(device)
    return tokens, tokens.roll(-1, 1)


@pytest.mark.parametrize(
    ("model", "fisher"),
    [
        ("network", "empirical"),
        ("network", "expected"),
        ("network", "monte-carlo"),
        ("gpt", "empirical"),
        ("gpt", "monte-carlo"),
    ],
)
def test_factors(model: str, fisher: Any) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        made = network(device) if model == "network" else small_gpt(device)
        batch = data(device) if model == "network" else text(device)
        generator = torch.Generator(device).manual_seed(0)
        begin()
        return dict(geometry.kfac_factors(made, batch, fisher=fisher, generator=generator))

    expected, result, transfers = on_both(run)
    check(transfers, "`kfac_factors`")
    assert_same(result, expected, 1e-12)


READERS: dict[str, Callable[[torch.device], Any]] = {
    "inspect": lambda d: geometry.inspect(network(d), data(d)),
    "inspect a gpt": lambda d: geometry.inspect(small_gpt(d), text(d)),
    "read_checkpoint": lambda d: _told(geometry.read_checkpoint(network(d), data(d))),
    "weight_norm": lambda d: geometry.weight_norm(network(d)),
    "input_moments": lambda d: geometry.input_moments(network(d), ["3"], [data(d)[0]]),
    "read_maps": lambda d: geometry.read_maps(network(d), ["3"], data(d)),
    "projections": lambda d: _projected(network(d), data(d)),
    "bottoms": lambda d: _bottoms(network(d), data(d)),
    "stream": lambda d: _stream(small_gpt(d), text(d)[0]),
    "kernels": lambda d: _kernels(network(d), data(d)[0]),
    "sgld": lambda d: sample_learning_coefficient(
        network(d),
        F.cross_entropy,
        *data(d, 40),
        Sgld(step=1e-4, burn_in=5, draws=10, chains=2, batch=9),
    ),
}


def _told(reading: geometry.CheckpointReading) -> list[Any]:
    return [(one.layer, one.kind, one.group, one.order, one.limit) for one in reading.directions]


def _projected(model: nn.Module, batch: Any) -> Any:
    factors = geometry.kfac_factors(model, batch)
    directions = {name: bottom_direction(one) for name, one in factors.items()}
    return project_gradients(model, batch, directions)


def _bottoms(model: nn.Module, batch: Any) -> Mapping[str, list[Tensor]]:
    monitor = BottomMonitor()
    factors = geometry.kfac_factors(model, batch)
    for t in (0.1, 0.2):
        monitor.record(t, factors)
    return monitor._spectra


def _stream(model: nn.Module, tokens: Tensor) -> geometry.StreamProfile:
    with torch.no_grad(), geometry.StreamMonitor(model) as monitor:
        for _ in range(2):
            model(tokens)
        return monitor.profile()


def _kernels(model: nn.Module, inputs: Tensor) -> Any:
    with geometry.KernelMonitor(model) as monitor:
        model(inputs)
        return monitor.readings()


@pytest.mark.parametrize("name", READERS)
def test_readings(name: str) -> None:
    expected, result, _ = on_both(lambda device, begin: READERS[name](device))
    assert_same(result, expected, 1e-7)


@pytest.mark.parametrize(("precondition", "step"), [("none", 1e-4), ("rmsprop", 1e-4), ("none", None)])
def test_the_learning_coefficient(
    precondition: Any, step: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # places among batches are drawn on the CPU, where they would move the CPU's noise and no device's
    monkeypatch.setattr(Noise, "place", lambda self, count: 0)

    def run(device: torch.device, begin: Begin, draws: int = 8) -> Any:
        settings = geometry.Langevin(
            step=step, burn_in=6, draws=draws, chains=2, thin=2, precondition=precondition
        )
        torch.manual_seed(0)
        model, batch = nn.Linear(6, 4).double().to(device), data(device, 40)
        begin()
        result = geometry.learning_coefficient(model, "cross-entropy", batch, settings)
        return result.value, result.virial, result.step, result.traces.cpu()

    expected, result, short = on_both(run)
    assert_same(result, expected, 1e-9)
    assert short.writes == 0, "noise is drawn where the weights are"
    if step is not None:
        _, _, long = on_both(lambda device, begin: run(device, begin, draws=12))
        assert long.reads - short.reads == 2 * 4 * pinned("`learning_coefficient`")[0]


def test_early_warning_is_one_read_a_step() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        model = small_gpt(device)
        tokens, targets = text(device)
        optimizer = torch.optim.AdamW(model.parameters())
        seen: list[Any] = []
        warning = geometry.EarlyWarning(
            model, optimizer=optimizer, slow_every=2, writer=lambda step, values: seen.append(dict(values))
        )
        with warning:
            for step in range(4):  # the last has no slow signals
                optimizer.zero_grad()
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                begin()
                warning.read(step, loss)
                optimizer.step()
        return seen

    expected, result, transfers = on_both(run)
    check(transfers, "`EarlyWarning.read`")
    assert_same(result, expected, 1e-6)
    assert len(expected[2]) > len(expected[3]) > 0
