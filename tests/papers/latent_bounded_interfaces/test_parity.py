"""Parity on few trials, the comparison itself, and that no parameter can be skipped."""

import json
import math

import pytest
import torch
from torch import nn

from papers.latent_bounded_interfaces import parity as parity_module
from papers.latent_bounded_interfaces.parity import (
    INTERFACE,
    difference,
    parity,
    random_model,
    taken_gradients,
)
from raising import refused
from topograd.errors import ConfigError, StackError
from topograd.nn.config import ARCHITECTURES, Architecture
from topograd.nn.gpt import GPT
from topograd.runs.topology_config import Backward, Jacobian


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_promises(architecture: Architecture) -> None:
    found = parity(architecture, trials=1, batches=1)
    assert json.loads(json.dumps(found)) == found
    assert (found["architecture"], found["trials"], found["batches"]) == (architecture, 1, 1)
    assert found["parameters"] == len(list(random_model(architecture, INTERFACE, 0).parameters()))
    exact, single = found["float64"], found["float32"]
    assert exact["worst_tensor"] <= 1e-12
    assert 0 < exact["rel_l2"] <= exact["worst_tensor"]
    assert 0 < exact["max_abs"] < 1e-12
    assert abs(exact["cosine"] - 1) < 1e-12
    assert 1e-10 < single["rel_l2"] <= 1e-6, "float32 is float32, and keeps the promise"
    assert abs(single["cosine"] - 1) < 1e-12
    coarse = found["bfloat16"]
    assert 1e-5 < coarse["rel_l2"] < 0.5 * coarse["autograd_from_float64"] < 0.03, "less than bfloat16 loses"
    assert coarse["from_float64"] < 1.2 * coarse["autograd_from_float64"]


@pytest.mark.parametrize(("engine", "jacobian"), [("hybrid", "pullback"), ("scan", "batched")])
def test_other_engines(engine: Backward, jacobian: Jacobian) -> None:
    found = parity(trials=1, batches=1, engine=engine, jacobian=jacobian)
    assert found["float64"]["worst_tensor"] <= 1e-12
    assert found["float32"]["rel_l2"] <= 1e-6


def test_an_engine_equals_itself() -> None:
    found = parity(trials=1, batches=1, engine="autograd")
    for name in ("float64", "float32"):
        assert (found[name]["max_abs"], found[name]["rel_l2"]) == (0, 0)
        assert found[name]["cosine"] == pytest.approx(1, abs=1e-14)


def test_the_worst_of_all_batches_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two initialisations of three batches, each other than the rest, in both dtypes."""
    seen: list[tuple[torch.dtype, float, int]] = []

    def spoilt(stack: GPT, inputs: torch.Tensor, targets: torch.Tensor, engine: str, jacobian: str) -> object:
        weight = stack.embedding.weight
        if engine == "scan":
            seen.append((weight.dtype, float(weight.detach().sum()), int((inputs * torch.arange(32)).sum())))
        off = 0.1 * len(seen) % 0.5 if engine == "scan" else 0.0
        return {"a": torch.tensor([1.0, off]), "b": torch.tensor([2.0])}

    monkeypatch.setattr(parity_module, "gradients", spoilt)
    found = parity(trials=2, batches=3)
    assert len(seen) == 18
    assert len({weight for _, weight, _ in seen}) == 6, "two initialisations in three dtypes"
    assert len({batch for _, _, batch in seen}) == 6
    # Offsets 0.1 .. 0.4, 0, 0.1 in float64: the worst is in the middle.
    assert found["float64"]["max_abs"] == pytest.approx(0.4)
    assert found["float64"]["worst_tensor"] == pytest.approx(0.4)
    assert found["float64"]["worst_tensor_name"] == "a"
    assert found["float64"]["rel_l2"] == pytest.approx(0.4 / math.sqrt(5))
    assert found["float64"]["cosine"] == pytest.approx(math.sqrt(5) / math.sqrt(5.16))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_parameter_of_the_model_is_zero(architecture: Architecture) -> None:
    for name, parameter in random_model(architecture, INTERFACE, 0).named_parameters():
        assert (parameter != 0).all(), name


def test_models_differ_by_seed_alone_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (random_model("transformer", INTERFACE, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    mine, same, another = (stack.state_dict() for stack in (first, again, other))
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert not any(torch.equal(mine[name], another[name]) for name, _ in first.named_parameters())


def test_difference_by_hand() -> None:
    expected = {"long": torch.tensor([3.0, 4.0]), "short": torch.tensor([0.0, 1.0]), "none": torch.zeros(2)}
    actual = {"long": torch.tensor([3.0, 4.5]), "short": torch.tensor([0.2, 1.0]), "none": torch.zeros(2)}
    found = difference(actual, expected)
    assert found.max_abs == 0.5
    assert found.worst == (pytest.approx(0.2), "short")
    assert found.rel_l2 == pytest.approx(math.sqrt(0.29 / 26))
    assert found.cosine == pytest.approx(28 / math.sqrt(26 * 30.29))


@pytest.mark.parametrize("wrong", [1.0, math.nan])
def test_a_difference_from_nothing_is_infinite(wrong: float) -> None:
    found = difference(
        {"a": torch.ones(1), "b": torch.tensor([wrong])}, {"a": torch.ones(1), "b": torch.zeros(1)}
    )
    assert found.worst == (math.inf, "b")
    assert found.max_abs == (1.0 if wrong == 1 else math.inf)


def test_a_parameter_without_gradient_is_an_error() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.zeros_like(module.weight)
    with refused(StackError, setting="engine", given="scan"):
        taken_gradients(module, "scan")


@pytest.mark.parametrize("name", ["trials", "batches"])
def test_no_trials(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; parity needs at least 1"):
        parity(**{name: 0})  # type: ignore[arg-type]


def test_an_unknown_architecture() -> None:
    with refused(StackError, setting="architecture", given="rnn"):
        parity("rnn", trials=1)  # type: ignore[arg-type]
