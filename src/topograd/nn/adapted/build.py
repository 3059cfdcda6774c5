"""Adapted models of transformers, built from their settings with random weights."""

import importlib.util
import json

import torch

from topograd.errors import ConfigError, StackError
from topograd.nn.adapted.adapt import Adapted, adapt
from topograd.nn.adapted.spec import AdaptedConfig


def require_transformers(kind: str) -> None:
    """Raise ConfigError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        problem = f"{kind} has no stack of its own here and is run by transformers, which is not installed"
        raise ConfigError(problem, setting="family", given=kind, remedy="install topograd[hf]")


def build_adapted(config: AdaptedConfig) -> Adapted:
    """The stack, without its weights."""
    require_transformers(config.family)
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads(config.settings)
    for name in (
        "auto_map",
        "quantization_config",
        "_name_or_path",
    ):  # neither code nor paths of other machines
        settings.pop(name, None)
    try:
        theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
        theirs.use_cache = False
        model = AutoModelForCausalLM.from_config(
            theirs, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
        )
    except Exception as problem:  # any error of transformers
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        text = f"transformers cannot make a {config.family} of its config ({reason})"
        raise ConfigError(text, setting="settings", given=config.family) from None
    try:
        return adapt(model.eval(), layers=config.list, norm=config.norm, head=config.head)
    except StackError as problem:
        raise ConfigError(str(problem), setting=problem.setting, given=problem.given) from None
