"""LoRA changes nothing at first, learns alone, and merges into what it computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError, StackError
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.lora import add_lora, has_lora, linear_maps, merge_lora
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer

TOKENS = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(0))


def gpt(architecture: str = "transformer") -> Stack:
    shape: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "vocab": 40, "context": 8, "ssm_state": 4}
    return GPT(GPTConfig(architecture=architecture, **shape))


def transformer(family: Any) -> Stack:
    shape: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "head_width": 8}
    biased = family == "gpt2"
    return Transformer(
        TransformerConfig(
            family=family,
            mlp_width=24,
            vocab=40,
            context=8,
            qkv_bias=biased,
            output_bias=biased,
            mlp_bias=biased,
            **shape,
        )
    )


@pytest.fixture(params=["transformer", "mamba2", "llama", "gpt2"])
def stack(request: pytest.FixtureRequest) -> Stack:
    torch.manual_seed(1)
    made = transformer(request.param) if request.param in ("llama", "gpt2") else gpt(request.param)
    made.double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def loss(stack: Stack) -> Tensor:
    return stack(TOKENS).log_softmax(-1)[..., 3].sum()


def test_nothing_changes_until_it_learns_and_everything_learns(stack: Stack) -> None:
    before, names = stack(TOKENS), set(stack.state_dict())
    count = add_lora(stack.layers, 3)
    assert torch.equal(stack(TOKENS), before)
    added = set(stack.state_dict()) - names
    assert len(added) == 2 * count
    assert {name.rpartition(".")[2] for name in added} == {"lora_a", "lora_b"}
    assert {n for n, p in stack.layers.named_parameters() if p.requires_grad} == {
        name.removeprefix("layers.") for name in added
    }
    for name in added:
        if name.endswith("lora_b"):
            torch.nn.init.normal_(stack.get_parameter(name), std=0.1)
    loss(stack).backward()
    for name in added:  # none is passed by: every map is called as a module
        gradient = stack.get_parameter(name).grad
        assert gradient is not None
        assert gradient.abs().max() > 0, name


@pytest.mark.covers("gpt", "decode", feature="lora")
@pytest.mark.covers("mamba", "train", "decode", feature="lora")
@pytest.mark.covers("imported", "decode", feature="lora")
def test_merged_it_is_an_ordinary_model_with_the_same_logits(stack: Stack) -> None:
    names = set(stack.state_dict())
    plain = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    add_lora(stack.layers, 2, alpha=6.0)
    with torch.no_grad():
        for module in stack.modules():
            if has_lora(module):
                module.lora_b.normal_(std=0.3)  # type: ignore[operator]
    before = stack(TOKENS)
    first = next(m for m in linear_maps(stack.layers[0]))
    wanted = 3.0 * (first.lora_b @ first.lora_a)  # type: ignore[operator]
    count = merge_lora(stack)
    assert count > 0
    assert set(stack.state_dict()) == names
    torch.testing.assert_close(stack(TOKENS), before, rtol=1e-10, atol=1e-12)
    where = next(name for name, module in stack.named_modules() if module is first)
    delta = stack.get_parameter(f"{where}.weight") - plain[f"{where}.weight"]
    torch.testing.assert_close(delta.T if delta.shape != wanted.shape else delta, wanted)
    assert merge_lora(stack) == 0


def test_what_does_not_fit_is_refused() -> None:
    stack = gpt()
    with refused(ConfigError, setting="lora_rank", given=0):
        add_lora(stack.layers, 0)
    with refused(ConfigError, setting="lora_rank", given=17):
        add_lora(stack.layers, 17)
    with refused(StackError, setting="layers"):
        add_lora([torch.nn.LayerNorm(4)], 2)
    stack = gpt()
    add_lora(stack.layers, 2)
    with refused(StackError, setting="layers"):
        add_lora(stack.layers, 2)
