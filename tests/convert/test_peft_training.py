"""Directions held in a model of peft's: nothing changes at first, and B alone learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.convert.peft_training import held_peft_model
from topograd.errors import ConfigError
from topograd.geometry.safe_directions import adapter_directions, input_moments

peft = pytest.importorskip("peft")
OLD, NEW = (torch.randint(300, (3, 12), generator=torch.Generator().manual_seed(s)) for s in (1, 2))


def small(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def config(**changes: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", **changes)


def test_safe_directions_are_held(source: Any) -> None:
    model = small(source("llama")[0])
    before = model(NEW).logits
    maps = [n for n, _ in model.named_modules() if n.endswith(("q_proj", "up_proj"))]
    old, new = (input_moments(model, maps, [text]) for text in (OLD, NEW))
    made = held_peft_model(model, config(), [OLD], [NEW])
    torch.testing.assert_close(made(NEW).logits, before)
    learns = {name for name, p in made.named_parameters() if p.requires_grad}
    assert learns
    assert all("lora_B" in name for name in learns)
    layer = made.base_model.model.model.layers[1].self_attn.q_proj
    name = "model.layers.1.self_attn.q_proj"
    wanted = adapter_directions("safe", old[name], new[name], 2)
    torch.testing.assert_close(layer.lora_A["default"].weight.double(), wanted, rtol=1e-4, atol=1e-6)


def test_a_step_learns_the_new_text(source: Any) -> None:
    made = held_peft_model(small(source("llama")[0]), config(), [OLD], [NEW], "dead")
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(4):
        loss = made(NEW, labels=NEW).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_other_beginnings_are_refused(source: Any) -> None:
    with refused(ConfigError, setting="config"):
        held_peft_model(small(source("llama")[0]), config(use_dora=True), [OLD], [NEW])
