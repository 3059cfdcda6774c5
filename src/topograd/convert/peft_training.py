"""Held directions for people who train with peft or with transformers' Trainer.

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = held_peft_model(model, config, old_batches, new_batches)      # a PeftModel; B alone learns
    Trainer(model=model, ...).train()
    model.save_pretrained("adapter")                                      # an ordinary adapter of peft's

A is set to the *safe* or *dead* directions of what each map reads (`geometry/safe_directions.py`) and gets
requires_grad=False. The model computes the same as before. A rate ten times LoRA's own is what B needs.
It needs peft.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from topograd.errors import ConfigError
from topograd.exec.forward import evaluating
from topograd.geometry.safe_directions import Kind, adapter_directions, input_moments


def held_peft_model(
    model: nn.Module, config: Any, old: Iterable[Tensor], new: Iterable[Tensor], directions: Kind = "safe"
) -> Any:
    """The model with a LoRA by `config`, whose A is held; `old` and `new` are batches of token ids."""
    try:
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ConfigError("held_peft_model needs peft", remedy="pip install peft") from None
    if getattr(config, "use_dora", False) or getattr(config, "init_lora_weights", True) is not True:
        raise ConfigError(
            "directions are held of a plain LoRA that begins with B = 0",
            setting="config",
            remedy="leave out use_dora and init_lora_weights",
        )
    made = get_peft_model(model, config)
    found: dict[str, Any] = {n: layer for n, layer in made.named_modules() if isinstance(layer, LoraLayer)}
    maps = [f"{name}.base_layer" for name in found]
    with evaluating(made):
        before, after = (input_moments(made, maps, text) for text in (old, new))
    for place, layer in zip(maps, found.values(), strict=True):
        for down in layer.lora_A.values():
            down.weight.requires_grad_(False)
            if place in before and place in after:  # the texts reach it
                down.weight.copy_(
                    adapter_directions(directions, before[place], after[place], len(down.weight))
                )
    return made
