"""Hugging Face models as stacks, bit for bit. Random weights from config classes; nothing is downloaded."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raising import refused
from topograd.errors import StackError
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.nn.adapted.adapt import Adapted, adapt
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

Foreign = tuple[Any, Adapted]


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient, by name; they are taken away."""
    result = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return result


def test_logits_bit_for_bit(foreign: Foreign) -> None:
    model, stack = foreign
    with torch.no_grad():
        expected = model(tokens()).logits
        assert torch.equal(stack(tokens()), expected)
        plan = Plan.of(Topology.chain("2,2"), 4)
        last = stage_outputs(stack, plan, tokens(), [1])[1]
        assert torch.equal(stack.readout(last, 1), expected)
    stack.verify(tokens())


def test_one_stage_gives_the_models_own_gradients_bit_for_bit(foreign: Foreign) -> None:
    model, stack = foreign
    targets = tokens(seed=2)
    targets[0, 3] = -100
    loss = F.cross_entropy(model(tokens()).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    expected = gradients(model)
    assert torch.equal(train_step(stack, Topology.chain("4"), tokens(), targets), loss.detach()[None])
    result = gradients(model)
    assert result.keys() == expected.keys()
    assert [name for name in result if not torch.equal(result[name], expected[name])] == []


def test_eager_gpt2_is_the_one_without_a_cache(models: dict[str, Callable[..., Any]]) -> None:
    """With a cache, GPT-2's own eager logits differ from these in the last bit at this size."""
    model = models["gpt2"](attn_implementation="eager").eval()
    stack = adapt(model, layers="transformer.h", norm="transformer.ln_f", head="lm_head")
    with torch.no_grad():
        assert torch.equal(stack(tokens()), model(tokens(), use_cache=False).logits)
    stack.verify(tokens())


def test_every_parameter_of_the_model_once(foreign: Foreign) -> None:
    model, stack = foreign
    own = [id(p) for p in model.parameters()]
    assert [id(p) for p in stack.parameters()] == own
    assert len({name for name, _ in stack.named_parameters()}) == len(own)
    stack.add_heads(range(2))
    assert [id(p) for p in stack.parameters()][: len(own)] == own
    assert [id(p) for p in model.parameters()] == own


def test_the_model_stays_as_it_is(foreign: Foreign) -> None:
    model, stack = foreign
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spaces = [set(vars(module)) for module in model.modules()]
    train_step(stack, Topology.chain("2,2"), tokens(), tokens())
    stack.verify(tokens())
    model.zero_grad()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [set(vars(module)) for module in model.modules()] == spaces
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_no_cache_is_made_or_kept(foreign: Foreign) -> None:
    model, stack = foreign
    assert model.config.use_cache
    inputs = tokens()
    with torch.no_grad():
        calls = stack.layer_context(stack.embed(inputs), inputs).calls
    assert len(calls) == 4
    assert all(call.kwargs["use_cache"] is False for call in calls)
    assert all(call.kwargs.get("past_key_values") is None for call in calls)


def test_layers_may_have_masks_of_their_own(models: dict[str, Callable[..., Any]]) -> None:
    model = models["qwen2"]().eval()
    stack = adapt(model, layers="model.layers", norm="model.norm", head="lm_head")
    calls = stack.layer_context(stack.embed(tokens()), tokens()).calls
    masks = [call.kwargs["attention_mask"] for call in calls]
    assert masks[0] is None
    assert masks[3] is not None
    stack.verify(tokens())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dropout_draws_what_the_model_draws(models: dict[str, Callable[..., Any]], name: str) -> None:
    if name == "gpt2":
        model = models[name](dropout=0.2).train()
        stack = adapt(model, layers="transformer.h", norm="transformer.ln_f", head="lm_head")
    else:
        model = models[name](attention_dropout=0.2).train()
        stack = adapt(model, layers="model.layers", norm="model.norm", head="lm_head")
    torch.manual_seed(5)
    logits = model(tokens(), use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    after, expected = torch.rand(1), gradients(model)
    torch.manual_seed(5)
    train_step(stack, Topology.chain("4"), tokens(), tokens())
    assert torch.equal(torch.rand(1), after)
    result = gradients(model)
    assert [n for n in expected if not torch.equal(result[n], expected[n])] == []
    torch.manual_seed(5)
    stack.verify(tokens())
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state())


def test_gradient_checkpointing_of_the_model_goes_on_working(models: dict[str, Callable[..., Any]]) -> None:
    model = models["llama"]().double().train()
    stack = adapt(model, layers="model.layers", norm="model.norm", head="lm_head")
    train_step(stack, Topology.chain("2,2"), tokens(), tokens())
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    train_step(stack, Topology.chain("2,2"), tokens(), tokens())
    result = gradients(model)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_logits_that_the_model_changes_are_found() -> None:
    """Gemma 2 caps its logits behind the head."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 4,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3}
    for softcap in (0.1, None):
        config = transformers.Gemma2Config(**sizes | heads, final_logit_softcapping=softcap)
        model = transformers.Gemma2ForCausalLM(config).eval()
        stack = adapt(model, layers="model.layers", norm="model.norm", head="lm_head")
        if softcap is None:
            stack.verify(tokens())
        else:
            with refused(StackError, setting="model", given="Gemma2ForCausalLM"):
                stack.verify(tokens())


def test_the_example_learns(examples: Path) -> None:
    pytest.importorskip("transformers")
    history = runpy.run_path(str(examples / "adapt_llama.py"))["main"](steps=8)
    assert all(last < 0.8 * first for first, last in zip(history[0], history[-1], strict=True))
