"""The module of an adapted run, built from its settings by transformers, with random weights."""

from __future__ import annotations

import importlib.util
import json

import torch

from topograd.errors import ConfigError, StackError
from topograd.nn.adapted.adapt import Adapted, adapt
from topograd.nn.adapted.spec import AdaptedConfig


def require_transformers(kind: str) -> None:
    """One line where the extra is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{kind} has no stack of its own here and is run by transformers, which is not installed: "
            "install topograd[hf]"
        )


def build_adapted(config: AdaptedConfig) -> Adapted:
    """The stack, without its weights."""
    require_transformers(config.family)
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads(config.settings)
    for name in ("auto_map", "quantization_config", "_name_or_path"):  # no code and no place of others
        settings.pop(name, None)
    try:
        theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
        theirs.use_cache = False
        model = AutoModelForCausalLM.from_config(
            theirs, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
        )
    except Exception as problem:  # of transformers, whatever its class
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise ConfigError(f"transformers cannot make a {config.family} of its config ({reason})") from None
    try:
        return adapt(model.eval(), layers=config.list, norm=config.norm, head=config.head)
    except StackError as problem:
        raise ConfigError(str(problem)) from None
