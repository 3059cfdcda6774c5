"""Which layers of an architecture are recurrent, and that a new one starts silent."""

from typing import Any, Literal

import pytest
import torch

from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.mamba.mamba3 import Mamba3Mixer
from topograd.nn.mamba.recurrent import RecurrentState
from topograd.nn.transformer.block import Block, MixerBlock

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "vocab": 11, "context": 8, "ssm_state": 4}


@pytest.mark.parametrize(
    ("architecture", "layers", "count_from", "expected"),
    [
        ("transformer", 3, "first", "AAA"),
        ("mamba2", 3, "first", "222"),
        ("mamba3", 3, "first", "333"),
        ("hybrid", 8, "first", "333A333A"),
        ("hybrid", 6, "first", "333A33"),
        ("hybrid", 2, "first", "33"),
        ("hybrid", 8, "last", "333A333A"),
        ("hybrid", 6, "last", "3A333A"),
        ("hybrid", 2, "last", "3A"),
    ],
)
def test_the_layers_of_an_architecture(
    architecture: str, layers: int, count_from: Literal["first", "last"], expected: str
) -> None:
    config = GPTConfig(layers=layers, architecture=architecture, count_from=count_from, **SIZES)
    letters = {"attention": "A", "mamba2": "2", "mamba3": "3"}
    assert "".join(letters[config.mixer(i)] for i in range(layers)) == expected
    kinds = [MixerBlock if letter != "A" else Block for letter in expected]
    assert [type(layer) for layer in GPT(config).layers] == kinds


def test_a_new_layer_passes_its_input_on_and_learns() -> None:
    torch.manual_seed(0)
    gpt = GPT(layers=1, architecture="mamba3", x0_blend=False, **SIZES)
    inputs = torch.randint(11, (2, 8))
    x0 = gpt.embed(inputs)
    h = gpt.layers[0](x0, gpt.layer_context(x0, inputs))
    assert torch.equal(h, x0)
    h.square().sum().backward()
    mixer = gpt.layers[0].mixer
    assert isinstance(mixer, Mamba3Mixer)
    assert mixer.out_proj.weight.grad is not None
    assert mixer.out_proj.weight.grad.abs().max() > 0


def test_chosen_rows_and_the_state() -> None:
    torch.manual_seed(0)
    gpt = GPT(layers=4, architecture="hybrid", **SIZES).double()
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs, rows = torch.randint(11, (2, 8)), torch.tensor([1, 4, 7])
    x0 = gpt.embed(inputs)
    ctx = gpt.layer_context(x0, inputs)
    for layer in gpt.layers:
        whole, some = layer(x0, ctx), layer(x0, ctx, rows=rows)
        torch.testing.assert_close(some, whole[:, rows], rtol=1e-12, atol=1e-12)
    assert isinstance(gpt.layers[0].new_state(2, 8), RecurrentState)  # type: ignore[operator]
