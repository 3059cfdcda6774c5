"""`topograd probe ladder`: exponents of a run, of a module of Python's, of a class of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from topograd.runs.folder import Run

Call = Callable[..., Any]
UNIT = ("--unit", "mlp.0")


def chain() -> nn.Module:
    """A module that a user has."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_the_command_of_the_contract(call: Call) -> None:
    words = ("probe", "ladder", "--module", "transformers:LlamaForCausalLM", "--tiny", *UNIT)
    layers = call(*words, "--json").json["layers"]
    assert len(layers) == 6
    for layer in layers:
        assert layer["predicted"] == 4
        assert layer["measured"] == pytest.approx(4, abs=0.01)
    assert "gate_proj" in call(*words).out


def test_a_run_and_a_module_of_ones_own(call: Call, straight: Run) -> None:
    layers = call("probe", "ladder", straight.folder, *UNIT, "--json").json["layers"]
    assert {layer["name"].rsplit(".", 1)[1] for layer in layers} == {"up", "down"}
    words = ("--module", f"{__name__}:chain", "--shape", "5,4", "--unit", "0.3")
    layers = call("probe", "ladder", *words, "--json").json["layers"]
    assert [(layer["name"], layer["predicted"]) for layer in layers] == [("0", 2), ("2", 2)]
    assert torch.tensor([layer["measured"] for layer in layers]).sub(2).abs().max() < 0.01


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--module", "transformers:LlamaForCausalLM", *UNIT), "--tiny"),
        (("--module", "nowhere:Model", *UNIT), "nowhere:Model"),
        (("--module", "math:pi", *UNIT), "math:pi"),
        (("--module", f"{__name__}:chain", "--unit", "0.1"), "--shape"),
        (("--module", f"{__name__}:chain", "--shape", "5,x", "--unit", "0.1"), "5,x"),
        (("--module", f"{__name__}:chain", "--shape", "5,4", "--unit", "0.9"), "0.9"),
        (("somewhere", "--module", "math:pi", *UNIT), "MODEL"),
        (("--tiny", *UNIT), "--module"),
    ],
)
def test_bad_requests_are_one_line(call: Call, words: tuple[str, ...], named: str) -> None:
    found = call("probe", "ladder", *words)
    assert found.code == 2
    assert named in found.err
    assert len(found.err.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_tiny_models_with_experts_are_tiny(kind: str) -> None:
    """Their classes have 60 and 128 experts by default."""
    import transformers

    from topograd.cli.probe_ladder import _tiny

    found = getattr(transformers, kind)
    model, inputs, _ = _tiny(found, found.config_class)
    assert sum(p.numel() for p in model.parameters()) < 200_000
    assert model(**inputs).logits.shape[-1] == 96
