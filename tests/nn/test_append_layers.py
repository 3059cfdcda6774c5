"""Layers appended to a trained GPT: the identity until they learn, and nothing before them changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from raising import refused
from topograd.errors import StackError
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "vocab": 23, "context": 9, "ssm_state": 4}
ARCHITECTURES = ("transformer", "mamba2", "mamba3", "hybrid")


def trained(layers: int, architecture: str = "transformer", **settings: Any) -> GPT:
    """A GPT with noise on every parameter, as if it had learned."""
    torch.manual_seed(0)
    model = GPT(layers=layers, architecture=architecture, **SIZES | settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("added", [1, 2, 3])
@pytest.mark.parametrize("layers", [3, 4, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_outputs_are_bit_identical(architecture: str, layers: int, added: int) -> None:
    """In float32, as it is trained: not close, the same (D2)."""
    model = trained(layers, architecture)
    before = model(tokens())
    model.append_layers(added)
    assert len(model.layers) == model.config.layers == layers + added
    assert torch.equal(model(tokens()), before)


@pytest.mark.parametrize("layers", [3, 4, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_deeper_model_loads_its_base(architecture: str, layers: int) -> None:
    """Each layer is what it was, whatever the depth is odd or even (D3)."""
    base = trained(layers, architecture)
    deeper = GPT(replace(base.config, layers=layers + 1))
    own = deeper.state_dict()
    for name, tensor in base.state_dict().items():
        assert own[name].shape == tensor.shape, name
    missing, unexpected = deeper.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith(f"layers.{layers}.") for name in missing)

    base.append_layers(1)
    assert base.state_dict().keys() == own.keys()
    deeper.load_state_dict(base.state_dict())
    with torch.no_grad():
        assert torch.equal(deeper(tokens()), base(tokens()))
    assert deeper.config == base.config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_appended_layers_learn_at_once(architecture: str) -> None:
    model = trained(4, architecture)
    model.append_layers(2)
    cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1, 1).flatten()).backward()
    for layer in model.layers[4:]:
        assert any(p.grad is not None and p.grad.any() for p in layer.parameters())


def test_a_specialist_on_an_odd_base_starts_as_its_base() -> None:
    """Its losses are those of the base's last stage, for its head starts where the shared one is."""
    model = trained(3, x0_blend=True)
    inputs, targets = tokens(), tokens().roll(-1, 1)
    base = train_step(model, "1,2", inputs, targets)
    model.zero_grad()
    model.append_layers(2)
    topology = Topology.chain("1,2").with_specialist(2)
    prepare(model, topology)
    assert torch.equal(train_step(model, topology, inputs, targets)[2], base[1])
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learning
    assert all(name.startswith(("layers.3.", "layers.4.", "head.deltas.2.")) for name in learning)


def test_windows_go_on_where_they_were() -> None:
    model = trained(3, windows=(3, 0))
    before = model(tokens())
    model.append_layers(1)
    assert [layer.get_submodule("attention").window for layer in model.layers] == [3, 0, 3, 0]
    assert torch.equal(model(tokens()), before)


def test_they_take_the_models_precision() -> None:
    model = trained(3).double()
    model.append_layers(1)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


COUNTED = [
    ("transformer", 3, True),
    ("transformer", 5, True),
    ("transformer", 6, False),
    ("hybrid", 6, True),
    ("hybrid", 8, False),
    ("mamba2", 3, False),
]


@pytest.mark.parametrize(("architecture", "layers", "raises"), COUNTED)
def test_a_model_that_counts_from_its_last_layer(architecture: str, layers: int, raises: bool) -> None:
    """A run of version 0.1 can grow where both ways of counting give its layers; else it says so."""
    model = trained(layers, architecture, count_from="last")
    before = model(tokens())
    if raises:
        with refused(StackError, setting="count_from", given="last"):
            model.append_layers(1)
        assert len(model.layers) == model.config.layers == layers
        return
    model.append_layers(1)
    assert torch.equal(model(tokens()), before)
    again = GPT(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens()), before)
